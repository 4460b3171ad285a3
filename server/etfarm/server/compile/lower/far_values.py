"""Operators for whose values int8 has no range, such as those of a mask, which stay in fp32.

An int8 tensor has 255 steps between the smallest and the largest value that calibration saw. Three kinds of masks are lost so:

- torchao's observers ignore infinities, so that a mask of 0 and -inf becomes one of zeros.
- A mask of -1e4 leaves the scores that it is added to less than one step.
- A mask that never applied in calibration, such as that of texts without padding, has the range of zeros; and what it is added to
  has a range without its number.

The observers note the orders of magnitude of their values, which shows the first two. The model runs again on other inputs than
those of calibration, which shows the third (`unseen_values`), and the layers behind it that would clip what becomes of the mask.
Then it is calibrated again without these operators.

Source: HistogramObserver of torchao/quantization/pt2e/observer.py 0.18.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torchao.quantization.pt2e.observer import HistogramObserver, ObserverBase
from torchao.quantization.pt2e.quantizer import Quantizer

from etfarm.server.compile.lower import computed_weights
from etfarm.server.compile.lower.annotations import Reviewed
from etfarm.server.compile.lower.other_inputs import OtherInputs
from etfarm.server.compile.lower.selection import ANNOTATION, kept_in_fp32
from etfarm.server.compile.lower.unseen_values import Exploration, Ranges, State

_MIN_STEPS: Final = 8
_STEPS: Final = 255
"""Values are far if less than so many of int8's steps are left for all others."""
_MIN_FAR: Final = 16.0
"""The least value that is far from others: its exponential function is near 0."""
_MIN_EXCESS: Final = 0.5
"""A value was not seen if it is beyond the range that was by so much of its width."""
_MIN_CLIPPED: Final = 0.25
"""The same for values that only lead to a warning."""
_MAX_WIDTH: Final = 3
"""Octaves that far values are in: a mask's number, once or several times, and what was added to it."""
_OCTAVES: Final = 256
"""Values of the exponent of a float32: 0 for zeros, the last for infinities."""
_BIAS: Final = 127
_INFINITE: Final = _BIAS + 50
"""The exponent from which values are as infinities to an observer, whose histogram fails on ranges over 3.4e15."""
_MANTISSA_BITS: Final = 23
_AT_ONCE: Final = 1 << 20
"""Number of elements whose exponents are in memory at the same time."""
_ATEN: Final = torch.ops.aten
_JOINING: Final = frozenset({_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.cat.default})
"""Operators whose inputs are in one scale in the end."""
_CANDIDATES: Final = _JOINING | {_ATEN.mul.Tensor, _ATEN.mul_.Tensor}
"""Operators that masks meet and XNNPACK quantizes. Views, pools and activations are only quantized behind others."""


class Reason(Enum):
    """Why an operator stays in fp32."""

    FAR = 1
    """Some of its values are far from the others."""
    UNSEEN = 2
    """Calibration did not see the values that it may have."""


@dataclass
class Kept:
    """What stays in fp32 for its values."""

    nodes: list[tuple[Reason, Any]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    """Names of the inputs that had one value in all of calibration, if any node stays for what was not seen."""
    buffers: list[str] = field(default_factory=list)
    """Names of the buffers that other methods write and that had one value, which no calibration can change, likewise."""
    is_blank: bool = False
    """Whether all inputs of calibration were floats of one value each."""
    clipped: list[str] = field(default_factory=list)
    """Names of the inputs that were the same in all of calibration, and of which int8 clips what other values give."""
    untried: list[str] = field(default_factory=list)
    """Names of such inputs that the model takes no other values of, as far as was tried."""
    grown: list[str] = field(default_factory=list)
    """Names of the method's own buffers, of which int8 clips what they become in calls after those of calibration."""


class FarValuesKept(Reviewed):
    """A quantizer that leaves operators alone for whose values int8 has no range, as far as `find` has found them.

    Args:
        quantizer: XNNPACK's, which annotates all other operators.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__(quantizer)
        self._reasons: dict[tuple[int, str], Reason] = {}
        self._graphs: list[Any] = []
        self._values: dict[Any, Values] = {}
        self.kept = Kept()

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Annotate all operators but those that were found in the graph with the same ordinal."""
        ordinal = len(self._graphs)
        kept = [(self._reasons[ordinal, node.name], node) for node in model.graph.nodes if (ordinal, node.name) in self._reasons]
        others = (*filter(_takes_number, model.graph.nodes), *computed_weights.find_unquantized(model.graph))
        with kept_in_fp32([*(node for _, node in kept), *others]):
            model = super().annotate(model)
        self.kept.nodes += kept
        return model

    def review(self, model: torch.fx.GraphModule) -> None:
        """Record the graph, whose annotations stay as they are."""
        self._graphs.append(model.graph)

    def watch(self) -> None:
        """Let the observers of the annotated graphs note the magnitudes of the values that they see."""
        for _, node in self._annotated():
            for observer in _observers(node).values():
                if observer not in self._values:
                    self._values[observer] = values = Values()
                    observer.forward = partial(values.observe, observer.forward)

    def find(
        self, prepared: torch.fx.GraphModule, samples: Iterable[Sequence[Any]], common: Mapping[int, Any], state: State
    ) -> bool:
        """Find the operators for whose values int8 has no range, and stop watching; return whether there are any.

        The next graphs that are annotated have to be those that were before.

        Args:
            prepared: the model with the observers that have seen all samples.
            samples: flattened inputs of those that `unseen_values.Common` chose.
            common: the numbers that inputs consist of in all of them, or the tensors that they are, by the inputs' positions.
            state: the buffers that methods change.
        """
        for observer in self._values:
            del observer.forward
        for ordinal, node in self._annotated():
            values = [self._values[each] for each in _observers(node).values()]
            is_candidate = node.target in _CANDIDATES
            if any(each.is_infinite for each in values) or (is_candidate and has_far_values(node, values)):
                self._reasons[ordinal, node.name] = Reason.FAR
        if self._values:
            with _silent(prepared):
                exploration = Exploration(prepared, ObserverBase, state)
                exploration.run(samples, common)
                self._find_unseen(exploration)
        self._values.clear()
        if self._reasons:
            self._graphs.clear()
        return bool(self._reasons)

    def _find_unseen(self, exploration: Exploration) -> None:
        """Find the operators that other inputs give other values than calibration did, and the inputs that are not covered so."""
        sites = Counter(observer for _, node in self._annotated() for observer in set(_observers(node).values()))
        all_observers = [(ordinal, node, *pair) for ordinal, node in self._annotated() for pair in _observers(node).items()]

        def is_new(ranges: Ranges, near: Any, observer: Any) -> bool:
            is_zero = exploration.seen[near] == (0.0, 0.0) and (sites[observer] > 1 or _saw_only_zeros(observer))
            return ranges[near] != (0.0, 0.0) if is_zero else _is_beyond(ranges[near], observer)

        for ordinal, node, near, observer in all_observers:
            if is_new(exploration.unseen, near, observer) and (ordinal, node.name) not in self._reasons:
                self._reasons[ordinal, node.name] = Reason.UNSEEN
                self.kept.inputs, self.kept.buffers = exploration.inputs, exploration.buffers
        reasons = {each: self._reasons.get((each[0], each[1].name)) for each in all_observers}
        in_fp32 = [(near, observer) for (_, _, near, observer), reason in reasons.items() if reason is Reason.UNSEEN]
        in_int8 = [(near, observer) for (_, _, near, observer), reason in reasons.items() if reason is None]
        others = OtherInputs(
            exploration,
            lambda ranges: any(is_new(ranges, near, observer) for near, observer in in_fp32),
            lambda ranges: any(_is_beyond(ranges[near], observer, _MIN_CLIPPED) for near, observer in in_int8),
        )
        self.kept.clipped, self.kept.untried = others.find_uncovered()
        self.kept.inputs = [name for name in self.kept.inputs if name not in others.idle]
        ranges, grown = exploration.go_on()
        if clipped := {near for near, observer in in_int8 if _is_beyond(ranges[near], observer, _MIN_CLIPPED)}:
            self.kept.grown = exploration.find_sources(clipped, grown)

    def _annotated(self) -> Iterator[tuple[int, Any]]:
        """Yield the annotated operators with the ordinal of their graph."""
        for ordinal, graph in enumerate(self._graphs):
            for node in graph.nodes:
                if node.op == "call_function" and node.meta.get(ANNOTATION) is not None:
                    yield ordinal, node


class Values:
    """The orders of magnitude of the values that an observer has seen."""

    def __init__(self) -> None:
        self.octaves = torch.full((2, _OCTAVES), -1.0)
        """The largest magnitude of the values with an exponent, by sign, positive ones first; -1 without any."""
        self.is_number = True
        """Whether all tensors had one element."""

    @property
    def is_infinite(self) -> bool:
        """Whether there were infinities, or what is as these to an observer."""
        return bool((self.octaves[:, _INFINITE:] >= 0).any())

    def observe(self, forward: Any, x: torch.Tensor) -> torch.Tensor:
        """Note the values, and let the observer see those that it can."""
        self.is_number &= x.numel() == 1
        if x.dtype != torch.float32:
            forward(x)
            return x
        for piece in x.detach().flatten().split(_AT_ONCE):
            signs_and_exponents = (piece.view(torch.int32) >> _MANTISSA_BITS) & (2 * _OCTAVES - 1)
            magnitudes = piece.abs().nan_to_num_(nan=0.0, posinf=math.inf)
            self.octaves.view(-1).scatter_reduce_(0, signs_and_exponents.long(), magnitudes, "amax")
        forward(x[~(x.abs() >= 2.0 ** (_INFINITE - _BIAS))] if self.is_infinite else x)
        return x


@contextmanager
def _silent(prepared: torch.fx.GraphModule) -> Iterator[None]:
    """Let no observer see anything, also in branches."""
    observers = [module for module in prepared.modules() if isinstance(module, ObserverBase)]
    for observer in observers:
        observer.forward = lambda x: x
    try:
        yield
    finally:
        for observer in observers:
            del observer.forward


def _takes_number(node: Any) -> bool:
    """Return whether an operator takes a computed tensor without dims, on which a pass of ExecuTorch for XNNPACK fails."""
    if node.op != "call_function" or node.target not in _CANDIDATES:
        return False
    near = [each for each in node.all_input_nodes if each.op != "get_attr"]
    return any(isinstance(value := each.meta.get("val"), torch.Tensor) and value.dim() == 0 for each in near)


def _observers(node: Any) -> dict[Any, Any]:
    """Return the observers of a node's inputs and of its output, by the nodes that call them."""
    observers = {}
    for near in (*node.all_input_nodes, *node.users):
        if near.op == "call_module":
            observer = near.graph.owning_module.get_submodule(near.target)
            if isinstance(observer, HistogramObserver):
                observers[near] = observer
    return observers


def _saw_only_zeros(observer: Any) -> bool:
    return bool(torch.all(observer.min_val == 0)) and bool(torch.all(observer.max_val == 0))


def _is_beyond(limits: tuple[float, float], observer: Any, excess: float = _MIN_EXCESS) -> bool:
    """Return whether values are so far outside of an observer's range that clipping them counts."""
    low, high = min(0.0, float(observer.min_val)), max(0.0, float(observer.max_val))
    return max(low - limits[0], limits[1] - high) > excess * (high - low)


def has_far_values(node: Any, all_values: list[Values]) -> bool:
    """Return whether values of an operator are far from others: of the same tensor, or of all that it adds or joins.

    A tensor of zeros and one number loses nothing by itself, only where something is added to it. Single numbers, such as the
    epsilon of a norm, are no loss.
    """
    all_octaves = [values.octaves for values in all_values]
    if any(values.is_infinite for values in all_values):
        return True
    if node.target in _JOINING and (tensors := [values.octaves for values in all_values if not values.is_number]):
        together = torch.stack(tensors).amax(0)
        fars = {_far_octave(octaves) for octaves in all_octaves} - {None}
        return _far_octave(together) in fars and _has_others(together)
    return any(map(_has_others, all_octaves))


def _far_octave(octaves: torch.Tensor) -> int | None:
    """Return the largest exponent of values of one sign that are far from the others; None if all are alike."""
    either = octaves.amax(0)
    top = int((either >= 0).nonzero().max()) if bool((either >= 0).any()) else 0
    bottom = top - _MAX_WIDTH + 1
    largest, other = float(either.max()), float(either[: max(bottom, 0)].max()) if bottom > 0 else -1.0
    if largest < _MIN_FAR or other < 0 or other * _STEPS >= _MIN_STEPS * (largest + other):
        return None
    is_one_sided = not bool((octaves[:, bottom:] >= 0).any(1).all())
    return top if is_one_sided else None


def _has_others(octaves: torch.Tensor) -> bool:
    """Return whether a tensor with far values has others than these and zeros."""
    octave = _far_octave(octaves)
    return octave is not None and bool((octaves[:, 1 : octave - _MAX_WIDTH + 1] >= 0).any())
