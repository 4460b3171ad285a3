"""Operators for whose values int8 has no range, such as those of a mask, which stay in fp32.

An int8 tensor has 255 steps between the smallest and the largest value that calibration saw. Three kinds of masks are lost so:

- torchao's observers ignore infinities, so that a mask of 0 and -inf becomes one of zeros.
- A mask of -1e4 leaves the scores that it is added to less than one step.
- A mask that never applied in calibration, such as that of texts without padding, has the range of zeros; and what it is added to
  has a range without its number.

Only the values that calibration sees show the first two: a mask may be a buffer, an input, or computed. Therefore the operators'
observers note the orders of magnitude of their values, and where some are far apart, or the range is not known, the model is
calibrated again without these operators.

Source: HistogramObserver of torchao/quantization/pt2e/observer.py 0.18.0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torchao.quantization.pt2e.observer import HistogramObserver
from torchao.quantization.pt2e.quantizer import Quantizer

from etfarm.server.compile.lower.annotations import Reviewed
from etfarm.server.compile.lower.selection import ANNOTATION, kept_in_fp32

_MIN_STEPS: Final = 4
_STEPS: Final = 255
"""Values are far if less than so many of int8's steps are left for all others."""
_MIN_FAR: Final = 64.0
_MIN_UNSEEN: Final = 16.0
"""The least value that is far from others, or that counts as a mask's: its exponential function is near 0."""
_MAX_WIDTH: Final = 2
"""Octaves that far values are in: a mask's number, once or several times, and what was added to it."""
_OCTAVES: Final = 256
"""Values of the exponent of a float32: 0 for zeros, the last for infinities."""
_BIAS: Final = 127
_INFINITE: Final = _BIAS + 50
"""The exponent from which values are as infinities to an observer, whose histogram fails on ranges over 3.4e15."""
_MANTISSA_BITS: Final = 23
_ATEN: Final = torch.ops.aten
_JOINING: Final = frozenset({_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.cat.default})
"""Operators whose inputs are in one scale in the end."""
_CANDIDATES: Final = _JOINING | {_ATEN.mul.Tensor, _ATEN.mul_.Tensor}
"""Operators that masks meet and XNNPACK quantizes. Views, pools and activations are only quantized behind others."""
_CHOOSING: Final = frozenset({"where", "masked_fill", "masked_fill_", "index_put", "index_put_", "masked_scatter", "scatter"})
_SCALING: Final = frozenset({"mul", "mul_", "div", "div_"})
_PASSING: Final = _CHOOSING | _SCALING | {
    "add", "add_", "sub", "sub_", "rsub", "neg", "abs", "minimum", "maximum", "min", "max", "fmin", "fmax", "amin", "amax",
    "clamp", "nan_to_num", "cat", "stack", "constant_pad_nd", "pad",
    "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "transpose", "t", "slice", "select", "narrow",
    "split", "split_with_sizes", "chunk", "flatten", "repeat", "clone", "contiguous", "to", "_to_copy", "getitem", "detach",
    "detach_", "alias", "lift_fresh", "lift_fresh_copy", "flip", "roll", "index", "index_select", "gather",
}  # fmt: skip
"""Names of operators whose outputs have values as large as those of their inputs."""
_FILLING: Final = frozenset({"full", "full_like", "new_full", "scalar_tensor", "fill", "fill_"})
_SHAPED: Final = _FILLING | {"zeros", "ones", "empty", "arange", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones"}
"""Names of operators whose outputs do not depend on their inputs' values."""
_WEIGHING: Final = frozenset({"mul", "mul_", "linear", "matmul", "mm", "bmm", "conv1d", "conv2d", "conv3d", "convolution"})
"""Names of operators that give zeros, or a bias, if one of their inputs has only zeros."""
_MOST_LOOKED_AT: Final = 1 << 20
"""Number of elements of a constant up to which its values are looked at."""


class Reason(Enum):
    """Why an operator stays in fp32."""

    FAR = 1
    """Some of its values are far from the others."""
    UNSEEN = 2
    """Calibration did not see the values that it may have."""


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
        self.kept: list[tuple[Reason, Any]] = []
        """The nodes that stay in fp32."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Annotate all operators but those that were found in the graph with the same ordinal."""
        ordinal = len(self._graphs)
        kept = [(self._reasons[ordinal, node.name], node) for node in model.graph.nodes if (ordinal, node.name) in self._reasons]
        with kept_in_fp32([*(node for _, node in kept), *filter(_takes_number, model.graph.nodes)]):
            model = super().annotate(model)
        self.kept += kept
        return model

    def review(self, model: torch.fx.GraphModule) -> None:
        """Record the graph, whose annotations stay as they are."""
        self._graphs.append(model.graph)

    def watch(self) -> None:
        """Let the observers of the annotated graphs note the magnitudes of the values that they see."""
        for _, node in self._annotated():
            for observer in _observers(node).values() if node.target in _CANDIDATES else ():
                if observer not in self._values:
                    self._values[observer] = values = Values()
                    observer.forward = partial(values.observe, observer.forward)

    def find(self, changed_buffers: Collection[str]) -> bool:
        """Find the operators for whose values int8 has no range, and stop watching; return whether there are any.

        The next graphs that are annotated have to be those that were before.

        Args:
            changed_buffers: names of the buffers that the model changes.
        """
        for observer in self._values:
            del observer.forward
        graphs = [_Graph(graph, changed_buffers) for graph in self._graphs]
        for ordinal, node in self._annotated():
            observers = _observers(node)
            if node.target in _CANDIDATES and has_far_values(node, [self._values[each] for each in observers.values()]):
                self._reasons[ordinal, node.name] = Reason.FAR
            elif any(_saw_only_zeros(observer) and graphs[ordinal].varies(tensor) for tensor, observer in observers.items()):
                self._reasons[ordinal, node.name] = Reason.UNSEEN
        for ordinal, graph in enumerate(graphs):
            self._find_behind(ordinal, graph)
        self._values.clear()
        if self._reasons:
            self._graphs.clear()
        return bool(self._reasons)

    def _find_behind(self, ordinal: int, graph: _Graph) -> None:
        """Find the operators that meet values which calibration did not see, as far as these keep their size."""
        sizes: dict[Any, float] = {}  # the largest value that a node may have, and that was perhaps not seen
        for node in graph.graph.nodes:
            size, name = max((sizes.get(each, 0.0) for each in node.all_input_nodes), default=0.0), _name(node)
            if name in _CHOOSING:
                size = max(size, *(graph.size_of_constant(each) for each in node.args))
            elif size and name in _SCALING and (factor := graph.size_of_constant(node.args[1])):
                size = size * factor if name.startswith("mul") else size / factor
            elif size and name == "clamp":
                size = min(size, max((abs(each) for each in node.args[1:] if isinstance(each, int | float)), default=size))
            elif node.op == "call_function" and name not in _PASSING:
                size = 0.0
            key, is_annotated = (ordinal, node.name), node.meta.get(ANNOTATION) is not None
            if is_annotated and node.target in _CANDIDATES and key not in self._reasons and size >= _MIN_UNSEEN:
                seen = max((self._values[observer].largest for observer in _observers(node).values()), default=0.0)
                if seen < size / 2:
                    self._reasons[key] = Reason.UNSEEN
            sizes[node] = math.inf if self._reasons.get(key) is Reason.UNSEEN else size

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
    def largest(self) -> float:
        """The largest magnitude."""
        return float(self.octaves.max())

    def observe(self, forward: Any, x: torch.Tensor) -> torch.Tensor:
        """Note the values, and let the observer see those that it can."""
        self.is_number &= x.numel() == 1
        if x.dtype != torch.float32:
            forward(x)
            return x
        signs_and_exponents = (x.detach().view(torch.int32) >> _MANTISSA_BITS) & (2 * _OCTAVES - 1)
        magnitudes = x.detach().abs().flatten().nan_to_num(nan=0.0, posinf=math.inf)
        self.octaves.view(-1).scatter_reduce_(0, signs_and_exponents.flatten().long(), magnitudes, "amax")
        is_infinite = bool((self.octaves[:, _INFINITE:] >= 0).any())
        forward(x[~(x.abs() >= 2.0 ** (_INFINITE - _BIAS))] if is_infinite else x)
        return x


class _Graph:
    """What the nodes of a graph with observers depend on."""

    def __init__(self, graph: Any, changed_buffers: Collection[str]) -> None:
        self.graph = graph
        self._varying: dict[Any, bool] = {}
        for node in graph.nodes:
            self._varying[node] = self._varies(node, changed_buffers)

    def varies(self, node: Any) -> bool:
        """Return whether other inputs may give a node other values."""
        return self._varying[node]

    def size_of_constant(self, argument: Any) -> float:
        """Return the largest magnitude of a number or constant tensor among an operator's arguments; 0 for another one."""
        if isinstance(argument, int | float):
            return abs(float(argument))
        if not isinstance(argument, torch.fx.Node) or self._varying[argument]:
            return 0.0
        if (value := self._constant(argument)) is not None:
            return float(value.double().abs().max()) if 0 < value.numel() <= _MOST_LOOKED_AT and not value.is_complex() else 0.0
        name, numbers = _name(argument), [self.size_of_constant(each) for each in argument.args]
        if name in _FILLING:
            return max(numbers, default=0.0)
        if name in ("ones", "ones_like", "new_ones"):
            return 1.0
        if name in ("mul", "mul_"):
            return math.prod(numbers)
        return max(numbers, default=0.0) if name in _PASSING or argument.op == "call_module" else 0.0

    def _varies(self, node: Any, changed_buffers: Collection[str]) -> bool:
        if node.op == "placeholder":
            return isinstance(node.meta.get("val"), torch.Tensor)
        if node.op == "get_attr":
            return node.target in changed_buffers
        name, near = _name(node), node.all_input_nodes
        if name in _SHAPED or (name in _WEIGHING and any(map(self._is_zero, near[:2]))):
            return False
        return any(self._varying[each] for each in near)

    def _is_zero(self, node: Any) -> bool:
        """Return whether a node is a constant of zeros, such as the factor of a branch that training is to begin with."""
        while node.op == "call_module" and node.all_input_nodes:  # an observer
            node = node.all_input_nodes[0]
        value = self._constant(node)
        return value is not None and not bool(value.any())

    def _constant(self, node: Any) -> torch.Tensor | None:
        """Return the tensor of a parameter, buffer or constant; None if the node is none."""
        if node.op != "get_attr":
            return None
        value = self.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value.detach() if isinstance(value, torch.Tensor) else None


def _takes_number(node: Any) -> bool:
    """Return whether an operator takes a computed tensor without dims, on which a pass of ExecuTorch for XNNPACK fails."""
    if node.op != "call_function" or node.target not in _CANDIDATES:
        return False
    near = [each for each in node.all_input_nodes if each.op != "get_attr"]
    return any(isinstance(value := each.meta.get("val"), torch.Tensor) and value.dim() == 0 for each in near)


def _observers(node: Any) -> dict[Any, Any]:
    """Return the observers of a node's inputs and of its output, by the nodes that they observe."""
    observers = {}
    for near in (*node.all_input_nodes, *node.users):
        if near.op == "call_module":
            observer = near.graph.owning_module.get_submodule(near.target)
            if isinstance(observer, HistogramObserver):
                observers[near.args[0]] = observer
    return observers


def _saw_only_zeros(observer: Any) -> bool:
    return bool(torch.all(observer.min_val == 0)) and bool(torch.all(observer.max_val == 0))


def _name(node: Any) -> str:
    """Return the name of a node's operator without overload, such as `add`; empty if it calls none."""
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "overloadpacket", node.target).__name__)


def has_far_values(node: Any, all_values: list[Values]) -> bool:
    """Return whether values of an operator are far from others: of the same tensor, or of all that it adds or joins.

    A tensor of zeros and one number loses nothing by itself, only where something is added to it. Single numbers, such as the
    epsilon of a norm, are no loss.
    """
    all_octaves = [values.octaves for values in all_values]
    if any(bool((octaves[:, _INFINITE:] >= 0).any()) for octaves in all_octaves):
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
