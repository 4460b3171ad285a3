"""What to do about conditions of torch.export on the sizes of a dynamic dim. Standard library only."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Final

_DIM: Final = r"(?:L|inputs)\['\w+'\](?:\[[^\]]+\])*(?:\.size\(\)|\.shape)\[\d+\]"
_NAMED: Final = re.compile(r"(?:L|inputs)\['(\w+)'\]((?:\[[^\]]+\])*)(?:\.size\(\)|\.shape)\[(\d+)\]")
_SYMBOL: Final = re.compile(rf"\b(s\d+) = ({_DIM})")
"""What torch says that a symbol of its own stands for."""
_GUARD: Final = re.compile(r"in the specified range (?:(\d+) <= )?\w+(?: <= (\d+))? satisfy the generated guard (.+)$")
"""A condition on one dim, as symbolic_shapes.py of torch 2.13 words it. Without a minimum, sizes begin at 2."""
_MAX_SIZES: Final = 4096
"""Maximum number of sizes that a condition is computed for."""
_LEAST: Final = re.compile(rf"min\((\d+), {_DIM}\) <= {_DIM}")
"""The condition of a slice to the smaller of a number and the size, which torch.export 2.13 does not find true for all sizes."""
_SUGGESTED: Final = re.compile(r"(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)")
_DIVISOR: Final = re.compile(r"// (\d+)\)")

_FLOATS: Final = re.compile(r"\bmath\.[a-z]|\bsym_float\b|\bround\(| \*\* | [&|^] ")
"""Arithmetic in the guards of torch.export 2.13 whose results it fixes."""

WHOLE_NUMBERS: Final = (
    "Compute sizes with whole numbers: x.shape[0] // 2 for int(x.shape[0] * 0.5), -(-n // 4) for math.ceil(n / 4), "
    "(3 * n + 5) // 10 for round(n * 0.3), n > 3 for n * 0.5 > 1.5, n % 2 for n & 1. For slices to such a size, give a multiple "
    "of the divisor as the dim, with a minimum: 2 * Dim('k', min=2, max=8)."
)
"""Remedy for sizes that are computed in floats."""


EXPONENT: Final = "_operator.pow by a size"
REMAINDER: Final = "_operator.mod of a fraction"
MISSING_FUNCTIONS: Final = {
    "math.ceil": ("math.ceil of a size", "-(-n // 4) for math.ceil(n / 4)"),
    "math.floor": ("math.floor of a size", "n // 4 for math.floor(n / 4)"),
    "builtins.round": ("round of a size", "(3 * n + 5) // 10 for round(n * 0.3)"),
    "_operator.abs": ("abs of a size", "the factor torch.tensor(n - 4).abs() for abs(n - 4)"),
    "_operator.and_": ("size & number", "n % 4 for n & 3"),
    "_operator.or_": ("size | number", "n // 4 * 4 + 3 for n | 3"),
    "torch.sym_sum": ("torch.sym_sum", "n + k for torch.sym_sum([n, k])"),
    "torch.sym_ite": ("torch.sym_ite", "the factor torch.where(torch.tensor(n) > 5, 2, 3) for torch.sym_ite(n > 5, 2, 3)"),
    REMAINDER: ("remainder that is a fraction", "the factor torch.tensor(n) % 2.5 for n % 2.5"),
    "_operator.pow of a fraction": ("power of a size that is a fraction", "the factor torch.tensor(n) ** -0.5 for n ** -0.5"),
    EXPONENT: ("power whose exponent is a size", "the factor 2 ** torch.tensor(n) for 2 ** n"),
}  # fmt: skip
"""Functions of sizes that torch 2.13 does not save or load again, or that ExecuTorch 1.5 does not compute, with what gives the
same number.
"""
_IN_ARCHIVES: Final = {
    "BitwiseFn_bitwise_and": "_operator.and_",
    "BitwiseFn_bitwise_or": "_operator.or_",
    "FloatPow": "_operator.pow of a fraction",
    "Piecewise": "torch.sym_ite",
    "PowByNatural": EXPONENT,
}
"""Such functions that torch saves, by the names that archives have for them."""


def how_to_replace(function: str) -> str:
    """Return what to write in place of a function in `MISSING_FUNCTIONS`."""
    return f"Write {MISSING_FUNCTIONS[function][1]}, where n is a size, such as x.shape[0]."


def how_to_replace_in(expression: str) -> str:
    """Return what to write in place of the first such function in an archive's expression of sizes; empty if there is none."""
    name = next((name for name in re.findall(r"(\w+)\(", expression) if name in _IN_ARCHIVES), "")
    return how_to_replace(_IN_ARCHIVES[name]) if name else ""


def name_dims(text: str) -> str:
    """Return a text of torch with `dim 0 of 'x'` in place of torch's own names, `s53` and `L['x'].size()[0]`."""
    for symbol, dim in set(_SYMBOL.findall(text)):
        text = re.sub(rf"\b{symbol}\b", lambda _, dim=dim: dim, text.replace(f"{symbol} = {dim}", symbol))  # type: ignore[misc]
    return _NAMED.sub(r"dim \3 of '\1'\2", text)


def computes_in_floats(guard: str) -> bool:
    """Return whether a condition on sizes has arithmetic whose results torch.export fixes, above all that of floats."""
    return _FLOATS.search(guard) is not None


def why_floats(guard: str) -> str:
    """Return why a dim with such a condition cannot be dynamic, as the rest of a sentence."""
    return f"the export fixes what the model computes of it other than with +, -, *, // and %: {guard}"


def how_to_exclude(why: str, find_example: Callable[[str], int | None] = lambda dim: None) -> str:
    """Return which bound a dim needs instead, like `a smaller max (7)`; empty if `why` does not exclude sizes.

    Args:
        why: torch's sentence without its full stop.
        find_example: returns the size of a dim in the example inputs, which the bounds then include.
    """
    match = _GUARD.search(why)
    if match is None:
        return "a larger min or a smaller max" if "!=" in why else ""
    low, high = int(match[1] or 2), int(match[2]) if match[2] else None
    if (least := _LEAST.fullmatch(match[3])) is not None:
        return f"a larger min ({least[1]})" if low < int(least[1]) <= (high or _MAX_SIZES) else ""
    if "!=" not in match[3]:
        return ""
    excluded = _excluded(match[3], low, min(high or _MAX_SIZES, low + _MAX_SIZES))
    dim = re.search(_DIM, match[3])
    if excluded and dim and (example := find_example(dim[0])) is not None:
        return _around(example, excluded, low, high)
    bounds = []
    if excluded and excluded[-1] + 1 < (high or excluded[-1] + 2):  # a dim of one size is static
        bounds.append(f"a larger min ({excluded[-1] + 1})")
    if excluded and excluded[0] - 1 > low:
        bounds.append(f"a smaller max ({excluded[0] - 1})")
    return " or ".join(bounds) or "a larger min or a smaller max"


def _around(example: int, excluded: list[int], low: int, high: int | None) -> str:
    """Return the bounds of the range around an example that has no excluded sizes; empty if it has one size."""
    least = max((size + 1 for size in excluded if size < example), default=low)
    most = min((size - 1 for size in excluded if size > example), default=high)
    if least == most:
        return ""
    bounds = [f"a larger min ({least})"] * (least != low) + [f"a smaller max ({most})"] * (most != high)
    return " and ".join(bounds)


def how_to_relax(why: str) -> str:
    """Return the Dim.DYNAMIC of the range in torch's sentence, like `Dim.DYNAMIC(min=4, max=16)`."""
    match = _GUARD.search(why)
    low, high = (match[1], match[2]) if match else (None, None)
    bounds = [f"min={low}"] * (low is not None) + [f"max={high}"] * (high is not None)
    return f"Dim.DYNAMIC({', '.join(bounds or ['max=...'])})"


def narrow(fix: str, reasons: str) -> str:
    """Return torch's suggested fix, a Dim with bounds, without the sizes at its ends that further conditions exclude.

    torch 2.13 suggests the bounds of the conditions that are inequalities, also where `n != 24` excludes one of them.

    Args:
        fix: as `n = Dim('n', min=4, max=24)`; others are returned as they are.
        reasons: torch's sentences, a line each.
    """
    match = _SUGGESTED.fullmatch(fix)
    if match is None:
        return fix
    low, high = int(match[2] or 2), int(match[3]) if match[3] else _MAX_SIZES
    guards = [guard[3] for line in reasons.splitlines() if (guard := _GUARD.search(line.rstrip("."))) is not None]
    excluded = {size for guard in guards if "!=" in guard for size in _excluded(guard, low, min(high, low + _MAX_SIZES))}
    least, most = low, high
    while least in excluded:
        least += 1
    while most in excluded:
        most -= 1
    bounds = [f", min={least}"] * (bool(match[2]) or least != low) + [f", max={most}"] * bool(match[3])
    return f"{match[1]} = Dim('{match[1]}'{''.join(bounds)})" if least < most else fix


def how_to_divide(why: str) -> str:
    """Return the Dim of a multiple that a slice by a quotient of the size needs; empty if `why` is about something else.

    Args:
        why: torch's sentence without its full stop.
    """
    match = _GUARD.search(why)
    divisors = set(_DIVISOR.findall(match[3])) if match and "!=" not in match[3] else set()
    if match is None or len(divisors) != 1 or len(set(re.findall(_DIM, match[3]))) != 1:
        return ""
    divisor, low, high = int(divisors.pop()), int(match[1] or 2), match[2]
    most = int(high) // divisor if high else None
    least = max(2, -(-low // divisor))
    return "" if most is not None and most <= least else f"{divisor} * Dim('k', min={least}, max={most or '...'})"


def _excluded(guard: str, low: int, high: int) -> list[int]:
    """Return the sizes of a dim for which a condition is false; none if it is about several dims, or not on whole numbers."""
    if len(set(re.findall(_DIM, guard))) != 1:
        return []
    try:
        tree = ast.parse(re.sub(_DIM, "n", guard).strip(), mode="eval").body
        return [size for size in range(low, high + 1) if not _value(tree, size)]
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return []


def _value(node: ast.AST, size: int) -> int:
    """Return the value of an expression of `n`.

    Raises:
        ValueError: it has another operator than those of whole numbers.
    """
    match node:
        case ast.Name(id="n"):
            return size
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, size)
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(node.left, size), _value(node.right, size))
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(node.left, size), _value(right, size))
    raise ValueError


_OPERATORS: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.NotEq: operator.ne, ast.Eq: operator.eq,
}  # fmt: skip
