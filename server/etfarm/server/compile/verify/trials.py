"""Inputs for test runs of a method: its example inputs, and its smallest and largest inputs if it has dynamic dims."""

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
"""Maximum size of inputs that are tried: a network's activations are many times larger, and a job has a few GiB."""

_STEPS: Final = 8
"""Number of sizes next to the minimum or maximum that are tried if a guard refuses it: 0 and 1 are special, and some dims
must be multiples of a step."""


@dataclass(frozen=True)
class Trial:
    """The inputs of a test run of a method."""

    inputs: Inputs
    values: list[Value]
    """Leaves in flattened order, named like the program's inputs."""

    @property
    def shapes(self) -> list[str]:
        """The shapes of the tensors in order, like `2x3`; `scalar` for a tensor without dims."""
        return [_format_shape(value.shape) for value in self.values if isinstance(value, Tensor)]

    @property
    def words(self) -> str:
        """A description for messages, like `at its largest inputs (x: 64x3)`; empty for the example inputs."""
        if self.inputs == "EXAMPLE":
            return ""
        named = ", ".join(f"{v.name or i}: {_format_shape(v.shape)}" for i, v in enumerate(self.values) if isinstance(v, Tensor))
        return f"at its {'largest' if self.inputs == 'MAX' else 'smallest'} inputs ({named})"


@dataclass(frozen=True)
class TooLarge:
    """The size of inputs that exceed MAX_INPUT_BYTES and are not created."""

    size_bytes: int


def is_dynamic(program: Any) -> bool:
    """Return whether a dim of a tensor input is dynamic."""
    return any(isinstance(size, torch.SymInt) for shape in _shapes(program).values() for size in shape)


def example(program: Any) -> Trial | None:
    """Return the example inputs of an exported program; None if it has none."""
    leaves = values.example_values(program)
    return None if leaves is None else Trial("EXAMPLE", leaves)


def extremes(program: Any, at_example: Trial, which: Literal["MIN", "MAX"]) -> Iterator[Trial | TooLarge]:
    """Yield the smallest or largest inputs of a program with dynamic dims, then some next to them in case guards refuse them.

    Every symbol has the same size everywhere, and derived dims follow (2*n, n+1). Contents are tiled or cropped from the
    example inputs, so that indices and masks stay valid; numbers are the example's. Ends at inputs with the example's shapes.
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
    """Return the sizes of the tensor inputs by name, each an int or a SymInt."""
    names = set(values.input_names(program))
    return {
        node.name: node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), torch.Tensor)
    }


def _limits(program: Any, shapes: Mapping[str, Sequence[Any]], at_example: Trial) -> dict[Any, tuple[int, int]]:
    """Return the minimum and maximum size of each symbol; both are equal for a symbol that an integer input determines."""
    limits: dict[Any, tuple[int, int]] = {}
    for shape in shapes.values():
        for size in shape:
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                limit = program.range_constraints[symbol]
                low = int(limit.lower) if limit.lower.is_Integer else 0
                high = int(limit.upper) if limit.upper.is_Integer and limit.upper < 2**62 else None
                # loading.check refuses programs without a maximum.
                limits[symbol] = (max(low, 1), max(low, 1) if high is None else high)
    scalars = {value.name: value.value for value in at_example.values if isinstance(value, Scalar)}
    for node in program.graph.nodes:
        number = node.meta.get("val")
        if node.op == "placeholder" and isinstance(number, torch.SymInt) and isinstance(scalars.get(node.name), int):
            symbol, fixed = number.node.expr, int(scalars[node.name] or 0)
            if symbol in limits:
                limits[symbol] = (fixed, fixed)
    return limits


def _sizes(shape: Sequence[Any], chosen: Mapping[Any, int]) -> tuple[int, ...]:
    return tuple(int(size.node.expr.subs(chosen)) if isinstance(size, torch.SymInt) else int(size) for size in shape)


def _resized(value: Value, shape: tuple[int, ...]) -> Value:
    """Return a tensor tiled or cropped to a shape, in the same dim order."""
    if isinstance(value, Scalar) or value.shape == shape:
        return value
    # As bytes, because torch has no index_select for some dtypes.
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


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
