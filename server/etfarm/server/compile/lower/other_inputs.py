"""Inputs that were the same in all samples of calibration, and for whose other values int8 has no range.

What is no mask has values that cannot be listed, such as a gain, a time step, a position or a state. It is tried with some that
are farther away, and the input is reported if int8 would clip what they give. They keep nothing in fp32, which could be much of
a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch

from etfarm.server.compile.lower.unseen_values import (
    SEED,
    SHARES,
    STATE_SCALE,
    Changes,
    Exploration,
    Ranges,
    Visit,
    name_of,
)

_CALLS: Final = 16
"""Number of calls in which the model gets its results again, which shows what its states become."""
MAX_TRIALS: Final = 64
"""Number of runs on one sample in which inputs have values farther away."""
_FACTORS: Final = (4.0, -1.0, 0.25, 0.05)
"""What floats are multiplied with for that; less matters where the model divides by it."""
_STEPS: Final = (1000, 100, 16, 4, 1)
"""What is added to integers and to numbers that were 0.0, as far as the model accepts it."""
_MOVING: Final = frozenset({
    "cat", "stack", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "getitem", "index_select", "roll", "where",
    "index_put", "index_copy", "scatter", "slice_scatter", "select_scatter", "view", "reshape", "flatten", "unflatten", "squeeze",
    "unsqueeze", "permute", "transpose", "clone", "contiguous", "detach", "alias", "to", "_to_copy", "copy",
})  # fmt: skip
"""Names of operators that a cache is continued with."""

Test = Callable[[Ranges], bool]


class OtherInputs:
    """Trials of other values for inputs that were the same in all samples.

    Args:
        exploration: has run.
        is_kept: whether values concern an operator that stays in fp32 for what calibration did not show.
        is_clipped: whether operators in int8 would clip values.
    """

    def __init__(self, exploration: Exploration, is_kept: Test, is_clipped: Test) -> None:
        self._model, self._is_kept, self._is_clipped = exploration, is_kept, is_clipped
        self._trials = 0
        self.idle: set[str] = set()
        """Names of inputs of one integer over one, half of which leads to nothing that stays in fp32."""

    def find_uncovered(self) -> tuple[list[str], list[str]]:
        """Return the names of inputs that have other values that int8 would clip, and of those that nothing else can be given to.

        The model refuses that or makes NaN of it, or there are too many. An input that is either one thing or another, such as a
        mask, is covered where operators stay in fp32 for the other one.
        """
        used = [node for node in self._model.same if node.users and node not in self._model.masks]
        states = [node for node in used if self._model.is_zero(node) and _is_wide(self._model.first[node])]
        results = self._try_states(states)
        for node in used:
            if node not in states and (was_tried := self._try_others(node)) is not None:
                results[node] = was_tried
        clipped = [str(node.target) for node in used if results.get(node) is True]
        return clipped, [str(node.target) for node in used if results.get(node) is False]

    def _try_states(self, nodes: Sequence[Any]) -> dict[Any, bool]:
        """Return the inputs of zeros for which int8 clips what they become, and whether they could be that.

        Where the model returns what an input may become, as for a cache or a state, it does so after some calls. Others are any.
        """
        if not nodes or self._try({}) is None:
            return dict.fromkeys(nodes, False)
        returned = self._model.returned
        moved = {node: [i for i, each in enumerate(returned) if node in _find_sources(each, _is_moving)] for node in nodes}
        pairs = _pair(self._model.first, nodes, self._model.results, moved)
        values = self._call_again(pairs)
        results = self._find_clipped(values) or dict.fromkeys(values, True)

        def scale(node: Any) -> float:
            # A result may have an input's shape by chance, and is no state for sure if it is the only one.
            is_state = node in pairs and len(returned) > len(pairs) and node in _find_sources(returned[pairs[node]])
            return 1.0 if is_state else STATE_SCALE

        caches = [node for node in pairs if pairs[node] in moved[node]]
        others = {node: _make_normal(node, self._model.first[node], scale(node)) for node in nodes if node not in caches}
        clipped = self._find_clipped(others)
        return results | {node: was_run for node, was_run in clipped.items() if was_run or node not in pairs}

    def _call_again(self, pairs: Mapping[Any, int]) -> dict[Any, torch.Tensor]:
        """Return what inputs become where the model gets its results in its next call; empty if int8 clips nothing of that.

        Args:
            pairs: the positions of the results, by the inputs' nodes.
        """
        values = {node: self._model.first[node] for node in pairs}
        ranges = Ranges()
        self._model.restore()
        for call in range(_CALLS if pairs else 0):
            visits = {node: partial(_replace, value) for node, value in values.items()}
            sample = self._model.samples[call % len(self._model.samples)]
            if self._model.execute(sample, [visits], ranges):
                return values
            values = {node: _append(value, self._model.results[pairs[node]]) for node, value in values.items()}
        return values if self._is_clipped(ranges) else {}

    def _find_clipped(self, values: Mapping[Any, torch.Tensor]) -> dict[Any, bool]:
        """Return those inputs whose new values int8 clips or the model refuses, and whether it takes them."""
        ranges = self._try({node: partial(_replace, value) for node, value in values.items()}) if values else None
        if not values or (ranges is not None and not self._is_clipped(ranges)):
            return {}
        if len(values) == 1 or self._trials >= MAX_TRIALS:
            return dict.fromkeys(values, ranges is not None)
        nodes = list(values)
        halves = (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
        first, second = (self._find_clipped({node: values[node] for node in half}) for half in halves)
        return first | second or dict.fromkeys(values, ranges is not None)

    def _try_others(self, node: Any) -> bool | None:
        """Return whether an input that is not covered could be another; None if it is covered."""
        value, same = self._model.first[node], self._model.same[node]
        if node in self._model.changed and same in (0, 1) and not self._model.is_zero(node):
            is_integer = not value.is_floating_point() and value.dtype != torch.bool
            is_alone = [each for each in self._model.changed if each.op != "call_function"] == [node]
            change = Changes({node: same}).change
            changes = [{node: partial(change, share=share)} for share in SHARES]
            ranges = self._model.unseen if is_alone else self._try(*changes)
            if ranges is not None and self._is_kept(ranges) and not (is_integer and (same == 0 or not _is_wide(value))):
                return None
        is_count = node in self._model.changed and not value.is_floating_point() and abs(same) > 1
        has_run = False
        for other in _others(value):
            ranges = self._try({node: other})
            if is_count and not has_run and ranges is not None and not self._is_kept(ranges):
                self.idle.add(str(node.target))
            if ranges is not None and self._is_clipped(ranges):
                return True
            has_run |= ranges is not None
        return None if has_run else False

    def _try(self, *attempts: Mapping[Any, Visit]) -> Ranges | None:
        """Return the values that operators have on the first sample with inputs changed; None if the model refuses that."""
        if self._trials >= MAX_TRIALS:
            return None
        self._trials += 1
        ranges = Ranges()
        self._model.restore()
        why = self._model.execute(list(self._model.first.values()), attempts, ranges)
        return None if why else ranges


def _is_wide(value: torch.Tensor) -> bool:
    """Return whether a tensor has more than one number in a row."""
    return bool(value.numel() > (value.shape[0] if value.dim() else 1))


def _pair(
    first: Mapping[Any, Any], nodes: Sequence[Any], results: Sequence[Any], moved: Mapping[Any, Collection[int]]
) -> dict[Any, int]:
    """Return the positions of the results that inputs may get in the next call, by the inputs' nodes: the last ones that fit.

    Those that have parts of the inputs come first.
    """
    pairs: dict[Any, int] = {}
    tries = product((moved, dict.fromkeys(nodes, range(len(results)))), (_has_shape, _may_append))
    for among, fits in tries:
        for node in reversed(nodes):
            free = [i for i in sorted(among[node]) if i not in pairs.values() and fits(first[node], results[i])]
            if free and node not in pairs:
                pairs[node] = free[-1]
    return pairs


def _find_sources(result: Any, passes: Callable[[Any], bool] = lambda _: True) -> set[Any]:
    """Return the nodes that a result is computed from, as far as nodes in between pass."""
    sources, pending = {result}, [result]
    while pending:
        node = pending.pop()
        if isinstance(node, torch.fx.Node) and passes(node):
            pending += set(node.all_input_nodes) - sources
            sources.update(node.all_input_nodes)
    return sources


def _is_moving(node: Any) -> bool:
    return node.op == "call_module" or name_of(node).rstrip("_") in _MOVING


def _has_shape(value: torch.Tensor, result: Any) -> bool:
    return isinstance(result, torch.Tensor) and (result.dtype, result.shape) == (value.dtype, value.shape)


def _may_append(value: torch.Tensor, result: Any) -> bool:
    if not isinstance(result, torch.Tensor) or result.dtype != value.dtype or result.dim() != value.dim() or value.dim() < 3:
        return False
    return len([dim for dim, size in enumerate(value.shape) if size != result.shape[dim]]) == 1


def _append(value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return an input's value for the next call: a result, or the end of the input and the result, as of a cache that grows."""
    dims = [dim for dim, size in enumerate(value.shape) if size != result.shape[dim]]
    if not dims:
        return result.clone()
    return torch.cat([value, result], dims[0]).narrow(dims[0], result.shape[dims[0]], value.shape[dims[0]])


def _replace(other: torch.Tensor, _: Any, value: torch.Tensor) -> torch.Tensor:
    """Return another value; the same one where a sample has another shape."""
    return other if other.shape == value.shape else value


def _make_normal(_: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
    return (scale * torch.randn(value.shape, generator=torch.Generator().manual_seed(SEED))).to(value.dtype)


def _others(value: torch.Tensor) -> list[Visit]:
    """Return functions that give an input values farther away than those that it had."""
    generator = torch.Generator().manual_seed(SEED)

    def shuffle(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)

    def invert(_: Any, value: torch.Tensor) -> torch.Tensor:
        chosen = torch.rand(value.shape, generator=generator) < SHARES[0]
        return torch.where(chosen, (value == 0).to(value.dtype), value)

    is_uniform = bool((value == value.flatten()[:1]).all())
    if value.dtype == torch.bool or (not is_uniform and bool(((value == 0) | (value == 1)).all())):
        return [invert, shuffle]
    steps: list[Visit] = [partial(_apply, torch.add, step) for step in _STEPS]
    if value.is_floating_point():
        return steps if bool((value == 0).all()) else [partial(_apply, torch.mul, factor) for factor in _FACTORS]
    return [lambda _, value: value.div(2, rounding_mode="trunc"), *steps, *([] if is_uniform else [shuffle])]


def _apply(function: Callable[[torch.Tensor, float], torch.Tensor], number: float, _: Any, value: torch.Tensor) -> torch.Tensor:
    return function(value, number)
