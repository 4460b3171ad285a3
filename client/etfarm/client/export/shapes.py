"""Validation of dynamic shapes before and after torch.export, which silently accepts too many."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import (
    STAGE,
    DimSpecialized,
    UnsupportedInput,
    dim_without_maximum,
    with_article,
)
from etfarm.client.export.fixed_sizes import Fixing
from etfarm.wire.dim_guards import (
    WHOLE_NUMBERS,
    computes_in_floats,
    how_to_divide,
    how_to_exclude,
    how_to_relax,
    narrow,
    why_floats,
)
from etfarm.wire.errors import error_for
from etfarm.wire.fixed_numbers import how_to_vary

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from etfarm.client.export.splits import Split
    from etfarm.client.export.traces import Place

_VIOLATED: Final = re.compile(r"Constraints violated \((.+?)\)!")
_CONFLICTS: Final = "Found the following conflicts between user-specified ranges"
_FIXED: Final = re.compile(r"You marked (.+?) as dynamic but your code specialized it to be a constant \((\d+)\)")
_FIXED_HINT: Final = re.compile(r"(?:due to hint of|inferred a static shape of) (\d+) for dimension (.+?)\.?$", re.MULTILINE)
_CONFLICT: Final = re.compile(r"range of (\[.+?\]), conflicting with the (.+?), for (.+?)\.?$", re.MULTILINE)
_DIVIDES: Final = re.compile(r"in the specified range (?:(\d+) <= )?\S+(?: <= (\d+))? satisfy the generated guard .*(?://|%)")
_GUARD: Final = re.compile(r"satisfy the generated guard (.+)")
_QUOTIENT: Final = re.compile(r" // \d+\) == \d+$")
_SIZE: Final = re.compile(r"(?:L|inputs)\['(\w+)'\](?:\.size\(\)|\.shape)\[(\d+)\]")
"""The dims that torch.export 2.13 refuses, as symbolic_shapes.py and _export/non_strict_utils.py word them."""
_STEPS: Final = (
    "Write torch.arange(n) * ((b - a) / torch.tensor(n - 1)) + a for torch.linspace(a, b, n), where n is the size, or export the "
    "dim as static."
)


def normal_shapes(method: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """Return one method's dynamic shapes in the form for torch.export.

    Arguments that a dictionary leaves out are static. Those of `**kwargs` may stand below that name or beside the others, where
    they are in the result; see `keywords_named`.

    Raises:
        DYNAMIC_SHAPES_FORM: it names an argument that forward lacks, or is a tuple of another length, or `**kwargs` have names
            that no parameter can have.
        DIM_WITHOUT_MAXIMUM: a Dim in it has no finite maximum.
        UnsupportedInput: it makes a Python number dynamic.
    """
    if shapes is None:
        return None
    try:
        values = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return shapes  # forward does not take these inputs: torch.export has a better message
    arguments = list(values)
    if (variable := _variable_keywords(module)) in values:
        if isinstance(shapes, tuple | list) and len(shapes) == len(arguments):
            shapes = dict(zip(arguments, shapes, strict=True))
        if isinstance(shapes, Mapping):
            values, shapes = _with_keywords(method, variable, values, shapes)
            arguments = list(values)
    if isinstance(shapes, Mapping):
        unknown = [str(key) for key in shapes if key not in arguments]
        if unknown:
            raise error_for(
                "DYNAMIC_SHAPES_FORM",
                f"{method}: dynamic_shapes names {unknown[0]!r}, and forward is called with {', '.join(arguments)}.",
                f'Write {{"{arguments[0]}": {_example_of(values[arguments[0]])}}} for {method}.' if arguments else "",
                stage=STAGE,
                method=method,
                argument=unknown[0],
                arguments=",".join(arguments),
            )
        entries = {name: shapes.get(name) for name in arguments}
        shapes = {name: _static(values[name]) if shape is None else shape for name, shape in entries.items()}
        _must_be_supported(method, values, shapes)
        return shapes
    if isinstance(shapes, tuple | list):
        if len(shapes) != len(arguments):
            raise error_for(
                "DYNAMIC_SHAPES_FORM",
                f"{method}: dynamic_shapes is {with_article(type(shapes).__name__)} of {len(shapes)}, and forward is called with "
                f"{', '.join(arguments)}.",
                "Give one entry per argument, None where it is static.",
                stage=STAGE,
                method=method,
                arguments=",".join(arguments),
            )
        _must_be_supported(method, values, dict(zip(arguments, shapes, strict=True)))
    return shapes


def _variable_keywords(module: nn.Module) -> str:
    """Return the name of the parameter that takes all other keywords, such as `kwargs`; empty if forward has none."""
    parameters = inspect.signature(module.forward).parameters.values()
    return next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), "")


def _with_keywords(method: str, variable: str, values: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    """Return the values and shapes of arguments with those of `**kwargs` beside the others."""
    keywords = values[variable]
    if unnamed := [name for name in keywords if not name.isidentifier() or iskeyword(name)]:
        raise error_for(
            "DYNAMIC_SHAPES_FORM",
            f"{method}: forward takes {unnamed[0]!r} by **{variable}, which is no name of a parameter, as torch.export needs for "
            "dynamic shapes.",
            f"Give it another name, such as {re.sub(r'[^0-9A-Za-z_]', '_', unnamed[0]).strip('_') or 'x'}_0.",
            stage=STAGE,
            method=method,
            argument=unnamed[0],
        )
    own = shapes.get(variable, {})
    if own is None or (isinstance(own, Mapping) and own.keys() <= keywords.keys()):
        shapes = {name: shape for name, shape in shapes.items() if name != variable} | dict(own or {})
    return {name: value for name, value in values.items() if name != variable} | keywords, shapes


def _static(value: Any) -> Any:
    """Return the shapes of an argument without dynamic dims. torch.export takes None for a tensor or number only."""
    from torch.utils import _pytree as pytree

    if isinstance(value, Mapping) and type(value) in pytree.BUILTIN_TYPES:
        return {key: _static(part) for key, part in value.items()}
    if type(value) in pytree.SUPPORTED_NODES:
        parts = [_static(part) for part in pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]]
        return tuple(parts) if type(value) is tuple else parts
    return None


def _example_of(value: Any) -> str:
    """Return a dynamic shape of an argument as code."""
    if isinstance(value, Mapping) and value:
        name, inner = next(iter(value.items()))
        others = "".join(f", {other!r}: None" for other in [*value][1:])
        return f"{{{name!r}: {_example_of(inner)}{others}}}"
    if isinstance(value, tuple | list) and value:
        return f"({_example_of(value[0])},{' None,' * (len(value) - 1)})"
    return '{0: Dim("n", max=64)}'


@contextmanager
def keywords_named(module: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let forward have a parameter for each keyword that it takes by `**kwargs`.

    torch.export 2.13 takes dynamic shapes of such keywords in no form: it looks for them both in `kwargs` and beside it.
    """
    if not kwargs or not (variable := _variable_keywords(module)):
        yield
        return
    original = module.forward
    signature = inspect.signature(original)
    named = [each for name, each in signature.parameters.items() if name != variable]
    known = {each.name for each in named}
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in known]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    forward.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


def must_be_bounded(method: str, program: ExportedProgram) -> None:
    """Check that every dynamic dim of the program's inputs is bounded, including Dim.AUTO and Dim.DYNAMIC.

    Raises:
        UnsupportedInput: an input is a number that Dim.AUTO made dynamic.
        DIM_WITHOUT_MAXIMUM: a dim is not bounded.
    """
    import torch

    ranges = program.range_constraints
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            raise _dynamic_number(method, node.name, "int" if isinstance(value, torch.SymInt) else "double")
        for index, size in enumerate(getattr(value, "shape", ())):
            if isinstance(size, int):
                continue
            for symbol in size.node.expr.free_symbols:
                if symbol in ranges and _is_unbounded(ranges[symbol].upper):
                    raise dim_without_maximum(method, node.name, str(index))


def specialized(
    method: str,
    text: str,
    place: str,
    find: Callable[[], Split | None],
    find_fixing: Callable[[], Fixing | None],
    find_steps: Callable[[int], Place | None],
    find_limit: Callable[[], Place | None],
    find_example: Callable[[str], int | None],
    only_reshapes_exclude: Callable[[], bool],
) -> DimSpecialized | None:
    """Convert torch.export's message about a dim that cannot be dynamic to one sentence with a remedy.

    Args:
        text: the message of torch.export's exception.
        place: the user's line that it comes from; empty if unknown.
        find: returns the split of a dynamic dim in the model, if there is one.
        find_fixing: returns the equation of a size in the model, if there is one.
        find_steps: returns the line of a linspace of so many steps, if there is one.
        find_limit: returns the line of an operator that limits a size, if there is one.
        find_example: returns the size of a dim in the example inputs, if it is known.
        only_reshapes_exclude: returns whether what excludes sizes is only how torch computes a reshape.

    Returns:
        The error; None if the message is about something else.
    """
    violated = _VIOLATED.match(text)
    if violated is None and not text.startswith(_CONFLICTS):
        return None
    fixed = (match[1], match[2]) if (match := _FIXED.search(text)) else None
    fixed = (match[2], match[1]) if fixed is None and (match := _FIXED_HINT.search(text)) else fixed
    if fixed is not None:
        fixing = find_fixing()
        if (fixing is None or fixing.place is None) and (steps := find_steps(int(fixed[1]))) is not None:
            why = "torch.linspace has a fixed number of steps in the program, that of the example inputs"
            return DimSpecialized(method, _dim_named(fixed[0]), why, _STEPS, str(steps))
        return _fixed(method, fixed[0], int(fixed[1]), str(fixing.place) if fixing and fixing.place else place)
    if violated is None:
        match = _CONFLICT.search(text)
        dim, why = (
            (_dim_named(match[3]), f"its range {match[1]} is not the {match[2]}") if match else ("a dim", "its range is another")
        )
        return DimSpecialized(method, dim, why, "Give it a range of sizes that the model accepts.", place)
    reason = re.search(r"^\s*- (.+?)\.?(?:Specializations unexpectedly required .*)?$", text, re.MULTILINE)
    why = _SIZE.sub(lambda size: _dim_named(size[0]), reason[1]) if reason else "its constraints are violated"
    if (condition := _GUARD.search(why)) and computes_in_floats(condition[1]):
        return DimSpecialized(method, _dim_named(violated[1]), why_floats(condition[1]), WHOLE_NUMBERS, place)
    guard = _DIVIDES.search(reason[1]) if reason else None
    if guard and (split := find()) is not None:
        dim = _dim_named(violated[1])
        return DimSpecialized(
            method, dim, split.why(), split.remedy(int(guard[1] or 0), int(guard[2] or 0)), str(split.place or place)
        )
    fixes = re.search(r"Suggested fixes:\n((?:  .+\n?)+)", text)
    fix = "; ".join(narrow(line.strip(), text) for line in fixes[1].splitlines()) if fixes else ""
    remedy = f"Write {fix}, or remove what limits the size from the model." if fix else "Export the dim as static."
    if _QUOTIENT.search(why):
        fixing = find_fixing() or Fixing(None, None)
        return DimSpecialized(method, _dim_named(violated[1]), fixing.why(), fixing.remedy(), str(fixing.place or place))
    if not fix and reason and condition and "!=" in condition[1] and only_reshapes_exclude():
        why = f"torch.export cannot prove that all its sizes are reshaped like those of the example inputs: {condition[1]}"
        relaxed = how_to_relax(reason[1])
        remedy = f"Write {relaxed}, which needs no proof, in place of {_dim_named(violated[1])}, or export the dim as static."
    elif not fix and reason and (bounds := how_to_exclude(reason[1], find_example)):
        remedy = f"Give the dim {bounds}, or export it as static."
    elif not fix and reason and (multiple := how_to_divide(reason[1])):
        remedy = f"Give the dim as a multiple, {multiple}, with example inputs of such a size, or export it as static."
    return DimSpecialized(method, _dim_named(violated[1]), why[0].lower() + why[1:], remedy, place or str(find_limit() or ""))


def _fixed(method: str, name: str, size: int, place: str) -> DimSpecialized:
    """Return the error of a dim with one fixed size; an example size of 0 or 1 is always treated as fixed."""
    dim = _dim_named(name)
    if size < 2:
        why = f"its size in the example inputs is {size}, which torch.export takes as fixed"
        return DimSpecialized(method, dim, why, "Give example inputs whose size there is 2 or more.", place)
    why = f"the model works with the size {size} only"
    remedy = (
        "Remove what fixes the size (a number in a reshape, a buffer or another input of that size, a loop or a recurrent layer "
        "over it, whose steps the export unrolls) from the model, or leave the dim out of dynamic_shapes. Steps of any number "
        "are a scan of a cell, such as nn.GRUCell. A factor torch.tensor(x.shape[0]).sqrt() replaces math.sqrt(x.shape[0]), and "
        "torch.tensor(x.shape[0]) replaces float() of a size."
    )
    return DimSpecialized(method, dim, why, remedy, place)


def _dim_named(name: str) -> str:
    """Return `dim 0 of 'x'` for torch's `L['x'].size()[0]`, `Dim n` for a name, and `Dims k, n` for several."""
    size = _SIZE.fullmatch(name)
    if size:
        return f"dim {size[2]} of {size[1]!r}"
    return name if "[" in name else f"{'Dims' if ',' in name else 'Dim'} {name}"


def _must_be_supported(method: str, values: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    for argument, spec in shapes.items():
        for name, number in _dynamic_numbers(argument, values[argument], spec):
            raise _dynamic_number(method, name, "int" if isinstance(number, int) else "double")
        for dim in _dims(spec):
            if _is_unbounded(dim.max):
                raise dim_without_maximum(method, argument, dim.__name__)


def _dynamic_numbers(name: str, value: Any, spec: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers, with their names, that a spec makes dynamic whatever the model does with them."""
    from torch.export import Dim

    if type(value) in (int, float):
        # Of Dim.AUTO, the exported program tells what it became.
        if isinstance(spec, Dim) or getattr(getattr(spec, "type", None), "name", "") == "DYNAMIC":
            yield name, value
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        for key in (key for key in value if key in spec):
            yield from _dynamic_numbers(f"{name}_{key}", value[key], spec[key])
    elif isinstance(value, tuple | list) and isinstance(spec, tuple | list):
        for index, (part, part_spec) in enumerate(zip(value, spec, strict=False)):
            yield from _dynamic_numbers(f"{name}_{index}", part, part_spec)


def _dynamic_number(method: str, name: str, kind: str) -> UnsupportedInput:
    what = f"a dynamic {'int' if kind == 'int' else 'float'}: programs of ExecuTorch take numbers that vary only as tensors"
    return UnsupportedInput(method, name, what, f"{how_to_vary(kind)} To keep it constant, give None for it in dynamic_shapes.")


def _dims(spec: Any) -> Iterator[Any]:
    """Yield every named Dim in a nested spec; for `2 * n`, the Dim n."""
    from torch.export import Dim

    root = getattr(spec, "root", None)
    if root is not None:
        yield from _dims(root)
    elif isinstance(spec, Dim) and hasattr(spec, "max"):
        if not hasattr(spec, "value"):  # a Dim of one number is static
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
