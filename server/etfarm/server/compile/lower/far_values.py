"""Operators with values that are infinite or far from all others, such as those of a mask, which stay in fp32.

An int8 tensor has 255 steps between its smallest and its largest value. torchao's observers ignore infinities, so that a mask of
0 and -inf becomes one of zeros, and a mask of -1e4 leaves the scores that it is added to less than one step. Only the values that
calibration sees show that: a mask may be a buffer, an input, or computed. Therefore the operators' observers note the orders of
magnitude of their values, and where some are far apart, the model is calibrated again without these operators.

Source: HistogramObserver of torchao/quantization/pt2e/observer.py 0.18.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torchao.quantization.pt2e.observer import HistogramObserver
from torchao.quantization.pt2e.quantizer import Quantizer

from etfarm.server.compile.lower.selection import ANNOTATION, kept_in_fp32

_MIN_GAP: Final = 6
"""Octaves without any value below far values: less than four of int8's 255 steps are left for all other values."""
_MIN_FAR: Final = 127 + 5
"""The least exponent of far values, from 64 in the end: the exponential function of a mask's number is near 0."""
_MAX_WIDTH: Final = 2
"""Octaves that far values are in: a mask's number, once or several times, and what was added to it."""
_OCTAVES: Final = 256
"""Values of the exponent of a float32: 0 for zeros, the last for infinities."""
_INFINITE: Final = 127 + 50
"""The exponent from which values are as infinities to an observer, whose histogram fails on ranges over 3.4e15."""
_MANTISSA_BITS: Final = 23
_ATEN: Final = torch.ops.aten
_JOINING: Final = frozenset({_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.cat.default})
"""Operators whose inputs are in one scale in the end."""
_CANDIDATES: Final = _JOINING | {_ATEN.mul.Tensor, _ATEN.mul_.Tensor}
"""Operators that masks meet and XNNPACK quantizes. Views, pools and activations are only quantized behind others."""


class FarValuesKept(Quantizer):  # type: ignore[misc]
    """A quantizer that leaves operators with far values alone, as far as `find` has found them.

    Args:
        quantizer: XNNPACK's, which annotates all other operators.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self._quantizer = quantizer
        self._found: set[tuple[int, str]] = set()
        self._graphs: list[Any] = []
        self._values: dict[Any, Values] = {}
        self.kept: list[Any] = []
        """The nodes that stay in fp32."""

    def transform_for_annotation(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Let the inner quantizer change the graph."""
        return self._quantizer.transform_for_annotation(model)

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Annotate all operators but those that were found in the graph with the same ordinal."""
        kept = [node for node in model.graph.nodes if (len(self._graphs), node.name) in self._found]
        with kept_in_fp32(kept):
            model = self._quantizer.annotate(model)
        self._graphs.append(model.graph)
        self.kept += kept
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        """Let the inner quantizer check its annotations."""
        self._quantizer.validate(model)

    def watch(self) -> None:
        """Let the observers of the annotated graphs note the magnitudes of the values that they see."""
        for _, node in self._candidates():
            for observer in _observers(node):
                if observer not in self._values:
                    self._values[observer] = values = Values()
                    observer.forward = partial(values.observe, observer.forward)

    def find(self) -> bool:
        """Find the operators that have seen far values, and stop watching; return whether there are any.

        The next graphs that are annotated have to be those that were before.
        """
        for ordinal, node in self._candidates():
            if has_far_values(node, [self._values[observer] for observer in _observers(node)]):
                self._found.add((ordinal, node.name))
        for observer in self._values:
            del observer.forward
        self._values.clear()
        if self._found:
            self._graphs.clear()
        return bool(self._found)

    def _candidates(self) -> Iterator[tuple[int, Any]]:
        """Yield the annotated operators that may meet a mask, with the ordinal of their graph."""
        for ordinal, graph in enumerate(self._graphs):
            for node in graph.nodes:
                if node.target in _CANDIDATES and node.meta.get(ANNOTATION) is not None:
                    yield ordinal, node


class Values:
    """The orders of magnitude of the values that an observer has seen."""

    def __init__(self) -> None:
        self.octaves = torch.zeros(2, _OCTAVES, dtype=torch.bool)
        """Whether there were values with an exponent, by sign: positive ones first."""
        self.is_number = True
        """Whether all tensors had one element."""

    def observe(self, forward: Any, x: torch.Tensor) -> torch.Tensor:
        """Note the values, and let the observer see those that it can."""
        self.is_number &= x.numel() == 1
        if x.dtype != torch.float32:
            forward(x)
            return x
        signs_and_exponents = (x.detach().view(torch.int32) >> _MANTISSA_BITS) & (2 * _OCTAVES - 1)
        seen = torch.bincount(signs_and_exponents.flatten(), minlength=2 * _OCTAVES).reshape(2, _OCTAVES) > 0
        self.octaves |= seen
        forward(x[~(x.abs() >= 2.0 ** (_INFINITE - 127))] if bool(seen[:, _INFINITE:].any()) else x)
        return x


def _observers(node: Any) -> list[Any]:
    """Return the observers of a node's inputs and of its output."""
    observers = []
    for near in (*node.all_input_nodes, *node.users):
        if near.op == "call_module":
            observer = near.graph.owning_module.get_submodule(near.target)
            if isinstance(observer, HistogramObserver):
                observers.append(observer)
    return observers


def has_far_values(node: Any, all_values: list[Values]) -> bool:
    """Return whether values of an operator are far from others: of the same tensor, or of all that it adds or joins.

    A tensor of zeros and one number loses nothing by itself, only where something is added to it. Single numbers, such as the
    epsilon of a norm, are no loss.
    """
    all_octaves = [values.octaves for values in all_values]
    if any(bool(octaves[:, _INFINITE:].any()) for octaves in all_octaves):
        return True
    if node.target in _JOINING and (tensors := [values.octaves for values in all_values if not values.is_number]):
        together = torch.stack(tensors).any(0)
        fars = {_far_octave(octaves) for octaves in all_octaves} - {None}
        return _far_octave(together) in fars and _has_others(together)
    return any(map(_has_others, all_octaves))


def _far_octave(octaves: torch.Tensor) -> int | None:
    """Return the largest exponent of values of one sign that are far from the others; None if all are alike."""
    either = octaves.any(0)
    top = int(either.nonzero().max()) if bool(either.any()) else 0
    bottom = top - _MAX_WIDTH + 1
    if bottom < _MIN_FAR or not bool(either[:bottom].any()) or bool(either[bottom - _MIN_GAP : bottom].any()):
        return None
    is_one_sided = not bool(octaves[:, bottom:].any(1).all())
    return top if is_one_sided else None


def _has_others(octaves: torch.Tensor) -> bool:
    """Return whether a tensor with far values has others than these and zeros."""
    octave = _far_octave(octaves)
    return octave is not None and bool(octaves[:, 1 : octave - _MAX_WIDTH + 1].any())
