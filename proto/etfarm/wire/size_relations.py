"""Relations between the sizes of a method's inputs, such as `b.shape[0] == 2*a.shape[0] + 1` and `x.shape[0] % 4 == 0`.

A relation is text: an equality of two expressions of integers and sizes of inputs by name, with +, -, *, //, %, max and min.
Both ends evaluate relations that others wrote, so only these are evaluated, and anything else is no relation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

MAX_RELATIONS: Final = 64
"""Maximum number of relations of a method; torch.export writes a few for each dynamic dim."""

_MAX_TEXT: Final = 300
"""Maximum number of characters of a relation."""

_SIZE: Final = re.compile(r"L((?:\['\w+'\]|\[\d+\])+)\.size\(\)\[(\d+)\]")
"""A size in the guards of torch.export, such as `L['x'].size()[0]`, with the way to the input and the dim."""
_KEY: Final = re.compile(r"\['?(\w+)'?\]")
_LINEAR: Final = re.compile(r"(?:(\d{1,18})\*)?([A-Za-z]\w*)(?: ([+-]) (\d{1,18}))?")
"""A size that follows from another, as sympy writes it: `2*s97 + 1`."""
_MULTIPLE: Final = re.compile(r"\(?(\w+\.shape\[\d+\]) % (\d+)\)? == 0")
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., int]]] = {"max": max, "min": min}


def relations_of(dims: Mapping[str, Sequence[int | str | None]], guards: Sequence[str]) -> list[str]:
    """Return the relations that an exported program has between the sizes of its inputs.

    Args:
        dims: the dims of all inputs by name, in flattened order: an integer, a symbolic size as sympy writes it (`2*s0 + 1`), or
            None if it is unknown. An input that is not a tensor has none.
        guards: the program's `_guards_code`. Only equalities count: other guards tell sizes of 0 and 1 from others as well.
    """
    relations = [*_derived(dims), *_guarded(guards, list(dims))]
    return [relation for relation in dict.fromkeys(relations) if len(relation) <= _MAX_TEXT][:MAX_RELATIONS]


def _derived(dims: Mapping[str, Sequence[int | str | None]]) -> Iterator[str]:
    """Yield the relations of dims whose sizes are the same symbol, or follow from one."""
    linear = [
        (f"{name}.shape[{place}]", match)
        for name, sizes in dims.items()
        for place, size in enumerate(sizes)
        if isinstance(size, str) and (match := _LINEAR.fullmatch(size)) is not None
    ]
    alone = {match[2]: shown for shown, match in reversed(linear) if match[1] is None and match[3] is None}
    first: dict[str, tuple[str, re.Match[str]]] = {}
    for shown, match in linear:
        factor, symbol, sign, offset = match.groups()
        if symbol in alone:
            if alone[symbol] != shown:
                yield f"{shown} == {_times(factor, alone[symbol])}{f' {sign} {offset}' if sign else ''}"
            continue
        # No dim is the symbol itself, so dims are related by what it would be.
        if factor is not None:
            yield f"{_without_offset(shown, match)} % {factor} == 0"
        other, of_other = first.setdefault(symbol, (shown, match))
        if other != shown and of_other.groups() == match.groups():
            yield f"{shown} == {other}"
        elif other != shown:
            yield f"{_times(of_other[1], _without_offset(shown, match))} == {_times(factor, _without_offset(other, of_other))}"


def _times(factor: str | None, size: str) -> str:
    return size if factor is None else f"{factor}*{size}"


def _without_offset(shown: str, match: re.Match[str]) -> str:
    """Return a multiple of a symbol by the dim that also has an offset."""
    return f"({shown} {'-' if match[3] == '+' else '+'} {match[4]})" if match[3] else shown


def _guarded(guards: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the equalities among the guards of torch.export, with the names of inputs."""

    def rename(match: re.Match[str]) -> str:
        first, *rest = _KEY.findall(match[1])
        if first == "flat_args" and len(rest) == 1 and rest[0].isdecimal():  # of a strict export
            name = names[int(rest[0])] if int(rest[0]) < len(names) else ""
        else:
            name = "_".join((first, *rest))
        return f"{name}.shape[{match[2]}]" if name in names else match[0]

    for guard in guards:
        relation = _SIZE.sub(rename, guard).replace("(-1) + ", "-1 + ")
        sides = _sides(relation)
        if sides is not None and {*_sizes_in(sides[0]), *_sizes_in(sides[1])}:
            try:
                written = ast.unparse(ast.parse(relation, mode="eval"))
            except RecursionError:  # of a file that was not written by torch
                continue
            yield written


def find_broken(relations: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> str:
    """Return what is wrong with the sizes of inputs, like `x.shape[0] must be a multiple of 4, got 6`; empty if nothing is.

    Args:
        shapes: the shapes of tensors by the inputs' names.
    """
    for relation in relations[:MAX_RELATIONS]:
        sides = _sides(relation)
        if sides is None:
            continue
        try:
            left, right = (_evaluate(side, shapes) for side in sides)
        except (LookupError, ValueError, ArithmeticError):
            continue  # of an input that is no tensor here, which is refused for that
        if left == right:
            continue
        values = {ast.unparse(node): _evaluate(node, shapes) for side in sides for node in _sizes_in(side)}
        if match := _MULTIPLE.fullmatch(relation):
            return f"{match[1]} must be a multiple of {match[2]}, got {values[match[1]]}"
        return f"{relation} must hold, got {', '.join(f'{shown} = {value}' for shown, value in values.items())}"
    return ""


def _sides(relation: str) -> tuple[ast.expr, ast.expr] | None:
    """Return the two sides of a relation; None if the text is no relation."""
    return _parsed(relation) if len(relation) <= _MAX_TEXT else None


@lru_cache(maxsize=1024)
def _parsed(relation: str) -> tuple[ast.expr, ast.expr] | None:
    """Return what `_sides` does. Cached, since each call of a session has the same relations."""
    try:
        node = ast.parse(relation, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return None
    sides = node.left, node.comparators[0]
    return sides if all(map(_is_expression, sides)) else None


def _is_expression(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.BinOp(left=left, op=operator, right=right):
            return type(operator) in _OPERATORS and _is_expression(left) and _is_expression(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_expression(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _FUNCTIONS and len(arguments) > 1 and all(map(_is_expression, arguments))
    return _is_size(node)


def _is_size(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant(value=dim)):
            return type(dim) is int
    return False


def _sizes_in(side: ast.expr) -> list[ast.expr]:
    return [node for node in ast.walk(side) if isinstance(node, ast.expr) and _is_size(node)]


def _evaluate(node: ast.expr, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the value of an expression.

    Raises:
        LookupError: no such input, or dim.
        ArithmeticError: a division by zero.
    """
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=operator, right=right):
            return _OPERATORS[type(operator)](_evaluate(left, shapes), _evaluate(right, shapes))
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, shapes)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_evaluate(each, shapes) for each in arguments))
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name)), slice=ast.Constant(value=int(dim))):
            return shapes[name][dim]
    raise ValueError(ast.unparse(node))
