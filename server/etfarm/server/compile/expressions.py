"""Grammars of the texts in a .pt2 that torch evaluates or pastes into source code. Stdlib only.

Python's own parser reads them (it executes nothing), and only the nodes that torch's printers write pass.
Source: torch/_export/serde/serialize.py (_print_sympy is sympy's srepr; the functions are its `sympy_functions`) and
torch/export/_unlift.py (_convert_guards_code_to_fn).
"""

from __future__ import annotations

import ast
import json
import re
from typing import Final

from etfarm.server.compile.refusals import UnknownOperator, UnsafeModel
from etfarm.wire.errors import UserError

MAX_EXPRESSION: Final = 20_000
MAX_DEPTH: Final = 60
MAX_NAME: Final = 2000

_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.]*")
_PATH: Final = re.compile(r"[A-Za-z0-9_.@\-]*")
_TREE_TEXT: Final = re.compile(r"[A-Za-z0-9_.\- :/]*")
_RANGE: Final = re.compile(r"[A-Za-z0-9_*+\-/ (),.]{1,2000}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,40})?(e[+-]?[0-9]{1,3})?")


class EdgeDialectProgram(UserError):
    """A .pt2 that was lowered already: its operators are ExecuTorch's, which look like code to whoever loads them.

    Args:
        what: what shows it, for the sentence.
    """

    reason = "EDGE_DIALECT_PROGRAM"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The model is an edge-dialect program, which to_edge or a stage after it made ({what}), and was not loaded.",
            "Give the ATen-dialect program that it was lowered from, as torch.export.export gives it; the farm lowers it.",
            what=what,
        )  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SYMBOL_FUNCTIONS: Final = _words(
    "Integer Rational Float Add Mul Mod Max Min Abs FloorDiv ModularIndexing PythonMod CleanDiv CeilDiv "
    "CeilToInt FloorToInt IntTrueDiv FloatTrueDiv ToFloat TruncToInt TruncToFloat RoundToInt Identity Where "
    "And Or Not Equality Unequality LessThan StrictLessThan GreaterThan StrictGreaterThan"
)
_SYMBOL_FLAGS: Final = frozenset({"positive", "integer", "nonnegative", "nonzero", "real", "precision"})
_SYMBOL_CONSTANTS: Final = frozenset({"true", "false", "oo"})
_GUARD_FUNCTIONS: Final = _words(
    "Mod Max Min Abs FloorDiv PythonMod CleanDiv CeilToInt FloorToInt IntTrueDiv ToFloat TruncToInt Eq Ne min max abs len"
)
_GUARD_METHODS: Final = frozenset({"size", "stride", "storage_offset"})

_OPERATORS: Final = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod)
_COMPARISONS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_NAMESPACES: Final = (
    "aten|prim|prims|quantized|quantized_decomposed|torchao|executorch|executorch_prim|dim_order_ops|llama|"
    "torchvision|higher_order|et_vk|cortex_m|tosa"
)
_OP: Final = r"(_{0,2}[A-Za-z][A-Za-z0-9_]*[A-Za-z0-9]_?|[A-Za-z]|__(and|or|xor|lshift|rshift)__)"
_TARGET: Final = re.compile(
    r"torch\.ops\.quant\.dequantize_codebook\.default|"  # others of this library choose values, which no program does
    rf"torch\.ops\.higher_order\.[a-z][a-z0-9_]*|torch\.ops\.({_NAMESPACES})\.{_OP}\.[A-Za-z][A-Za-z0-9_]*"
    r"|torch\.(_sym|sym)_(int|float|max|min|not|ite|sum|sqrt|abs)"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|truediv|mod|pow|and_|or_|lshift|rshift|getitem)"
    r"|math\.(trunc|ceil|floor|sqrt)"
)
_CUSTOM: Final = re.compile(r"torch\.ops\.([A-Za-z][A-Za-z0-9_]*)\.([A-Za-z][A-Za-z0-9_]*)\.[A-Za-z][A-Za-z0-9_]*")
_EDGE: Final = re.compile(r"executorch\.exir\.dialects\.edge\.[A-Za-z0-9_.]{1,200}")
_HIGHER_ORDER_REFUSED: Final = frozenset(
    f"torch.ops.higher_order.{name}"
    for name in ("call_torchbind", "aoti_call_delegate", "triton_kernel_wrapper_functional", "run_const_graph",
                 "triton_kernel_wrapper_mutation", "inductor_compiled_code", "print", "with_effects")
)  # fmt: skip


def check_symbol(text: str, where: str) -> None:
    """An `expr_str`, which torch hands to sympify: sympy's srepr of sizes, like `Symbol('s31', integer=True)`.

    Raises:
        UnsafeModel: it is anything else.
    """
    tree = _parsed(text, where, "expr_str")
    for node in _nodes(tree, text, where, "expr_str"):
        if not _is_symbol_node(node):
            raise _refused("UNSAFE_EXPRESSION", where, "expr_str", text)


def _is_symbol_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _is_symbol_call(node)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATORS)
    if isinstance(node, ast.Name):  # `true`, or a function's or symbol's name: those that are called are in _is_call
        return node.id in _SYMBOL_CONSTANTS | _SYMBOL_FUNCTIONS | {"Symbol", "Pow"} or bool(
            re.fullmatch(r"[suzf][0-9]{1,6}|zuf[0-9]{1,6}", node.id)
        )
    if isinstance(node, ast.Constant):
        return _is_number(node.value) or isinstance(node.value, bool) or _is_short_text(node.value)
    return isinstance(node, ast.keyword | ast.Expression | ast.Load | ast.operator | ast.unaryop)


def _is_symbol_call(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Name) or any(k.arg not in _SYMBOL_FLAGS for k in node.keywords):
        return False
    if any(not isinstance(k.value, ast.Constant) or isinstance(k.value.value, str) for k in node.keywords):
        return False
    name, texts = node.func.id, [a.value for a in node.args if isinstance(a, ast.Constant) and _is_str(a)]
    if name == "Symbol":
        return len(node.args) == len(texts) == 1 and _SYMBOL.fullmatch(str(texts[0])) is not None
    if name == "Float":
        return all(_NUMBER.fullmatch(str(text)) for text in texts)
    if texts:
        return False
    if name == "Pow":  # towers of powers are a way to keep a CPU busy
        exponent = node.args[1:] and ast.unparse(node.args[1])
        return bool(re.fullmatch(r"(Integer\(-?[1-8]\)|Rational\(-?1, 2\)|-?[1-8])", str(exponent)))
    return name in _SYMBOL_FUNCTIONS


def check_guard(text: str, where: str) -> None:
    """An entry of `guards_code`, which torch executes: comparisons of sizes like `L['x'].size()[0] <= 8`.

    Raises:
        UnsafeModel: it is anything else.
    """
    tree = _parsed(text, where, "guards_code")
    for node in _nodes(tree, text, where, "guards_code"):
        if not _is_guard_node(node):
            raise _refused("UNSAFE_GUARD", where, "guards_code", text)


def _is_guard_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return not node.args and not node.keywords and node.func.attr in _GUARD_METHODS
        return isinstance(node.func, ast.Name) and node.func.id in _GUARD_FUNCTIONS and not node.keywords
    if isinstance(node, ast.Attribute):
        return node.attr in _GUARD_METHODS and isinstance(node.value, ast.Subscript)
    if isinstance(node, ast.Name):
        return node.id in _GUARD_FUNCTIONS or node.id == "L"
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _TREE_TEXT.fullmatch(node.value) is not None
        return _is_number(node.value) or isinstance(node.value, bool) or node.value is None
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATORS)
    if isinstance(node, ast.Compare):
        return all(isinstance(op, _COMPARISONS) for op in node.ops)
    allowed = (
        ast.BoolOp, ast.UnaryOp, ast.Subscript, ast.IfExp, ast.Expression, ast.Load, ast.operator, ast.unaryop,
        ast.boolop, ast.cmpop,
    )  # fmt: skip
    return isinstance(node, allowed)


def check_target(text: str, where: str) -> None:
    """A node's target, which torch looks up by getattr: an operator of a known library, or arithmetic on sizes.

    Raises:
        UnknownOperator: an operator of another library.
        EdgeDialectProgram: an operator of the edge dialect.
        UnsafeModel: it is anything else.
    """
    if _EDGE.fullmatch(text):
        raise EdgeDialectProgram(text)
    custom = _CUSTOM.fullmatch(text)
    if custom and not _TARGET.fullmatch(text):
        raise UnknownOperator(f"{custom[1]}::{custom[2]}")
    if not _TARGET.fullmatch(text) or text in _HIGHER_ORDER_REFUSED:
        raise _refused("UNSAFE_TARGET", where, "target", text)


def check_tree(text: str, where: str) -> None:
    """A treespec as JSON, whose dict keys torch pastes into the code of guards: no quotes, nothing that ends a string.

    Raises:
        UnsafeModel: it is no JSON of plain texts.
    """
    try:
        stack: list[object] = [json.loads(text)]
        while stack:
            found = stack.pop()
            if isinstance(found, dict):
                stack.extend([*found.keys(), *found.values()])
            elif isinstance(found, list):
                stack.extend(found)
            elif isinstance(found, str) and not _TREE_TEXT.fullmatch(found):
                stack.append(json.loads(found))  # a node's context is JSON inside of the JSON
    except (ValueError, RecursionError):
        raise _refused("UNSAFE_TREE", where, "pytree", text) from None


def check_path(text: str, where: str) -> None:
    """A module's path like `layers.0.conv@1`.

    Raises:
        UnsafeModel: it is anything else.
    """
    if len(text) > MAX_NAME or not _PATH.fullmatch(text):
        raise _refused("UNSAFE_NAME", where, "path", text)


def check_name(text: str, where: str) -> None:
    """A name of a node, an argument, a parameter or a field; torch.fx pastes them into source code.

    Raises:
        UnsafeModel: it has other characters than letters, digits, underscores and dots.
    """
    if len(text) > MAX_NAME or not _NAME.fullmatch(text):
        raise _refused("UNSAFE_NAME", where, "name", text)


def check_range(text: str, where: str) -> None:
    """A key of `range_constraints`, an expression like `2*s39`, which torch only compares.

    Raises:
        UnsafeModel: it has other characters, or a counter that torch would count up to.
    """
    counter = re.match(r"[a-z]+([0-9]+)", text)
    if not _RANGE.fullmatch(text) or (counter and len(counter[1]) > 6):
        raise _refused("UNSAFE_NAME", where, "range", text)


def _parsed(text: str, where: str, what: str) -> ast.AST:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    # Bounds first: Python's parser, and sympy's recursion, have none of their own.
    if len(text) > MAX_EXPRESSION or deepest > MAX_DEPTH or not text.isascii():
        raise _refused("UNSAFE_EXPRESSION", where, what, text)
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _refused("UNSAFE_EXPRESSION", where, what, text) from None


def _nodes(tree: ast.AST, text: str, where: str, what: str) -> list[ast.AST]:
    found: list[ast.AST] = []
    level = [tree]
    for _ in range(4 * MAX_DEPTH):
        if not level:
            return found
        found += level
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    raise _refused("UNSAFE_EXPRESSION", where, what, text)


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return (isinstance(value, int) and abs(value) < 1 << 63) or isinstance(value, float)


def _is_str(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def _is_short_text(value: object) -> bool:
    # Which calls may have a text, and which text, _is_symbol_call says.
    return isinstance(value, str) and len(value) <= 100


def _refused(vector: str, where: str, what: str, text: str) -> UnsafeModel:
    return UnsafeModel(vector, where, f"has a {what} that could be code: {text[:120]!r}")
