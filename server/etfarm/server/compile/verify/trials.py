"""Inputs to try a method with: its example inputs, and its smallest and largest ones where it has dynamic dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from etfarm.server.compile.program import values
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Tensor, Value

Inputs = Literal["EXAMPLE", "MIN", "MAX"]

MAX_INPUT_BYTES: Final = 256 << 20
"""Larger inputs are not tried: what a network makes of them is many times their size, and a job has a few GiB."""

_STEPS: Final = 8
"""How many sizes next to the least or greatest are tried where a guard refuses it: 0 and 1 are special, and some dims go
in steps."""


@dataclass(frozen=True)
class Trial:
    """Inputs of one method."""

    inputs: Inputs
    values: list[Value]
    """Leaves in flattened order, named like the program's inputs."""

    @property
    def shapes(self) -> list[str]:
        """Of the tensors, in order: `2x3`; `scalar` for one without dims."""
        return [_shown(value.shape) for value in self.values if isinstance(value, Tensor)]

    @property
    def words(self) -> str:
        """For a sentence: `at its largest inputs (x: 64x3)`; empty for the example inputs."""
        if self.inputs == "EXAMPLE":
            return ""
        named = ", ".join(f"{v.name or i}: {_shown(v.shape)}" for i, v in enumerate(self.values) if isinstance(v, Tensor))
        return f"at its {'largest' if self.inputs == 'MAX' else 'smallest'} inputs ({named})"


@dataclass(frozen=True)
class TooLarge:
    """The largest inputs, which are not made."""

    size_bytes: int


def is_dynamic(program: Any) -> bool:
    """Whether a dim of a tensor input is dynamic."""
    return any(isinstance(size, torch.SymInt) for shape in _shapes(program).values() for size in shape)


def example(program: Any) -> Trial | None:
    """The example inputs that an exported program carries; None without any."""
    found = values.example_values(program)
    return None if found is None else Trial("EXAMPLE", found)


def extremes(program: Any, at_example: Trial, which: Literal["MIN", "MAX"]) -> Iterator[Trial | TooLarge]:
    """The smallest or largest inputs of a program with dynamic dims, and then some next to them, for guards that refuse.

    Every symbol has one size everywhere, and derived dims follow (2*n, n+1). Contents are the example's, tiled or
    cropped, so that indices and masks stay valid; numbers are the example's. Ends at inputs that are the example's own.
    """
    shapes = _shapes(program)
    limits = _limits(program, shapes, at_example)
    before: object = None
    for step in range(_STEPS):
        chosen = {
            symbol: min(low + step, high) if which == "MIN" else max(high - step, low)
            for symbol, (low, high) in limits.items()
        }  # fmt: skip
        if chosen == before:
            return
        before = chosen
        wanted = [_sizes(shapes.get(value.name, ()), chosen) for value in at_example.values]
        if all(isinstance(v, Scalar) or v.shape == shape for v, shape in zip(at_example.values, wanted, strict=True)):
            return
        size = sum(
            math.prod(shape) * ITEM_BYTES[value.dtype]
            for value, shape in zip(at_example.values, wanted, strict=True)
            if isinstance(value, Tensor)
        )
        if size > MAX_INPUT_BYTES:
            yield TooLarge(size)
            return
        yield Trial(which, [_resized(value, shape) for value, shape in zip(at_example.values, wanted, strict=True)])


def _shapes(program: Any) -> dict[str, Sequence[Any]]:
    """Sizes of the tensor inputs, each an int or a SymInt."""
    names = set(values.input_names(program))
    return {
        node.name: node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), torch.Tensor)
    }


def _limits(program: Any, shapes: Mapping[str, Sequence[Any]], at_example: Trial) -> dict[Any, tuple[int, int]]:
    """Least and greatest size of each symbol; one size for a symbol that a number among the inputs holds fast."""
    found: dict[Any, tuple[int, int]] = {}
    for shape in shapes.values():
        for size in shape:
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                limit = program.range_constraints[symbol]
                low = int(limit.lower) if limit.lower.is_Integer else 0
                high = int(limit.upper) if limit.upper.is_Integer and limit.upper < 2**62 else None
                # Without a maximum there is no program: loading.check refuses it.
                found[symbol] = (max(low, 1), max(low, 1) if high is None else high)
    given = {value.name: value.value for value in at_example.values if isinstance(value, Scalar)}
    for node in program.graph.nodes:
        number = node.meta.get("val")
        if node.op == "placeholder" and isinstance(number, torch.SymInt) and isinstance(given.get(node.name), int):
            symbol, fixed = number.node.expr, int(given[node.name] or 0)
            if symbol in found:
                found[symbol] = (fixed, fixed)
    return found


def _sizes(shape: Sequence[Any], chosen: Mapping[Any, int]) -> tuple[int, ...]:
    return tuple(int(size.node.expr.subs(chosen)) if isinstance(size, torch.SymInt) else int(size) for size in shape)


def _resized(value: Value, shape: tuple[int, ...]) -> Value:
    """A tensor's elements, tiled or cropped to a shape, in the same dim order."""
    if isinstance(value, Scalar) or value.shape == shape:
        return value
    # As bytes: torch has no index_select for some dtypes.
    item = ITEM_BYTES[value.dtype]
    physical = torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0, dtype=torch.uint8)
    physical = physical.reshape([*(value.shape[dim] for dim in value.dim_order), item])
    for place, dim in enumerate(value.dim_order):
        have, size = physical.shape[place], shape[dim]
        if have:
            physical = physical.index_select(place, torch.arange(size) % have)
        else:
            physical = physical.new_zeros([*physical.shape[:place], size, *physical.shape[place + 1 :]])
    return Tensor(value.name, value.dtype, shape, physical.numpy().tobytes(), value.dim_order)


def _shown(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
