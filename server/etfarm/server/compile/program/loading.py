"""Loads a screened .pt2 in the child, and refuses what would compile to something else than the user thinks."""

from __future__ import annotations

import importlib
import io
import json
import logging
import re
import traceback
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch._export.serde import schema, serialize
from torch.export.pt2_archive._package import load_pt2

from etfarm.server.compile.errors import DimWithoutMaximum, TrainingMode
from etfarm.server.compile.program.explain import first_line
from etfarm.server.compile.screening import archives, screen
from etfarm.server.compile.screening.errors import NotAPt2, Pt2OfAnotherTorch
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire.errors import UserError

_log = logging.getLogger(__name__)

_LIBRARIES: Final = {b"torch.ops.quant.": "torchao.prototype.quantization.codebook_coreml"}
"""Modules that register operators when they are imported, beside those that every child imports: by what a model's JSON has
where it uses one."""

_VERSION: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,8}){1,3}[0-9a-z.+]{0,40}")
"""What is repeated of the text that a file has for its torch's version: `2.13.0+cpu`, `2.14.0a0+git1234567`."""
_MAX_MAJOR: Final = 1_000_000


def load(model: Path, folder: Path, operators: Operators | None = None) -> Any:
    """The exported program of a .pt2, screened once more with the readers that load it.

    Args:
        operators: that it may use; the committed list's when None.

    Raises:
        Pt2OfAnotherTorch: torch cannot read it, and it was written by another torch.
        NotAPt2: torch cannot read it.
        UnsafeModel: as `screen_pt2`.
    """
    # A name that ends in .pt2 is what torch opens as a file; the store's names are digests.
    link = folder / "model.pt2"
    if not link.exists():
        link.symlink_to(model)
    operators = operators or Operators()
    records = screen_whole(link, operators)
    graph = records.read("models/model.json")
    try:
        for namespace, module in _LIBRARIES.items():
            if namespace in graph:
                importlib.import_module(module)
        for module in operators.modules(graph):
            importlib.import_module(module)
        # Not torch.export.load: on a failure that one falls back to the older, unscreened layout.
        with _hints_read_once():
            return _with_symbols_only(load_pt2(str(link)).exported_programs["model"])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise _unreadable(graph, first_line(error)) from None


def screen_whole(model: Path, operators: Operators) -> archives.Records:
    """Screens a .pt2 with Python's reader and with torch's, which is the one that loads it; gives what torch's reads.

    Raises:
        NotAPt2, UnsafeModel, UnknownOperator: as `screen.screen_pt2`.
    """
    screen.screen_pt2(model, operators.targets)
    records = _torch_records(str(model))
    screen.screen_records(records, lambda _, data: _torch_records(io.BytesIO(data)), allowed=operators.targets)
    return records


def _unreadable(graph: bytes, why: str) -> UserError:
    """The refusal of a program that torch does not read, by what the program says of its writer.

    Args:
        graph: its JSON. The screen has parsed it, so it is an object within the screen's limits; its values may be anything.
        why: torch's words.
    """
    program = json.loads(graph)
    ours = torch.__version__.partition("+")[0]
    said = program.get("torch_version")
    written = said if isinstance(said, str) and _VERSION.fullmatch(said) else ""
    version = program.get("schema_version")
    major = version.get("major") if isinstance(version, dict) else None
    if isinstance(major, int) and 0 < major < _MAX_MAJOR and major != schema.SCHEMA_VERSION[0]:
        return Pt2OfAnotherTorch(written, ours, f"its schema is version {major}, not {schema.SCHEMA_VERSION[0]}")
    if written and written.partition("+")[0] != ours:
        return Pt2OfAnotherTorch(written, ours, why.rstrip("."))
    return NotAPt2(f"torch {ours} cannot read it ({why})")


@contextmanager
def _hints_read_once() -> Iterator[None]:
    """Half of torch's time to read a program goes into the type hints of its schema's classes, anew for each object.

    Source: torch._export.serde.serialize._dict_to_dataclass, which looks `typing` up in its module.
    """
    before = serialize.typing
    serialize.typing = _TypingOfSchema()
    try:
        yield
    finally:
        serialize.typing = before


class _TypingOfSchema:
    """The module `typing`, with hints that are kept."""

    def __getattr__(self, name: str) -> Any:
        return getattr(typing, name)

    def get_type_hints(self, cls: type, globalns: dict[str, Any]) -> dict[str, Any]:
        return _hints(cls)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(schema))


def _with_symbols_only(program: Any) -> Any:
    """The program, with what torch 2.13 files under a derived dim (`2 * n + 1`) when it reads it filed under n.

    With the range of an expression among those of symbols, every later decomposition stops ("expected sympy.Symbol"); with
    the example's size under the expression, n has no size, and questions that n's answers are taken for questions of values.
    """
    environments = {
        id(mode.shape_env): mode.shape_env
        for node in program.graph.nodes
        if (mode := getattr(node.meta.get("val"), "fake_mode", None)) is not None and mode.shape_env is not None
    }
    for environment in environments.values():
        sizes = environment.backed_var_to_val
        for expression in [one for one in sizes if not one.is_Symbol]:
            size = sizes.pop(expression)
            for symbol in expression.free_symbols if len(expression.free_symbols) == 1 else ():
                factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
                if expression == factor * symbol + offset and ((size - offset) / factor).is_Integer:
                    sizes.setdefault(symbol, (size - offset) / factor)
        for expression in [one for one in environment.var_to_range if not one.is_Symbol]:
            del environment.var_to_range[expression]  # it follows from n's, and stays in range_constraints
    return program


def _torch_records(source: str | io.BytesIO) -> archives.Records:
    try:
        reader = torch._C.PyTorchFileReader(source)
        names = tuple(reader.get_all_records())
        return archives.Records(names, reader.get_record, {name: reader.get_record_size(name) for name in names})
    except RuntimeError as error:
        raise NotAPt2(f"torch cannot open it ({first_line(error)})") from None


def check(program: Any, method: str) -> None:
    """Refuses programs that compile without a word and then fail, or do something else, on a device.

    Raises:
        TrainingMode: batch norm or dropout in training mode.
        DimWithoutMaximum: a dynamic dim of an input has no finite maximum.
    """
    for node in program.graph.nodes:
        if node.op == "call_function" and _is_training(node):
            raise TrainingMode(method, str(node.target).rpartition(".")[0].removeprefix("aten."))
    inputs = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs and isinstance(node.meta.get("val"), torch.Tensor):
            for index, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and bounds(program, size)[1] is None:
                    raise DimWithoutMaximum(method, node.name, index, str(size))


def _is_training(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(word in schema.name for word in ("batch_norm", "dropout")):
        return False
    for index, argument in enumerate(schema.arguments):
        if argument.name in ("training", "train"):
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return given is True and ("dropout" not in schema.name or node.args[1:2] != (0.0,))
    return False


def bounds(program: Any, size: Any) -> tuple[int, int | None]:
    """Least and greatest value of a symbolic size under the program's range constraints; None for no maximum."""
    from torch.utils._sympy.value_ranges import bound_sympy

    expression = size.node.expr
    found = program.range_constraints.get(expression)
    if found is None:
        found = bound_sympy(expression, {s: r for s, r in program.range_constraints.items() if s.is_Symbol})
    low = int(found.lower) if found.lower.is_Integer else 0
    # Without a maximum, torch has int_oo or its own largest index.
    high = int(found.upper) if found.upper.is_Integer and found.upper < 2**62 else None
    return max(low, 0), high
