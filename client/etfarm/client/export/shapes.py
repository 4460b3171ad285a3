"""Step 1, client: dynamic shapes are checked before and after torch.export, which takes too much of them silently."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from etfarm.client.export.errors import STAGE, DimWithoutMaximum, DynamicShapesForm

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram


def normal_shapes(method: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """One method's dynamic shapes as torch.export takes them: arguments that a dictionary leaves out are static.

    Raises:
        DynamicShapesForm: it names an argument that forward has not, or is a tuple of another length.
        DimWithoutMaximum: a Dim in it has no finite maximum.
    """
    if shapes is None:
        return None
    try:
        arguments = list(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return shapes  # forward does not take these inputs: torch.export says it better
    if isinstance(shapes, Mapping):
        unknown = [str(key) for key in shapes if key not in arguments]
        if unknown:
            raise DynamicShapesForm(
                f"{method}: dynamic_shapes names {unknown[0]!r}, and forward is called with {', '.join(arguments)}.",
                f'Write {{"{method}": {{"{arguments[0]}": {{0: Dim("n", max=64)}}}}}}.' if arguments else "",
                stage=STAGE,
                method=method,
                argument=unknown[0],
                arguments=",".join(arguments),
            )
        _must_have_maxima(method, {name: shapes.get(name) for name in arguments})
        return {name: shapes.get(name) for name in arguments}
    if isinstance(shapes, tuple | list):
        if len(shapes) != len(arguments):
            raise DynamicShapesForm(
                f"{method}: dynamic_shapes is a {type(shapes).__name__} of {len(shapes)}, and forward is called with "
                f"{', '.join(arguments)}.",
                "Give one entry per argument, None where it is static.",
                stage=STAGE,
                method=method,
                arguments=",".join(arguments),
            )
        _must_have_maxima(method, dict(zip(arguments, shapes, strict=True)))
    return shapes


def must_be_bounded(method: str, program: ExportedProgram) -> None:
    """Whether every dynamic dim of the program's inputs is bounded, those of Dim.AUTO and Dim.DYNAMIC too.

    Raises:
        DimWithoutMaximum: one is not.
    """
    ranges = program.range_constraints
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        for index, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if isinstance(size, int):
                continue
            for symbol in size.node.expr.free_symbols:
                if symbol in ranges and _is_unbounded(ranges[symbol].upper):
                    raise DimWithoutMaximum(method, node.name, str(index))


def _must_have_maxima(method: str, shapes: Mapping[str, Any]) -> None:
    for argument, spec in shapes.items():
        for dim in _dims(spec):
            if _is_unbounded(dim.max):
                raise DimWithoutMaximum(method, argument, dim.__name__)


def _dims(spec: Any) -> Iterator[Any]:
    """Every named Dim in a spec, however it is nested; of `2 * n` the Dim n."""
    from torch.export import Dim

    root = getattr(spec, "root", None)
    if root is not None:
        yield from _dims(root)
    elif isinstance(spec, Dim) and hasattr(spec, "max"):
        if not hasattr(spec, "value"):  # Dim of one number, static
            yield spec
    elif isinstance(spec, Mapping):
        for item in spec.values():
            yield from _dims(item)
    elif isinstance(spec, tuple | list):
        for item in spec:
            yield from _dims(item)


def _is_unbounded(bound: Any) -> bool:
    # torch's own infinity, sympy's, and the largest int, which older Dims have.
    try:
        return int(bound) >= sys.maxsize - 1
    except (TypeError, ValueError, OverflowError, AttributeError):
        return True
