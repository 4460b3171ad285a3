"""One network with one recipe through etfarm and through plain ExecuTorch, and whether the outputs agree."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from etfarm.client import Farm
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from tests.zoo import catalog

PLAIN_S: Final = 900
"""Longest time that plain ExecuTorch may take for one network."""

TOLERANCES: Final = {"float32": 1e-5, "float64": 1e-12, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""How far outputs may be apart that different kernels computed, relative to the largest value; integers must be equal."""

TRACED: Final = 30
"""Traced executions, whose times are those that the lines of the source are counted by."""

Row = dict[str, Any]


class Plain:
    """The process that starts plain ExecuTorch's, one for each network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def run(self, name: str, recipe: str) -> tuple[Row, list[np.ndarray] | None]:
        """Return what plain ExecuTorch made of a network, and its outputs if it ran."""
        path = self._folder / "plain.npz"
        path.unlink(missing_ok=True)
        request = {"network": name, "recipe": recipe, "outputs": str(path), "timeout_s": PLAIN_S}
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "tests.zoo.plain"]
            with (self._folder / "plain.log").open("a") as log:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        row = self._answer(self._process.stdout)
        if not row["ok"] or not path.exists():
            return row, None
        with np.load(path, allow_pickle=False) as file:
            return row, [file[key] for key in file.files]

    @staticmethod
    def _answer(lines: Iterable[str]) -> Row:
        """Return the next line that is a JSON object; libraries print lines of their own."""
        for line in lines:
            if line.startswith("{"):
                with suppress(ValueError):
                    row: Row = json.loads(line)
                    return row
        return {"ok": False, "error": "the process ended"}


def run_both(farm: Farm, plain: Plain, name: str, recipe: str) -> Row:
    """Return what both made of a network."""
    ours, outputs = _etfarm(farm, name, recipe)
    theirs, others = plain.run(name, recipe)
    compared = compare(outputs, others) if outputs is not None and others is not None else None
    return {"network": name, "recipe": recipe, "etfarm": ours, "plain": theirs, "compared": compared}


def compile_only(farm: Farm, name: str, recipe: str) -> Row:
    """Return what etfarm's server made of a network, which it also runs and compares with eager PyTorch."""
    ours = _etfarm(farm, name, recipe, runs=False)[0]
    return {"network": name, "recipe": recipe, "etfarm": ours, "plain": None, "compared": None}


def _etfarm(farm: Farm, name: str, recipe: str, *, runs: bool = True) -> tuple[Row, list[np.ndarray] | None]:
    began = time.monotonic()
    try:
        source = catalog.factory(name)
        if runs:
            job = farm.bench(source, recipe, name=name, warmup=1, iterations=1, min_time_s=0, trace_iterations=TRACED)
        else:
            job = farm.compile(source, recipe, name=name)
        report = job.result().json()["reports"][0]
        row: Row = {"ok": report["error"] is None, "seconds": round(time.monotonic() - began, 1)}
        compiled = report["compile"] or {}
        row["stages"] = {stage["stage"]: round(stage["duration_ms"]) for stage in compiled.get("stages") or ()}
        row["warnings"] = sorted({warning["code"] for warning in compiled.get("warnings") or ()})
        delegation = (compiled.get("delegation") or {}).get("forward") or {}
        row |= {"delegated": delegation.get("delegated_nodes"), "left": delegation.get("non_delegated_nodes")}
        checked = [output for check in compiled.get("checks") or () for output in check["outputs"] or ()]
        outputs = (report["accuracy"] or ()) if runs else checked
        row["sqnr_db"] = min((output["sqnr_db"] for output in outputs if output["sqnr_db"] is not None), default=None)
        row["lines"] = line_shares(report["operators"] or ())
        if report["error"] is not None:
            return row | {"reason": report["error"]["reason"], "message": report["error"]["message"]}, None
        return row, [_array(value) for value in job.outputs()] if runs else None
    except EtfarmError as error:
        seconds = round(time.monotonic() - began, 1)
        return {"ok": False, "seconds": seconds, "reason": error.reason, "message": error.message}, None
    except Exception as error:  # noqa: BLE001 - a library that is missing, or a bug, is one row
        return {"ok": False, "reason": type(error).__name__, "message": str(error)[:300]}, None


def line_shares(operators: Sequence[Row]) -> Row | None:
    """Return the fractions of the kernels' time with a source line, without one but with a named cause, and with neither.

    The largest rows with neither are in `without`. None for a report without operators.
    """
    parents = {row["parent"] for row in operators}
    kernels = [row for row in operators if row["kind"] != "REST" and row["index"] not in parents]
    total = sum(row["share"] or 0.0 for row in kernels)
    if not total:
        return None
    line = cause = 0.0
    without = []
    for row in kernels:
        share = (row["share"] or 0.0) / total
        if row["source"] or row["sources"]:
            line += share
        elif row["source_reason"] or (not row["debug_handles"] and _parent_reason(row, operators)):
            cause += share
        elif share > 0:
            without.append([round(share, 4), row["name"], row["op_types"], row["module"]])
    without.sort(key=lambda each: -each[0])
    neither = max(0.0, 1.0 - line - cause)
    return {"line": round(line, 4), "cause": round(cause, 4), "neither": round(neither, 4), "without": without[:5]}


def _parent_reason(row: Row, operators: Sequence[Row]) -> str | None:
    reason: str | None = operators[row["parent"]]["unaligned_reason"] if row["parent"] is not None else None
    return reason


def _array(value: tensors.Value) -> np.ndarray:
    return np.asarray(value.value) if isinstance(value, tensors.Scalar) else np.asarray(tensors.to_array(value))


def compare(ours: list[np.ndarray], theirs: list[np.ndarray]) -> Row:
    """Return whether outputs are equal, and how far they are apart."""
    if [array.shape for array in ours] != [array.shape for array in theirs]:
        shapes = ([list(array.shape) for array in side] for side in (ours, theirs))
        return {"equal": False, "max_abs_error": None, "shapes": list(shapes)}
    tolerance = max((TOLERANCES.get(str(array.dtype), 0.0) for array in ours), default=0.0)
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(ours, theirs, strict=True)]
    worst = max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)
    scale = max((float(np.abs(b).max()) for _, b in pairs if b.size), default=0.0)
    equal = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
    return {"equal": equal, "max_abs_error": worst, "scale": scale, "tolerance": tolerance}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: a table for each library with a line for each network, and what failed below it."""
    recipes = sorted({row["recipe"] for row in rows}, key=_place_of_recipe)
    parts = []
    for library in dict.fromkeys(row["network"].partition("/")[0] for row in rows):
        own = [row for row in rows if row["network"].startswith(f"{library}/")]
        cells = {(row["network"], row["recipe"]): _cell(row) for row in own}
        lines = [f"| {library} | " + " | ".join(_short(recipe) for recipe in recipes) + " | time with a line |"]
        lines.append("|" + "---|" * (len(recipes) + 2))
        for network in dict.fromkeys(row["network"] for row in own):
            shares = [row["etfarm"]["lines"] for row in own if row["network"] == network and row["etfarm"].get("lines")]
            named = " | ".join(cells.get((network, recipe), "") for recipe in recipes)
            lines.append(f"| `{network.partition('/')[2]}` | {named} | {_with_line(shares)} |")
        parts.append("\n".join(lines))
    failed = [_failed(row) for row in rows if not row["etfarm"]["ok"] or (row["plain"] is not None and not row["plain"]["ok"])]
    return "\n\n".join([counts(rows), *parts, "\n".join(failed)])


def counts(rows: Sequence[Row]) -> str:
    """Return one sentence with the numbers that decide whether the zoo passes."""
    both = [row for row in rows if row["compared"] is not None]
    only_plain = [row for row in rows if row["plain"] is not None and row["plain"]["ok"] and not row["etfarm"]["ok"]]
    equal = sum(row["compared"]["equal"] for row in both)
    close = sum(is_close(row["compared"]) for row in both)
    return (
        f"{len(rows)} rows: etfarm ran {sum(row['etfarm']['ok'] for row in rows)}, both ran {len(both)}, with equal outputs in "
        f"{equal} and close ones in {close - equal}. Plain ExecuTorch alone ran {len(only_plain)}."
    )


def is_close(compared: Row) -> bool:
    """Return whether outputs are equal, or apart by no more than the tolerance of their dtype, relative to the largest value."""
    if compared["equal"] or compared["max_abs_error"] is None:
        return bool(compared["equal"])
    return bool(compared["max_abs_error"] <= compared["tolerance"] * compared["scale"])


def _short(recipe: str) -> str:
    """Return a recipe's name without what all of the zoo's share."""
    return recipe.removeprefix("xnnpack_").removeprefix("pt2e_").replace("_", " ")


def _place_of_recipe(recipe: str) -> tuple[bool, bool, str]:
    return recipe == "portable", "int8" in recipe, recipe


def _cell(row: Row) -> str:
    ours, theirs, compared = row["etfarm"], row["plain"], row["compared"]
    if not ours["ok"]:
        return f"`{ours['reason']}`"
    ratio = "" if ours["sqnr_db"] is None else f", {ours['sqnr_db']:.0f} dB"
    if theirs is None:
        return f"runs{ratio}"
    if not theirs["ok"]:
        return f"plain fails{ratio}"
    if compared is None or compared["equal"] or compared["max_abs_error"] is None:
        return f"{'equal' if compared is not None and compared['equal'] else 'differs'}{ratio}"
    distance = compared["max_abs_error"] / (compared["scale"] or 1.0)
    return f"{'close' if is_close(compared) else 'differs'} ({distance:.0e}){ratio}"


def _with_line(shares: Sequence[Row]) -> str:
    """Return the least fraction of a network's rows, and what else has a named cause."""
    if not shares:
        return ""
    least = min(shares, key=lambda each: each["line"] + each["cause"])
    return f"{least['line']:.0%}" + (f" + {least['cause']:.0%} cause" if least["cause"] >= 0.005 else "")


def _failed(row: Row) -> str:
    ours, theirs = row["etfarm"], row["plain"]
    mine = "" if ours["ok"] else f" etfarm: `{ours['reason']}`, {ours['message'][:200]}"
    plain = "" if theirs is None or theirs["ok"] else f" Plain ExecuTorch: {theirs['error'][:200]}"
    return f"- `{row['network']}`, `{row['recipe']}`:{mine}{plain}".replace("|", "/")
