"""One network with one recipe through etfarm and through plain ExecuTorch, and whether the outputs agree."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from tests.zoo import catalog

PLAIN_S: Final = 900
"""Longest time that plain ExecuTorch may take for one network."""

Row = dict[str, Any]


def run_both(farm: Farm, name: str, recipe: str, path: Path) -> Row:
    """Return what both made of a network. Plain ExecuTorch's outputs go through a file, `path`."""
    path.unlink(missing_ok=True)
    ours, outputs = _etfarm(farm, name, recipe)
    theirs = _plain(name, recipe, path)
    row: Row = {"network": name, "recipe": recipe, "etfarm": ours, "plain": theirs, "compared": None}
    if outputs is not None and path.exists():
        with np.load(path, allow_pickle=False) as file:
            row["compared"] = compare(outputs, [file[key] for key in file.files])
    return row


def compile_only(farm: Farm, name: str, recipe: str) -> Row:
    """Return what etfarm's server made of a network, which it also runs and compares with eager PyTorch."""
    return {
        "network": name,
        "recipe": recipe,
        "etfarm": _etfarm(farm, name, recipe, runs=False)[0],
        "plain": None,
        "compared": None,
    }


def _etfarm(farm: Farm, name: str, recipe: str, *, runs: bool = True) -> tuple[Row, list[np.ndarray] | None]:
    began = time.monotonic()
    try:
        network = catalog.create(name)
        source = ModelSource.of(network.module, network.args)
        job = farm.run(source, recipe, name=name) if runs else farm.compile(source, recipe, name=name)
        report = job.result().json()["reports"][0]
        row: Row = {"ok": report["error"] is None, "seconds": round(time.monotonic() - began, 1)}
        compiled = report["compile"] or {}
        row["warnings"] = sorted({warning["code"] for warning in compiled.get("warnings") or ()})
        delegation = (compiled.get("delegation") or {}).get("forward") or {}
        row |= {"delegated": delegation.get("delegated_nodes"), "left": delegation.get("non_delegated_nodes")}
        checked = [output for check in compiled.get("checks") or () for output in check["outputs"] or ()]
        outputs = (report["accuracy"] or ()) if runs else checked
        row["sqnr_db"] = min((output["sqnr_db"] for output in outputs if output["sqnr_db"] is not None), default=None)
        if report["error"] is not None:
            return row | {"reason": report["error"]["reason"], "message": report["error"]["message"]}, None
        return row, [_array(value) for value in job.outputs()] if runs else None
    except EtfarmError as error:
        return {"ok": False, "reason": error.reason, "message": error.message}, None
    except Exception as error:  # noqa: BLE001 - a library that is missing, or a bug, is one row
        return {"ok": False, "reason": type(error).__name__, "message": str(error)[:300]}, None


def _array(value: tensors.Value) -> np.ndarray:
    return np.asarray(value.value) if isinstance(value, tensors.Scalar) else np.asarray(tensors.to_array(value))


def _plain(name: str, recipe: str, path: Path) -> Row:
    command = [sys.executable, "-m", "tests.zoo.plain", name, recipe, str(path)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=PLAIN_S)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"took more than {PLAIN_S} s"}
    try:
        row: Row = json.loads(process.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"ok": False, "error": f"ended with {process.returncode}: {process.stderr.strip().splitlines()[-1:]}"}
    return row


def compare(ours: list[np.ndarray], theirs: list[np.ndarray]) -> Row:
    """Return whether outputs are equal, and how far they are apart."""
    if [array.shape for array in ours] != [array.shape for array in theirs]:
        shapes = ([list(array.shape) for array in side] for side in (ours, theirs))
        return {"equal": False, "max_abs_error": None, "shapes": list(shapes)}
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(ours, theirs, strict=True)]
    worst = max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)
    scale = max((float(np.abs(b).max()) for _, b in pairs if b.size), default=0.0)
    return {"equal": all(np.array_equal(a, b, equal_nan=True) for a, b in pairs), "max_abs_error": worst, "scale": scale}


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table, a line for each network and recipe."""
    lines = ["| network | recipe | etfarm | plain ExecuTorch | outputs |", "|---|---|---|---|---|"]
    for row in rows:
        ours, theirs, compared = row["etfarm"], row["plain"], row["compared"]
        mine = _success(ours) if ours["ok"] else _failure(ours)
        plain = "" if theirs is None else "runs" if theirs["ok"] else theirs["error"].replace("|", "/")[:120]
        if compared is None:
            agree = ""
        else:
            agree = (
                "equal" if compared["equal"] else f"differ by {compared['max_abs_error']:.1e} of {compared.get('scale', 0):.1e}"
            )
        lines.append(f"| `{row['network']}` | `{row['recipe']}` | {mine} | {plain} | {agree} |")
    return "\n".join(lines)


def _success(row: Row) -> str:
    ratio = "" if row["sqnr_db"] is None else f", {row['sqnr_db']:.0f} dB"
    return (
        f"{row['delegated']} of {row['delegated'] + row['left']} nodes delegated{ratio}"
        if row["delegated"] is not None
        else "runs"
    )


def _failure(row: Row) -> str:
    return f"`{row['reason']}`: {row['message'].replace('|', '/')[:200]}"
