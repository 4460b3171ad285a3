"""Runs of a graph whose values are off by as much as those of other kernels may be. For children."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_ROUNDED = 0.01
"""Fraction of the values that correct kernels round to a neighbour of what PyTorch computes."""

_DRAWS: Final = 8
"""Maximum number of runs in half precision, as few integers depend on a single value."""

_TERMS: Final = 12
"""Number of terms of a sum from which on rounding each addition, as some kernels do, counts for more than rounding the sum."""

_HALVES: Final = {"torch.float16": 2.0**-10, "torch.bfloat16": 2.0**-7}
"""The relative distance of neighbours by dtype."""


def run_rounded(program: ExportedProgram, leaves: Sequence[Any], seed: int) -> list[Any]:
    """Return the flattened outputs of a statically quantized program; one in a hundred quantized values is one step off.

    Args:
        leaves: the flattened leaves of (args, kwargs); buffers start as exported and are not modified.
        seed: decides which values are off.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def change(n: Node, compute: Callable[[], Any]) -> Any:
        result = compute()
        if not str(n.target).startswith("quantized_decomposed.quantize_per_"):
            return result
        drawn = torch.rand(result.shape, generator=generator)
        steps = (drawn < _ROUNDED / 2).int() - (drawn > 1 - _ROUNDED / 2).int()
        limits = torch.iinfo(result.dtype)
        return (result.int() + steps).clamp(limits.min, limits.max).to(result.dtype)

    return _run(program, leaves, change)


def run_in_half(program: ExportedProgram, leaves: Sequence[Any], *, float32: bool = False) -> Iterator[list[Any]]:
    """Yield the flattened outputs of runs of a program, in which values of half precision are rounded up or down.

    None if there are no such values. The longer a sum is, the more it is off, since kernels may round each addition.

    Args:
        leaves: as for `run_rounded`.
        float32: whether values of float32 are rounded as those of float16, as backends do that compute in it.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    steps = {**_HALVES, **({"torch.float32": _HALVES["torch.float16"]} if float32 else {})}
    if not any(str(getattr(node.meta.get("val"), "dtype", "")) in steps for node in program.graph.nodes):
        return
    generator = torch.Generator().manual_seed(0)

    def change(n: Node, compute: Callable[[], Any]) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = compute()
        step = steps.get(str(getattr(result, "dtype", "")))
        if n.op != "call_function" or step is None or not result.numel():
            return result
        terms = counter.get_total_flops() / 2 / result.numel()
        values = result.float()
        signs = (torch.rand(result.shape, generator=generator) - 0.5).sign()
        if terms > _TERMS:
            values = values + step / 2 * math.sqrt(terms / _TERMS) * signs * values.square().mean().sqrt()
        else:
            values = values * (1 + step / 2 * signs)
        return values.to(result.dtype)

    for _ in range(_DRAWS):
        yield _run(program, leaves, change)


def _run(program: ExportedProgram, leaves: Sequence[Any], change: Callable[[Node, Callable[[], Any]], Any]) -> list[Any]:
    """Return the flattened outputs of a program whose values are a function of each node, and of what computes its value."""
    import torch

    class Changed(torch.fx.Interpreter):  # type: ignore[misc]
        def run_node(self, n: Node) -> Any:
            return change(n, partial(super().run_node, n))

    with torch.no_grad():
        arguments = list(placeholder_values(program, leaves))
        results = Changed(program.graph_module).run(*arguments, enable_io_processing=False)
    specs = program.graph_signature.output_specs
    return [leaf for leaf, spec in zip(results, specs, strict=True) if spec.kind.name == "USER_OUTPUT"]


def placeholder_values(program: ExportedProgram, leaves: Sequence[Any]) -> Iterator[Any]:
    """Yield the values of a graph's placeholders in order, with copies of its buffers."""
    inputs = iter(leaves)
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            yield next(inputs)
        elif spec.kind.name == "TOKEN":
            yield None
        else:
            name = spec.target or ""
            held = program.state_dict[name] if name in program.state_dict else program.constants[name]
            yield held.clone() if spec.kind.name == "BUFFER" else held
