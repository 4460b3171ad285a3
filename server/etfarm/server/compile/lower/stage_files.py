"""Files that `stop_after` requests: each method's program as a file and as text, and the table of delegated operators."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etfarm.v1.compile_pb2 import Delegation
from etfarm.wire.escapes import spreadsheet_cell


def of_exported(models: Mapping[str, Path], programs: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write exported or quantized programs: METHOD.pt2 unchanged, for torch.export.load, and METHOD.txt.

    Args:
        models: the programs' files by method.
    """
    files: dict[str, str] = {}
    for method, program in programs.items():
        shutil.copyfile(models[method], folder / f"{method}.pt2")
        files |= {f"{method}.pt2": f"{method}.pt2"} | _write_text(method, program, folder)
    return files


def of_edge(manager: Any, delegation: Mapping[str, Delegation], folder: Path) -> dict[str, str]:
    """Write edge programs: METHOD.pt2, METHOD.txt, and delegation.csv after a partitioning stage.

    METHOD.pt2 is for executorch.exir.serde.serialize.load. torch.export.load cannot read it, because operators of the edge
    dialect and delegates belong to ExecuTorch.
    """
    from executorch.exir.serde.serialize import save

    files: dict[str, str] = {}
    for method in sorted(manager.methods):
        program = manager.exported_program(method)
        save(program, str(folder / f"{method}.pt2"))
        files |= {f"{method}.pt2": f"{method}.pt2"} | _write_text(method, program, folder)
    if delegation:
        _write_table(delegation, folder / "delegation.csv")
        files["delegation.csv"] = "delegation.csv"
    return files


def _write_text(method: str, program: Any, folder: Path) -> dict[str, str]:
    """Write a program as PyTorch prints it: code with types and source lines, signature, ranges of dynamic dims."""
    (folder / f"{method}.txt").write_text(f"{program}\n")
    return {f"{method}.txt": f"{method}.txt"}


def _write_table(delegation: Mapping[str, Delegation], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("method", "op", "delegated", "non_delegated"))
        for method, delegated in sorted(delegation.items()):
            for row in delegated.operators:
                table.writerow((spreadsheet_cell(method), spreadsheet_cell(row.op), row.delegated, row.non_delegated))
