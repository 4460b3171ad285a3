"""The check of each operator: the host's value of a node against the one that the device recorded, and whether the kernel is bad.

Errors propagate: behind a wrong kernel every value is wrong, and in a deep int8 program the rounding of right kernels adds up to
less SNR than a wrong one leaves. So each operator is judged by the error that it adds: the host computes it again from the values
that the device recorded before it (the nearest ones in the graph, not in time), so that the two differ by the kernel alone. An
operator is bad if they differ by THRESHOLD_DB more than rounding explains.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from etfarm.server.reports.numerics import choices, edge
from etfarm.server.reports.numerics.accuracy import EXACT_DB
from etfarm.server.reports.numerics.counterparts import Output
from etfarm.server.reports.numerics.deviation import Array, Deviation, deviation, histogram, summary
from etfarm.server.reports.trace import graph
from etfarm.server.reports.trace.recording import Recording
from etfarm.v1 import report_pb2
from etfarm.wire.errors import FarmError

if TYPE_CHECKING:
    from torch.fx import Node

THRESHOLD_DB: Final = 20.0
"""Ten times what rounding explains. Measured on int8 programs (resnet8, ds_cnn, mobilenet_v1, resnet18): right kernels are 0.19
steps off at most, by this; with a quarter of its weights reversed a convolution is 20 and more."""

_ROUNDING: Final = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}
"""Part of the values' own size that a right kernel is off, as the root of the mean squares. XNNPACK approximates tanh, gelu and
softmax to 1e-5."""

_ROUNDING_STEPS: Final = 0.1
"""The same of quantized values, in steps of their scale: one element of a hundred is a step off."""

_ROUNDING_DYNAMIC: Final = 3e-3
"""The same of float values that quantized ones inside the group gave: the device chooses its scales itself."""

_LARGER: Final = 10 ** (THRESHOLD_DB / 20)

_REFUSALS: Final = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
"""The errors that torch raises for a value that an operator does not accept."""

_LOG = logging.getLogger(__name__)


class OutOfTime(FarmError):
    """The host took too long; the comparisons before remain."""

    reason = "OUT_OF_TIME"


@dataclass
class Slot:
    """One row of the report under construction."""

    output: Output
    node: Node
    """Of the reference's graph."""
    group: tuple[edge.Operator, ...]
    expected: report_pb2.ValueSummary | None = None
    actual: report_pb2.ValueSummary | None = None
    histogram: report_pb2.ValueHistogram | None = None
    found: Deviation | None = None
    """Of the numbers that the values stand for; None until they were compared."""
    own: Deviation | None = None
    """What the operator adds itself: of the values as recorded, integers where they are quantized."""
    size: float = 0.0
    """Root of the mean square of what the operator should have given by that."""
    chosen: str = ""
    """Where places of elements were given: the dtype of those, which `own` and `size` are about."""
    refused: bool = False
    """Whether it differs, and the host cannot go on with it: a place where there is no element."""


class Observer:
    """The comparison of the host's values with the device's, one by one.

    Args:
        numbers: by an operator's index, what turns its quantized values into the numbers that they stand for; the run of the
            quantized program finds them out, that of the program before quantization uses them.
        judges: whether it also computes what each operator gives for what the device gave before it.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        recording: Recording,
        numbers: dict[int, Callable[[Array], Array]],
        deadline_s: float,
        *,
        judges: bool,
    ) -> None:
        self._recording = recording
        self._judges = judges
        self._given: dict[Node, Any] = {}
        self._numbers = numbers
        self._slots: dict[str, list[Slot]] = {}
        for slot in slots:
            self._slots.setdefault(slot.node.name, []).append(slot)
        self._deadline_s = deadline_s

    def __call__(self, node: Node, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if time.monotonic() > self._deadline_s:
            raise OutOfTime("the host has not run the whole graph in the time that the analysis has.")
        self._learn(node, args, kwargs)
        for slot in self._slots.get(node.name, ()):
            if (found := _candidates(slot, value)) is not None:
                self._compare(slot, found)
        if self._judges:
            self._judge(node, value)

    def _judge(self, node: Node, value: Any) -> None:
        """Compute a node from the device's values before it, and continue with the device's value of the node."""
        import torch

        alone, args, kwargs = value, [], {}
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        # What the model writes to its own buffers is written already, and is the host's; graphs inside of nodes are as well.
        if (schema is not None or node.target is operator.getitem) and not (writes and _is_of_placeholder(node)):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda before: self._given[before])
            if writes:
                args = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
            try:
                alone = node.target(*args, **kwargs)
            except _REFUSALS as error:
                _LOG.warning("numerics: %s does not take what the device gave before it: %s", node.name, error)
                self._refuse(node)
            if writes:
                self._given[node.all_input_nodes[0]] = alone
        self._given[node] = alone
        for slot in self._slots.get(node.name, ()):
            candidates = _candidates(slot, alone)
            if candidates is not None:
                actual = self._recording.array(slot.output.stored)
                expected = _nearest(candidates, actual)
                if _can_be_told(expected, actual):
                    self._weigh(slot, expected, actual, args, kwargs)
                    if isinstance(alone, torch.Tensor) and alone.dtype != torch.bfloat16:
                        self._given[node] = torch.from_numpy(np.array(actual)).to(alone.dtype).reshape(alone.shape)
        for before in node.all_input_nodes:
            # The last of its users, in the graph's order, has it for the last time.
            if max(before.users) is node:
                del self._given[before]

    def _weigh(self, slot: Slot, expected: Array, actual: Array, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Return the error that an operator adds itself.

        Args:
            args, kwargs: what the host was given for the node.
        """
        slot.own = deviation(expected, actual)
        if slot.own.level_db < EXACT_DB and choices.chooses(slot.output.operator.node.op_type) and actual.dtype.kind in "iu":
            try:
                found = [choices.chosen(slot.node, args, kwargs, places) for places in (expected, actual)] if args else [None]
            except IndexError:
                slot.refused = True
                return
            if found[0] is None or found[1] is None:
                slot.own = None  # which of its places are as good is not known
                return
            expected, actual = found[0], found[1]
            slot.own = deviation(expected, actual)
            slot.chosen = str(args[0].dtype).removeprefix("torch.")
        finite = expected[np.isfinite(expected)].astype(np.float64)
        slot.size = float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0

    def _refuse(self, node: Node) -> None:
        """Mark the operators bad whose integers a node does not accept: the nearest ones that deviate."""
        ahead, known = list(node.all_input_nodes), set()
        while ahead:
            before = ahead.pop()
            slots = self._slots.get(before.name, ())
            for slot in slots:
                wrong = slot.own is not None and slot.own.level_db < EXACT_DB
                slot.refused = slot.refused or (wrong and slot.output.stored.dtype not in _ROUNDING)
            if not slots and before not in known:
                known.add(before)
                ahead.extend(before.all_input_nodes)

    def _learn(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Return a node that dequantizes tells what the integers before it mean, which were compared as such until now."""
        if not graph.base_name(str(node.target)).startswith("dequantize") or not node.all_input_nodes:
            return
        import torch

        def dequantize(array: Array) -> Array:
            result: Array = node.target(torch.from_numpy(np.array(array)), *args[1:], **kwargs).numpy()
            return result

        for slot in self._slots.get(node.all_input_nodes[0].name, ()):
            if slot.output.operator.index not in self._numbers and slot.found is not None and isinstance(args[0], torch.Tensor):
                self._numbers[slot.output.operator.index] = dequantize
                self._describe(slot, dequantize(args[0].numpy()), dequantize(self._recording.array(slot.output.stored)))

    def _compare(self, slot: Slot, expected: Sequence[Array]) -> None:
        actual = self._recording.array(slot.output.stored)
        number = self._numbers.get(slot.output.operator.index)
        if number is not None:
            actual = number(actual)
        nearest = _nearest(expected, actual)
        if _can_be_told(nearest, actual):
            self._describe(slot, nearest, actual)

    def _describe(self, slot: Slot, expected: Array, actual: Array) -> None:
        slot.found = deviation(expected, actual)
        slot.expected = summary(expected, expected.dtype.name)
        slot.actual = summary(actual, slot.output.stored.dtype)
        slot.histogram = histogram(expected, actual)


def _candidates(slot: Slot, value: Any) -> list[Array] | None:
    """Return the values of a node that may be the slot's; None where none has its shape."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if len(leaves) > 1 and len(leaves) == len(slot.output.operator.gives):
        leaves = [leaves[slot.output.at]]
    elif len(leaves) == 1 and slot.output.at > 0:
        return None
    shape = slot.output.stored.shape
    arrays = [_array(leaf) for leaf in leaves if tuple(leaf.shape) == shape]
    if not arrays and len(leaves) == 1 and leaves[0].numel() == math.prod(shape):
        arrays = [_array(leaves[0]).reshape(shape)]  # where only a view of it is left, which is not executed
    return arrays or None


def _can_be_told(expected: Array, actual: Array) -> bool:
    """Return whether both are of one kind: quantized integers without known scales cannot be compared with real numbers."""
    return not (expected.dtype.kind == "f" and actual.dtype.kind in "iu")


def _nearest(expected: Sequence[Array], actual: Array) -> Array:
    """Return the output that is most like the device's, of several of one shape that may be meant."""
    return max(expected, key=lambda one: deviation(one, actual).level_db) if len(expected) > 1 else expected[0]


def _is_of_placeholder(node: Node) -> bool:
    """Return whether what a node takes first is a buffer or an input, or a view of one."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and not (schema and any(one.alias_info for one in schema.returns)):
            return False
    return bool(node.op == "placeholder")


def _array(tensor: Any) -> Array:
    import torch

    detached = tensor.detach()
    # numpy itself knows no bfloat16.
    array: Array = (detached.to(torch.float32) if detached.dtype == torch.bfloat16 else detached).numpy()
    return array


def is_judged(slot: Slot) -> bool:
    """Return whether the operator could be judged."""
    expected = slot.expected
    # XNNPACK clamps, which makes numbers of some NaNs.
    return slot.own is not None and expected is not None and not (expected.nan_count or expected.infinite_count)


def is_bad(slot: Slot) -> bool:
    """Return whether the operator itself is wrong, by the rule above."""
    own = slot.own
    if own is None or not is_judged(slot):
        return False
    if slot.refused:
        return True
    if own.level_db == EXACT_DB:
        return False
    if not own.same_kind:
        return True
    dtype, quantizes = slot.chosen or slot.output.stored.dtype, any(one.quantizes for one in slot.group)
    if slot.output.operator.quantizes and dtype not in _ROUNDING:
        return own.rms_error > _LARGER * _ROUNDING_STEPS
    if dtype not in _ROUNDING:
        return not quantizes
    part = _ROUNDING_DYNAMIC if quantizes and not slot.output.operator.quantizes else _ROUNDING[dtype]
    return own.rms_error > _LARGER * part * slot.size
