"""Runs of a quantized graph whose values are off by as much as those of other kernels may be. For children."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_ROUNDED = 0.01
"""Fraction of the values that correct kernels round to a neighbour of what PyTorch computes."""


def run_rounded(program: ExportedProgram, leaves: Sequence[Any], seed: int) -> list[Any]:
    """Return the flattened outputs of a statically quantized program; one in a hundred quantized values is one step off.

    Args:
        leaves: the flattened leaves of (args, kwargs); buffers start as exported and are not modified.
        seed: decides which values are off.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    class Rounded(torch.fx.Interpreter):  # type: ignore[misc]
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if not str(n.target).startswith("quantized_decomposed.quantize_per_"):
                return result
            drawn = torch.rand(result.shape, generator=generator)
            steps = (drawn < _ROUNDED / 2).int() - (drawn > 1 - _ROUNDED / 2).int()
            limits = torch.iinfo(result.dtype)
            return (result.int() + steps).clamp(limits.min, limits.max).to(result.dtype)

    with torch.no_grad():
        arguments = list(placeholder_values(program, leaves))
        results = Rounded(program.graph_module).run(*arguments, enable_io_processing=False)
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
