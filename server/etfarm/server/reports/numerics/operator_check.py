"""The check of each operator: the host's value of a node against the recorded one, and whether the kernel is bad.

Errors propagate: after a wrong kernel every value is wrong, and in a deep int8 program the accumulated rounding of correct
kernels can lower the SNR more than one wrong kernel does. Each operator is therefore judged by the error that it adds: the host
computes it again from the device's nearest preceding values in the graph, so that the two results differ by the kernel alone. An
operator is bad if they differ by THRESHOLD_DB more than rounding explains.

Operators that return indices of elements are judged by the selected elements: among equal elements an operator may return any
index, and quantization makes many elements equal.
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

from etfarm.server.reports.numerics import edge
from etfarm.server.reports.numerics.counterparts import Output
from etfarm.server.reports.numerics.deviation import Array, Deviation, deviation, histogram, summary
from etfarm.server.reports.trace import graph
from etfarm.server.reports.trace.graph import base_name
from etfarm.server.reports.trace.recording import Recording
from etfarm.v1 import report_pb2
from etfarm.wire.errors import FarmError
from etfarm.wire.sqnr import EXACT_DB

if TYPE_CHECKING:
    from torch.fx import Node

THRESHOLD_DB: Final = 20.0
"""Ten times the error that rounding explains. Measured on int8 programs (resnet8, ds_cnn, mobilenet_v1, resnet18): correct
kernels are off by at most 0.19 steps; a convolution with a quarter of its weights reversed is off by 20 or more."""

_ROUNDING: Final = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}
"""RMS error of a correct kernel by dtype, relative to the RMS of the values. XNNPACK approximates tanh, gelu and
softmax to 1e-5."""

_ROUNDING_STEPS: Final = 0.1
"""RMS error of a correct kernel for quantized values, in steps of their scale: one element in a hundred is off by a step."""

_ROUNDING_DYNAMIC: Final = 3e-3
"""Relative RMS error of float values computed from values quantized within the group: the device chooses its own scales."""

_LARGER: Final = 10 ** (THRESHOLD_DB / 20)

_REFUSALS: Final = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
"""The errors that torch raises for a value that an operator does not accept."""

_LOG = logging.getLogger(__name__)


class OutOfTime(FarmError):
    """A deadline that the host missed; earlier comparisons remain."""

    reason = "OUT_OF_TIME"


@dataclass
class Slot:
    """One row of the report under construction."""

    output: Output
    node: Node
    """The counterpart in the reference's graph."""
    group: tuple[edge.Operator, ...]
    expected: report_pb2.ValueSummary | None = None
    actual: report_pb2.ValueSummary | None = None
    histogram: report_pb2.ValueHistogram | None = None
    deviation: Deviation | None = None
    """Deviation of the dequantized values; None until they are compared."""
    own: Deviation | None = None
    """Deviation that the operator itself adds, over the values as recorded: integers if they are quantized."""
    size: float = 0.0
    """RMS of the expected values behind `own`."""
    chosen: str = ""
    """For an operator that returns indices, the dtype of the selected elements, which `own` and `size` describe."""
    refused: bool = False
    """Whether it differs and the host cannot continue with its value, such as an index out of range."""


class Observer:
    """A node observer that compares the host's values with the device's.

    Args:
        numbers: dequantizing functions by an operator's index. The run of the quantized program adds them, and the run of the
            program before quantization uses them.
        judges: whether to also compute each operator from the device's preceding values.
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
        self._values: dict[Node, Any] = {}
        self._numbers = numbers
        self._slots: dict[str, list[Slot]] = {}
        for slot in slots:
            self._slots.setdefault(slot.node.name, []).append(slot)
        self._deadline_s = deadline_s

    def __call__(self, node: Node, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if time.monotonic() > self._deadline_s:
            raise OutOfTime(
                "the host could not run the whole graph within the analysis's time limit.",
                "Raise `etfarm serve --analysis-timeout`, and run `etfarm report analyze JOB`.",
            )
        self._learn(node, args, kwargs)
        for slot in self._slots.get(node.name, ()):
            if (candidates := _candidates(slot, value)) is not None:
                self._compare(slot, candidates)
        if self._judges:
            self._judge(node, value)

    def _judge(self, node: Node, value: Any) -> None:
        """Compute a node from the device's preceding values, and continue with the device's value of the node."""
        import torch

        result, args, kwargs = value, [], {}
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        # Keep the host's value of nodes with nested graphs, and of writes to the model's own buffers, which are already done.
        if (schema is not None or node.target is operator.getitem) and not (writes and _is_of_placeholder(node)):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda before: self._values[before])
            if writes:
                args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            try:
                result = node.target(*args, **kwargs)
            except _REFUSALS as error:
                _LOG.warning("numerics: %s refuses the device's values of its inputs: %s", node.name, error)
                self._refuse(node)
            if writes:
                self._values[node.all_input_nodes[0]] = result
        self._values[node] = result
        for slot in self._slots.get(node.name, ()):
            candidates = _candidates(slot, result)
            if candidates is not None:
                actual = self._recording.array(slot.output.stored)
                expected = _nearest(candidates, actual)
                if _are_comparable(expected, actual):
                    self._weigh(slot, expected, actual, args, kwargs)
                    if isinstance(result, torch.Tensor) and result.dtype != torch.bfloat16:
                        self._values[node] = torch.from_numpy(np.array(actual)).to(result.dtype).reshape(result.shape)
        for before in node.all_input_nodes:
            # Drop a value after its last user in the graph's order.
            if max(before.users) is node:
                del self._values[before]

    def _weigh(self, slot: Slot, expected: Array, actual: Array, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Set the deviation that an operator itself adds.

        Args:
            args, kwargs: the arguments with which the host computed the node.
        """
        slot.own = deviation(expected, actual)
        if slot.own.level_db < EXACT_DB and chooses(slot.output.operator.node.op_type) and actual.dtype.kind in "iu":
            try:
                selected = [chosen(slot.node, args, kwargs, places) for places in (expected, actual)] if args else [None]
            except IndexError:
                slot.refused = True
                return
            if selected[0] is None or selected[1] is None:
                slot.own = None  # it is unknown which indices are equivalent
                return
            expected, actual = selected[0], selected[1]
            slot.own = deviation(expected, actual)
            slot.chosen = str(args[0].dtype).removeprefix("torch.")
        finite = expected[np.isfinite(expected)].astype(np.float64)
        slot.size = float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0

    def _refuse(self, node: Node) -> None:
        """Mark the nearest deviating operators whose integers a node does not accept as refused."""
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
        """Learn from a dequantizing node how to dequantize its input, which was compared as integers until now."""
        if not graph.base_name(str(node.target)).startswith("dequantize") or not node.all_input_nodes:
            return
        import torch

        def dequantize(array: Array) -> Array:
            result: Array = node.target(torch.from_numpy(np.array(array)), *args[1:], **kwargs).numpy()
            return result

        for slot in self._slots.get(node.all_input_nodes[0].name, ()):
            if (
                slot.output.operator.index not in self._numbers
                and slot.deviation is not None
                and isinstance(args[0], torch.Tensor)
            ):
                self._numbers[slot.output.operator.index] = dequantize
                self._describe(slot, dequantize(args[0].numpy()), dequantize(self._recording.array(slot.output.stored)))

    def _compare(self, slot: Slot, expected: Sequence[Array]) -> None:
        actual = self._recording.array(slot.output.stored)
        number = self._numbers.get(slot.output.operator.index)
        if number is not None:
            actual = number(actual)
        nearest = _nearest(expected, actual)
        if _are_comparable(nearest, actual):
            self._describe(slot, nearest, actual)

    def _describe(self, slot: Slot, expected: Array, actual: Array) -> None:
        slot.deviation = deviation(expected, actual)
        slot.expected = summary(expected, expected.dtype.name)
        slot.actual = summary(actual, slot.output.stored.dtype)
        slot.histogram = histogram(expected, actual)


def _candidates(slot: Slot, value: Any) -> list[Array] | None:
    """Return the outputs of a node that may be the slot's; None if no output has its shape."""
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
        arrays = [_array(leaves[0]).reshape(shape)]  # only a view of the value is left, and views are not executed
    return arrays or None


def _are_comparable(expected: Array, actual: Array) -> bool:
    """Return whether the two are comparable: quantized integers without known scales cannot be compared with real numbers."""
    return not (expected.dtype.kind == "f" and actual.dtype.kind in "iu")


def _nearest(expected: Sequence[Array], actual: Array) -> Array:
    """Return the candidate that is closest to the device's value."""
    return max(expected, key=lambda candidate: deviation(candidate, actual).level_db) if len(expected) > 1 else expected[0]


def _is_of_placeholder(node: Node) -> bool:
    """Return whether a node's first input is a buffer or an input of the model, or a view of one."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and not (schema and any(result.alias_info for result in schema.returns)):
            return False
    return bool(node.op == "placeholder")


def _array(tensor: Any) -> Array:
    import torch

    detached = tensor.detach()
    # numpy itself has no bfloat16.
    array: Array = (detached.to(torch.float32) if detached.dtype == torch.bfloat16 else detached).numpy()
    return array


def is_judged(slot: Slot) -> bool:
    """Return whether the operator could be judged."""
    expected = slot.expected
    # XNNPACK clamps, which turns some NaNs into numbers.
    return slot.own is not None and expected is not None and not (expected.nan_count or expected.infinite_count)


def is_bad(slot: Slot) -> bool:
    """Return whether the operator itself is wrong, by the rule in this module's docstring."""
    own = slot.own
    if own is None or not is_judged(slot):
        return False
    if slot.refused:
        return True
    if own.level_db == EXACT_DB:
        return False
    if not own.same_kind:
        return True
    dtype, quantizes = slot.chosen or slot.output.stored.dtype, any(operator.quantizes for operator in slot.group)
    if slot.output.operator.quantizes and dtype not in _ROUNDING:
        return own.rms_error > _LARGER * _ROUNDING_STEPS
    if dtype not in _ROUNDING:
        return not quantizes
    tolerance = _ROUNDING_DYNAMIC if quantizes and not slot.output.operator.quantizes else _ROUNDING[dtype]
    return own.rms_error > _LARGER * tolerance * slot.size


if TYPE_CHECKING:
    from torch.fx import Node

CHOOSING: Final = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "max_pool2d_with_indices"})


def chooses(op_type: str) -> bool:
    """Return whether an operator returns indices of elements."""
    return base_name(op_type) in CHOOSING


def chosen(node: Node, args: Sequence[Any], kwargs: dict[str, Any], places: Array) -> Array | None:
    """Return the elements of a node's first argument at its indices; None if the operator's layout is unknown.

    Args:
        places: the node's indices along its `dim`, or into the flattened argument if it has no `dim`.

    Raises:
        IndexError: an index is out of range.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or base_name(str(node.target)) not in CHOOSING - {"max_pool2d_with_indices"}:
        return None
    bound = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    bound |= dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    source, dim = args[0].detach().double().numpy(), bound.get("dim")
    if dim is None:
        source, dim, places = source.ravel(), 0, places.reshape(-1)
    elif places.ndim < source.ndim:
        places = np.expand_dims(places, dim)
    if places.ndim != source.ndim or not source.size:
        return None
    if places.size and (places.min() < 0 or places.max() >= source.shape[dim]):
        raise IndexError(f"there are {source.shape[dim]} elements")
    elements: Array = np.take_along_axis(source, places.astype(np.int64), dim)
    return elements
