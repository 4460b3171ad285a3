"""Loads a screened .pt2 in the child, and refuses what would compile to something else than the user thinks."""

from __future__ import annotations

import io
import logging
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.export.pt2_archive._package import load_pt2

from etfarm.server.compile import screen
from etfarm.server.compile.explain import first_line
from etfarm.server.compile.refusals import DimWithoutMaximum, NotAPt2, TrainingMode
from etfarm.server.workers.faults import is_out_of_memory

_log = logging.getLogger(__name__)


def load(model: Path, folder: Path) -> Any:
    """The exported program of a .pt2, screened once more with the readers that load it.

    Raises:
        NotAPt2: torch cannot read it, a newer torch's archive for example.
        UnsafeModel: as `screen_pt2`.
    """
    # A name that ends in .pt2 is what torch opens as a file; the store's names are digests.
    link = folder / "model.pt2"
    if not link.exists():
        link.symlink_to(model)
    screen.screen_pt2(model)
    screen.screen_records(_torch_records(str(link)), lambda _, data: _torch_records(io.BytesIO(data)))
    try:
        # Not torch.export.load: on a failure that one falls back to the older, unscreened layout.
        return load_pt2(str(link)).exported_programs["model"]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise NotAPt2(f"torch {torch.__version__} cannot read it ({first_line(error)})") from None


def _torch_records(source: str | io.BytesIO) -> screen.Records:
    try:
        reader = torch._C.PyTorchFileReader(source)
        return screen.Records(tuple(reader.get_all_records()), reader.get_record)
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
