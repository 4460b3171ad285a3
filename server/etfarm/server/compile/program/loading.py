"""Loading of a screened .pt2 in the child, and checks for programs that would not compile to what the user expects."""

from __future__ import annotations

import importlib
import io
import json
import logging
import operator
import re
import traceback
from pathlib import Path
from typing import Any, Final

import torch
from torch._export.serde import schema
from torch.utils._python_dispatch import TorchDispatchMode

from etfarm.server.compile.errors import StageFailed, dim_without_maximum, dynamic_number, training_mode
from etfarm.server.compile.program.descriptions import describe_place, first_line
from etfarm.server.compile.program.places import all_nodes, places
from etfarm.server.compile.screening import archives, screen
from etfarm.server.compile.screening.errors import NotAPt2, pt2_of_another_torch
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.graphs.programs import read_program
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.server.workers.limits import limit_loading
from etfarm.wire.dim_guards import REMAINDER, how_to_replace
from etfarm.wire.errors import EtfarmError, error_for

_log = logging.getLogger(__name__)

_LIBRARIES: Final = {
    b"torch.ops.quant.": "torchao.prototype.quantization.codebook_coreml",
    b"torch.ops.llama.": "executorch.extension.llm.custom_ops.custom_ops",
}
"""Modules that register operators when they are imported, in addition to those that every child imports, by the text that
the JSON of a model with such operators contains."""

_VERSION: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,8}){1,3}[0-9a-z.+]{0,40}")
"""Versions of torch that may be quoted from a file: `2.13.0+cpu`, `2.14.0a0+git1234567`."""
_UNKNOWN_CLASS: Final = re.compile(r"Deserializing ([\w.]{1,200}) in pytree is not registered")
_EMPTY_REGION: Final = re.compile(r"Node\.meta wrap_with_(?:set_grad_enabled|autocast)\w* is missing val field")
_MAX_MAJOR: Final = 1_000_000
_CAT: Final = torch.ops.aten.cat.default


def load(model: Path, folder: Path, operators: Operators | None = None) -> Any:
    """Return the exported program of a .pt2, screened again with the readers that load it.

    Args:
        operators: operators that the program may use; the committed list when None.

    Raises:
        PT2_OF_ANOTHER_TORCH: torch cannot read it, and it was written by another torch.
        UNKNOWN_STRUCTURE: its inputs or outputs are objects of a class that the server does not have.
        NotAPt2: torch cannot read it.
        UnsafeModel: as `screen_pt2`.
    """
    # torch only opens files whose names end in .pt2; names in the store are digests.
    link = folder / "model.pt2"
    if not link.exists():
        link.symlink_to(model)
    with limit_loading(model):
        return _load(link, operators or Operators())


def _load(link: Path, operators: Operators) -> Any:
    records = screen_whole(link, operators)
    graph = records.read("models/model.json")
    try:
        for namespace, module in _LIBRARIES.items():
            if namespace in graph:
                importlib.import_module(module)
        for module in operators.modules(graph):
            importlib.import_module(module)
        return _name_joins(_resolve_derived_dims(read_program(str(link))))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise _unreadable_error(graph, first_line(error)) from None


def screen_whole(model: Path, operators: Operators) -> archives.Records:
    """Screen a .pt2 with Python's reader and with torch's reader, which loads it; return the records of torch's reader.

    Raises:
        NotAPt2, UnsafeModel, UNKNOWN_OPERATOR: as `screen.screen_pt2`.
    """
    screen.screen_pt2(model, operators.targets)
    records = _torch_records(str(model))
    screen.screen_records(records, lambda _, data: _torch_records(io.BytesIO(data)), allowed=operators.targets)
    return records


def _unreadable_error(graph: bytes, why: str) -> EtfarmError:
    """Return the error for a program that torch cannot read, depending on the version that the program states.

    Args:
        graph: the program's JSON. The screen has parsed it, so it is an object within the screen's limits; its values may
            be anything.
        why: torch's message.
    """
    if (match := _UNKNOWN_CLASS.search(why)) is not None:
        return error_for(
            "UNKNOWN_STRUCTURE",
            f"The .pt2 takes or returns objects of the class {match[1]}, which the server does not have.",
            "Give etfarm the module itself, or file.py:factory: it exports such objects as dicts. Or return a tuple or dict.",
            kind=match[1],
        )
    program = json.loads(graph)
    ours = torch.__version__.partition("+")[0]
    stated = program.get("torch_version")
    written = stated if isinstance(stated, str) and _VERSION.fullmatch(stated) else ""
    version = program.get("schema_version")
    major = version.get("major") if isinstance(version, dict) else None
    if isinstance(major, int) and 0 < major < _MAX_MAJOR and major != schema.SCHEMA_VERSION[0]:
        return pt2_of_another_torch(written, ours, f"its schema is version {major}, not {schema.SCHEMA_VERSION[0]}")
    if written and written.partition("+")[0] != ours:
        return pt2_of_another_torch(written, ours, why.rstrip("."))
    if _EMPTY_REGION.search(why):
        return NotAPt2(
            f"torch {ours} cannot read a region of torch.no_grad or torch.autocast that returns nothing",
            "Export it within torch.no_grad(), which makes no regions of that, and return something from those of "
            "torch.autocast. Or give etfarm the module itself, or file.py:factory.",
        )
    return NotAPt2(f"torch {ours} cannot read it ({why})")


def _resolve_derived_dims(program: Any) -> Any:
    """Return the program with the sizes and ranges of derived dims (`2 * n + 1`) moved to their symbols (n).

    When torch 2.13 reads a program, it files both under the derived expression. A range under an expression makes every
    later decomposition fail ("expected sympy.Symbol"). An example size under an expression leaves n without a size, so that
    conditions on n count as data-dependent.
    """
    environments = {
        id(mode.shape_env): mode.shape_env
        for node in program.graph.nodes
        if (mode := getattr(node.meta.get("val"), "fake_mode", None)) is not None and mode.shape_env is not None
    }
    for environment in environments.values():
        sizes = environment.backed_var_to_val
        for expression in [key for key in sizes if not key.is_Symbol]:
            size = sizes.pop(expression)
            for symbol in expression.free_symbols if len(expression.free_symbols) == 1 else ():
                factor = expression.coeff(symbol)
                offset = expression - factor * symbol  # not the value at 0, where `1 / n` has none
                if factor and offset.is_number and ((size - offset) / factor).is_Integer:
                    sizes.setdefault(symbol, (size - offset) / factor)
        for expression in [key for key in environment.var_to_range if not key.is_Symbol]:
            del environment.var_to_range[expression]  # follows from n's range, and stays in range_constraints
    return program


def _name_joins(program: Any) -> Any:
    """Return the program with `cat` in place of operators that are nothing else, such as `concat` and `hstack`.

    XNNPACK's quantizer gives the operands of `cat` one scale, so that XNNPACK joins them as integers. It does not know others.
    """
    for node in all_nodes(program):
        if node.target is not _CAT and _takes_tensors(node.target) and (joined := _as_cat(node)) is not None:
            node.target, node.args, node.kwargs = _CAT, joined, {}
    return program


def _takes_tensors(target: Any) -> bool:
    """Return whether a target is an operator that torch computes by others, and whose first argument is a list."""
    is_composite = isinstance(target, torch._ops.OpOverload) and target._can_decompose()
    return is_composite and any(isinstance(each.type, torch.ListType) for each in target._schema.arguments[:1])


def _as_cat(node: Any) -> tuple[Any, int] | None:
    """Return the arguments of the one `cat` that a node computes of its operands; None if it computes something else."""
    calls = _Calls()
    values = torch.fx.node.map_arg(node.args, lambda each: each.meta["val"])
    with calls:
        node.target(*values, **node.kwargs)
    match calls.recorded:
        case [(target, (operands, *dim))] if target is _CAT and list(map(id, operands)) == list(map(id, values[0])):
            return node.args[0], *(dim or (0,))
    return None


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """The operators that are computed inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.recorded.append((func, args))
        return func(*args, **(kwargs or {}))


def _torch_records(source: str | io.BytesIO) -> archives.Records:
    try:
        reader = torch._C.PyTorchFileReader(source)
        names = tuple(reader.get_all_records())
        return archives.Records(names, reader.get_record, {name: reader.get_record_size(name) for name in names})
    except RuntimeError as error:
        raise NotAPt2(f"torch cannot open it ({first_line(error)})") from None


def check(program: Any, method: str) -> None:
    """Refuse programs that would compile without an error, and then fail or compute something else on a device.

    Raises:
        TRAINING_MODE: batch norm or dropout in training mode.
        UNSUPPORTED_INPUT: an input is a number that was declared dynamic.
        DIM_WITHOUT_MAXIMUM: a dynamic dim of an input has no finite maximum.
        StageFailed: a remainder is that of a fraction, which the runtime refuses.
    """
    for node in all_nodes(program):
        if node.op == "call_function" and _is_training(node):
            name = str(node.target).rpartition(".")[0].removeprefix("aten.")
            raise training_mode(method, name, where=describe_place(places([node])))
        if node.target is operator.mod and isinstance(node.meta.get("val"), torch.SymFloat):
            line = describe_place(places([node]))
            why = f"ExecuTorch computes no remainder of a fraction{f', as at {line}' if line else ''}."
            raise StageFailed("TORCH_EXPORT", "NotImplementedError", why, how_to_replace(REMAINDER))
    inputs = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" and node.name in inputs else None
        if isinstance(value, torch.SymInt | torch.SymFloat):
            raise dynamic_number(method, node.name, "int" if isinstance(value, torch.SymInt) else "double")
        if isinstance(value, torch.Tensor):
            for index, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and bounds(program, size)[1] is None:
                    raise dim_without_maximum(method, node.name, index, str(size))


def _is_training(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if argument.name == "dropout_p":
            return isinstance(value, float) and value > 0
        if argument.name in ("training", "train") and any(word in schema.name for word in ("batch_norm", "dropout", "rrelu")):
            return value is True and ("dropout" not in schema.name or node.args[1:2] != (0.0,))
    return False


def bounds(program: Any, size: Any) -> tuple[int, int | None]:
    """Return the minimum and maximum of a symbolic size under the program's range constraints; None for no maximum."""
    from torch.utils._sympy.value_ranges import bound_sympy

    expression = size.node.expr
    limits = program.range_constraints.get(expression)
    if limits is None:
        limits = bound_sympy(expression, {s: r for s, r in program.range_constraints.items() if s.is_Symbol})
    low = int(limits.lower) if limits.lower.is_Integer else 0
    # Without a maximum, torch uses int_oo or its largest index.
    high = int(limits.upper) if limits.upper.is_Integer and limits.upper < 2**62 else None
    return max(low, 0), high
