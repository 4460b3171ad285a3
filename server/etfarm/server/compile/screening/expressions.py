"""Grammars of the texts in a .pt2 that torch evaluates or pastes into source code. Stdlib only.

Python's own parser reads them (it executes nothing), and only the nodes that torch's printers write pass.
Source: torch/_export/serde/serialize.py (_print_sympy is sympy's srepr; the functions are its `sympy_functions`) and
torch/export/_unlift.py (_convert_guards_code_to_fn).
"""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from typing import Final

from etfarm.server.compile.errors import dim_specialized
from etfarm.server.compile.screening import operators
from etfarm.server.compile.screening.errors import OperatorNotAllowed, UnsafeModel, unknown_operator
from etfarm.wire.dim_guards import how_to_replace_in, why_floats
from etfarm.wire.errors import EtfarmError, error_for

MAX_EXPRESSION: Final = 20_000
MAX_DEPTH: Final = 60
MAX_WORK: Final = 2000
"""Maximum product of terms and degree of an expanded expression, and of each of its parts."""
MAX_DEGREE: Final = 64
MAX_ROOTS: Final = 16
"""Maximum number of square roots in an expression; sympy factorizes numbers below them."""
MAX_LITERAL: Final = 40
MAX_PRECISION: Final = 256
"""Maximum precision of a float in an expression, in bits; torch's floats have 53."""
MAX_NAME: Final = 2000

_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.]*")
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9_]*")
_FUNCTION: Final = re.compile(r"[A-Za-z0-9_.<>\- ]*")
_VERIFIERS: Final = frozenset({"", "ATEN", "TRAINING"})
_QUOTING: Final = frozenset("\"'`\\")
_TREE_TEXT: Final = re.compile(r"[A-Za-z0-9_.\- :/]*")
_RANGE: Final = re.compile(r"[A-Za-z0-9_*+\-/ (),.]{1,2000}")
_LITERAL: Final = re.compile(r"[0-9]*\.?[0-9]*([eE][+-]?[0-9]{1,3})?")
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,40})?(e[+-]?[0-9]{1,3})?")


def edge_dialect_program(what: str) -> EtfarmError:
    """Return the error that the .pt2 is already lowered, so its operators are ExecuTorch's, which could be code.

    Args:
        what: the evidence in the message.
    """
    return error_for(
        "EDGE_DIALECT_PROGRAM",
        f"The model is an edge-dialect program, the output of to_edge or a later stage ({what}), and was not loaded.",
        "Give the ATen-dialect program that it was lowered from, as torch.export.export returns it; the farm lowers it.",
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

_OPERATOR: Final = re.compile(r"torch\.ops\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)(?:\.([A-Za-z][A-Za-z0-9_]*))?")
_OWN: Final = _words(
    "_c10d_functional _dtensor _quantized aten c10d c10d_functional debugprims dim_order_ops executorch executorch_prim fsdp "
    "higher_order inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prim prims profiler quantized quantized_decomposed "
    "rngprims rpc sparse static_runtime streams symm_mem torchao"
)
"""Namespaces of torch, torchao and ExecuTorch. An unlisted operator of theirs is refused as unsafe; one of any other namespace,
such as that of a user's own library, as unknown."""
_EDGE: Final = re.compile(r"executorch\.exir\.dialects\.edge\.[A-Za-z0-9_.]{1,200}")


def check_symbol(text: str, where: str) -> None:
    """Check an `expr_str`, which torch passes to sympify: sympy's srepr of sizes, like `Symbol('s31', integer=True)`.

    Raises:
        UnsafeModel: it is anything else.
    """
    tree = _parse(text, where, "expr_str")
    nodes = _list_nodes(tree, text, where, "expr_str")
    if not all(map(_is_symbol_node, nodes)) or not _has_short_numbers(nodes, text) or _is_costly(nodes):
        raise _unsafe("UNSAFE_EXPRESSION", where, "expr_str", text, how_to_replace_in(text))


def _is_costly(nodes: list[ast.AST]) -> bool:
    """Return whether sympy could compute for long with an accepted expression.

    Sympy expands and compares expressions when it creates them. The terms and the degree of the expanded form are counted from
    the leaves, in linear time and without sympy.

    Args:
        nodes: nodes of the expression, parents before children.
    """
    sizes: dict[int, tuple[int, int]] = {}
    roots = 0
    for node in reversed(nodes):
        name, operands = _operation(node)
        terms = [sizes[id(operand)][0] for operand in operands]
        degrees = [sizes[id(operand)][1] for operand in operands]
        if name == "Mul":
            total, degree = math.prod(terms), sum(degrees)
        elif name == "Pow":
            exponent = _EXPONENTS.get(ast.unparse(operands[1]), 1)
            roots += exponent == 1
            total, degree = terms[0] ** exponent, degrees[0] * exponent
        else:
            total, degree = sum(terms, start=not terms), max(degrees, default=1)
        work = total * degree
        if name in _COMPARING:  # compare their arguments in pairs
            work *= 2 * total
        elif name in _DIVIDING:  # divide by what both arguments have in common
            work = total * sum(degrees)
            # A quotient by a negative power is a power.
            total, degree = terms[0], sum(degrees) - len(degrees) + 1
        if work > MAX_WORK or degree > MAX_DEGREE or roots > MAX_ROOTS:
            return True
        sizes[id(node)] = total, degree
    return False


_COMPARING: Final = _words("Max Min max min")
_DIVIDING: Final = _words("Mod FloorDiv ModularIndexing PythonMod CleanDiv CeilDiv IntTrueDiv FloatTrueDiv")
_NUMBERS: Final = _words("Integer Rational Float")
_LEAVES: Final = _NUMBERS | {"Symbol"}
_NAMES_OF_OPERATORS: Final = {
    ast.Add: "Add", ast.Sub: "Add", ast.Mult: "Mul", ast.Div: "Mul", ast.FloorDiv: "FloorDiv", ast.Mod: "Mod",
}  # fmt: skip


def _operation(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """Return an operation's name and operands; without operands for a leaf."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name not in _LEAVES:
            return name, node.args
        case ast.BinOp():
            return _NAMES_OF_OPERATORS[type(node.op)], [node.left, node.right]
        case ast.UnaryOp():
            return "", [node.operand]
        case ast.Compare():
            return "", [node.left, *node.comparators]
        case ast.BoolOp():
            return "", node.values
        case ast.IfExp():
            return "", [node.test, node.body, node.orelse]
    return "", []


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
    if not all(isinstance(k.value, ast.Constant) and _is_flag(k.value.value) for k in node.keywords):
        return False
    name, texts = node.func.id, [a.value for a in node.args if isinstance(a, ast.Constant) and _is_str(a)]
    if name == "Symbol":
        return len(node.args) == len(texts) == 1 and _SYMBOL.fullmatch(str(texts[0])) is not None
    if name in _NUMBERS and not all(map(_is_literal, node.args)):  # an expression within a number would count as a number
        return False
    if name == "Float":
        return all(_NUMBER.fullmatch(str(text)) for text in texts)
    if texts:
        return False
    if name == "Pow":  # nested powers could occupy a CPU for a long time
        return len(node.args) == 2 and _is_exponent(node.args[1])
    return name in _SYMBOL_FUNCTIONS


_EXPONENTS: Final = {f"{sign}{n}": n for n in range(1, 9) for sign in ("", "-")}
_EXPONENTS.update({f"Integer({text})": n for text, n in list(_EXPONENTS.items())})
"""Allowed exponents as Python unparses them, with their absolute values. Roots do not count."""
_ROOTS: Final = ("Rational(1, 2)", "Rational(-1, 2)")


def _is_exponent(node: ast.AST) -> bool:
    # Bounded before it is unparsed, because an exponent may itself be a tree.
    return sum(1 for _ in ast.walk(node)) <= 12 and (ast.unparse(node) in _EXPONENTS or ast.unparse(node) in _ROOTS)


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= MAX_PRECISION)


def check_guard(text: str, where: str) -> None:
    """Check an entry of `guards_code`, which torch executes: comparisons of sizes like `L['x'].size()[0] <= 8`.

    The keys of dicts may have letters of any script, as in `check_tree`; all other texts are refused.

    Raises:
        DIM_SPECIALIZED: it compares what torch.export fixes, above all floats that are computed of sizes.
        UnsafeModel: it is anything else.
    """
    tree = _parse(text, where, "guards_code", ascii_only=False)
    nodes = _list_nodes(tree, text, where, "guards_code")
    keys = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    if _is_of_floats(nodes) and (size := _SIZE.search(text)) is not None:
        raise dim_specialized("TORCH_EXPORT", f"{size[2]} of {size[1]!r}", why_floats(_SIZE.sub(r"dim \2 of '\1'", text)), "")
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not _is_guard_node(node) or (is_text and id(node) not in keys):
            raise _unsafe("UNSAFE_GUARD", where, "guards_code", text)
    if not _has_short_numbers(nodes, text) or _is_costly(nodes):
        raise _unsafe("UNSAFE_GUARD", where, "guards_code", text)


def _is_of_floats(nodes: list[ast.AST]) -> bool:
    """Return whether a guard has functions of floats or operators on bits, as torch.export writes them, and nothing else."""
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in _FLOAT_FUNCTIONS}
    parts = {id(part) for node in nodes if id(node) in functions for part in ast.walk(node)}
    calls = {id(node) for node in nodes if isinstance(node, ast.Call) and id(node.func) in functions}
    bits = {id(node) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, _FLOAT_OPERATORS)}
    others = parts | calls | bits
    return bool(others) and all(id(node) in others or _is_guard_node(node) for node in nodes)


_FLOAT_FUNCTIONS: Final = _words("math.trunc math.ceil math.floor math.sqrt torch.sym_float round")
_FLOAT_OPERATORS: Final = (ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor)
_SIZE: Final = re.compile(r"L\['(\w{1,100})'\](?:\[[^\]]{1,100}\])*\.size\(\)\[(\d{1,3})\]")


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
            return _is_tree_text(node.value)
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


def check_target(text: str, where: str, allowed: frozenset[str] | None = None) -> None:
    """Check that a node's target, or an operator as an argument, which torch looks up with getattr, is allowed.

    Args:
        allowed: as in `screen.screen_pt2`.

    Raises:
        OperatorNotAllowed: an operator of torch or ExecuTorch that is not on the list.
        UNKNOWN_OPERATOR: an operator of another library.
        EDGE_DIALECT_PROGRAM: an operator of the edge dialect.
        UnsafeModel: it is anything else.
    """
    if text in (operators.builtin() if allowed is None else allowed):
        return
    if _EDGE.fullmatch(text):
        raise edge_dialect_program(text)
    operator = _OPERATOR.fullmatch(text) if len(text) <= MAX_NAME else None
    if operator is None or (operator[3] is None and (operator[1] != "higher_order" or operator[2].startswith("__"))):
        raise _unsafe("UNSAFE_TARGET", where, "target", text)
    namespace, name, overload = operator.groups()
    if namespace in _OWN:
        raise OperatorNotAllowed(where, namespace, name, overload or "")
    raise unknown_operator(f"{namespace}::{name}")


def check_functions(text: str, where: str) -> None:
    """Check a `source_fn_stack` such as `conv,torch.nn.modules.conv.Conv2d;...`, whose paths torch looks up by getattr.

    Raises:
        UnsafeModel: a path is malformed, or has a double underscore.
    """
    for entry in text.split(";"):
        path = entry.rpartition(",")[2]
        if len(path) > MAX_NAME or not _FUNCTION.fullmatch(path) or "__" in path:
            raise _unsafe("UNSAFE_NAME", where, "source_fn_stack", entry)


def check_verifiers(values: object, where: str) -> None:
    """Check that the `verifiers`, by which torch finds the class that verifies the program, are those of ATen programs.

    Raises:
        UnsafeModel: another verifier is named.
    """
    if not isinstance(values, list) or not all(isinstance(value, str) and value in _VERIFIERS for value in values):
        raise _unsafe("UNSAFE_VERIFIER", where, "verifier", str(values))


def check_output_tree(text: str, where: str) -> None:
    """Check the treespec of outputs as JSON. Its dict keys name outputs, and are in no code: they may be any text or number.

    Raises:
        UnsafeModel: it is not a treespec, a key is something else, or another container than a dict does not pass `check_tree`.
    """
    try:
        version, root = json.loads(text)
        others: list[object] = [version]
        stack: list[object] = [root]
        while stack:
            node = stack.pop()
            if not isinstance(node, dict) or node.keys() != _TREE_NODE or not isinstance(node["children_spec"], list):
                raise _unsafe("UNSAFE_TREE", where, "pytree", text)
            stack.extend(node["children_spec"])
            if node["type"] not in _DICTS:
                others.append({**node, "children_spec": []})
            elif not isinstance(node["context"], str) or not _are_keys(json.loads(node["context"])):
                raise _unsafe("UNSAFE_TREE", where, "pytree", text)
        check_tree(json.dumps(others), where)
    except (ValueError, TypeError, RecursionError):
        raise _unsafe("UNSAFE_TREE", where, "pytree", text) from None


_TREE_NODE: Final = frozenset({"type", "context", "children_spec"})
_DICTS: Final = frozenset({"builtins.dict", "collections.OrderedDict"})


def _are_keys(context: object) -> bool:
    """Return whether a dict's context is a list of plain keys; torch would import the module of an enum, which is an object."""
    return isinstance(context, list) and all(
        _is_text(key) if isinstance(key, str) else key is None or isinstance(key, bool | int | float) for key in context
    )


def _is_text(key: str) -> bool:
    try:
        return len(key.encode()) <= 4 * MAX_NAME
    except UnicodeEncodeError:  # a lone surrogate
        return False


def check_tree(text: str, where: str) -> None:
    """Check a treespec as JSON. torch pastes its dict keys into the code of guards, so they must not end a string.

    torch also imports the modules of enums and of defaultdict factories that a treespec names, so these are refused.

    Raises:
        UnsafeModel: it is not JSON of plain texts, or names a module that torch would import.
    """
    try:
        stack: list[object] = [json.loads(text)]
        while stack:
            current = stack.pop()
            if isinstance(current, dict):
                if not current.keys().isdisjoint(_IMPORTED) and not _is_plain_factory(current):
                    raise _unsafe("UNSAFE_TREE", where, "pytree", text)
                stack.extend([*current.keys(), *current.values()])
            elif isinstance(current, list):
                stack.extend(current)
            elif isinstance(current, str) and not _is_tree_text(current):
                stack.append(json.loads(current))  # a node's context is JSON inside of the JSON
    except (ValueError, RecursionError):
        raise _unsafe("UNSAFE_TREE", where, "pytree", text) from None


def _is_tree_text(text: str) -> bool:
    """Return whether a text has no characters that end a string or an expression: letters of any script are allowed."""
    rest = "".join(character for character in text if ord(character) < 128)
    return _TREE_TEXT.fullmatch(rest) is not None and all(
        ord(character) < 128 or character.isalnum() or unicodedata.category(character).startswith("M") for character in text
    )


_IMPORTED: Final = frozenset({"__enum__", "default_factory_module", "default_factory_name"})


def _is_plain_factory(context: dict[str, object]) -> bool:
    module, factory = context.get("default_factory_module"), context.get("default_factory_name")
    return "__enum__" not in context and module == "builtins" and factory in ("dict", "float", "int", "list", "set", "tuple")


def check_float(text: str, where: str) -> None:
    """Check a float that JSON cannot represent as a number.

    Raises:
        UnsafeModel: it is anything else.
    """
    if text not in ("Infinity", "-Infinity", "NaN"):
        raise _unsafe("UNSAFE_NAME", where, "number", text)


def check_path(text: str, where: str) -> None:
    """Check the path of a module, parameter or buffer, like `layers.0.conv@1` or `heads.größe (cm)`; torch sets attributes by it.

    torch.fx pastes a part into source code: an identifier as it is, which Python's parser normalizes, anything else in quotes.

    Raises:
        UnsafeModel: a quote or a backslash would end the quotes, or it is not printable, not normalized, or contains a special
            attribute of Python.
    """
    is_plain = text.isprintable() and unicodedata.is_normalized("NFKC", text)
    if len(text) > MAX_NAME or not is_plain or set(text) & _QUOTING or _has_special_attribute(text):
        remedy = (
            "Name modules, parameters and buffers with printable characters except quotes and backslashes, which "
            "unicodedata.normalize('NFKC', name) leaves as they are."
        )
        raise _unsafe("UNSAFE_NAME", where, "path", text, remedy)


def check_name(text: str, where: str) -> None:
    """Check the name of a parameter, field or type; torch.fx pastes it into source code, and sets attributes by it.

    Raises:
        UnsafeModel: it has characters other than letters, digits, underscores and dots, or a special attribute of Python.
    """
    if len(text) > MAX_NAME or not _NAME.fullmatch(text) or ("." in text and _has_special_attribute(text)):
        raise _unsafe("UNSAFE_NAME", where, "name", text)


def _has_special_attribute(path: str) -> bool:
    return any(part.startswith("__") and part.endswith("__") and len(part) > 4 for part in path.split("."))


def check_identifier(text: str, where: str) -> None:
    """Check the name of a node or an argument, which torch.fx turns into a variable.

    Raises:
        UnsafeModel: it has other characters than letters, digits and underscores.
    """
    if len(text) > MAX_NAME or not _IDENTIFIER.fullmatch(text):
        raise _unsafe("UNSAFE_NAME", where, "name", text)


def check_range(text: str, where: str) -> None:
    """Check a key of `range_constraints`, an expression like `2*s39`, which torch only compares.

    Raises:
        UnsafeModel: it has other characters, or a large number in a symbol's name, up to which torch would count.
    """
    counter = re.match(r"[a-z]+([0-9]+)", text)
    if not _RANGE.fullmatch(text) or (counter and len(counter[1]) > 6):
        raise _unsafe("UNSAFE_NAME", where, "range", text)


def _parse(text: str, where: str, what: str, *, ascii_only: bool = True) -> ast.AST:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    # Bounds come first, because Python's parser and sympy's recursion have no limits.
    if len(text) > MAX_EXPRESSION or deepest > MAX_DEPTH or not text.isprintable() or (ascii_only and not text.isascii()):
        raise _unsafe("UNSAFE_EXPRESSION", where, what, text)
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _unsafe("UNSAFE_EXPRESSION", where, what, text) from None


def _list_nodes(tree: ast.AST, text: str, where: str, what: str) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    level = [tree]
    for _ in range(4 * MAX_DEPTH):
        if not level:
            return nodes
        nodes += level
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    raise _unsafe("UNSAFE_EXPRESSION", where, what, text)


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return (isinstance(value, int) and abs(value) < 1 << 63) or isinstance(value, float)


def _has_short_numbers(nodes: list[ast.AST], text: str) -> bool:
    """Return whether all numbers are finite and written in a few characters: sympy reads `1e9999999` as an exact number."""
    encoded = text.encode()  # offsets count bytes
    for node in nodes:
        if isinstance(node, ast.Constant) and _is_number(node.value):
            literal = encoded[node.col_offset : node.end_col_offset].decode()
            if len(literal) > MAX_LITERAL or not _LITERAL.fullmatch(literal) or not math.isfinite(float(literal)):
                return False
    return True


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _is_str(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def _is_short_text(value: object) -> bool:
    # _is_symbol_call decides which calls may have which texts.
    return isinstance(value, str) and len(value) <= 100


def _unsafe(vector: str, where: str, what: str, text: str, remedy: str = "") -> UnsafeModel:
    return UnsafeModel(vector, where, f"has a {what} that could be code: {text[:120]!r}", remedy)
