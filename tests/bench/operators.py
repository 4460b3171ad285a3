"""Whether a program of each of PyTorch's operators computes on the runtime what eager PyTorch computes, or says that it does not.

python -m tests.bench.operators [--only REGEX] [--recipes portable,xnnpack_fp32] [--seconds S] [--json FILE]

Every operator of PyTorch's `op_db` is exported with small inputs as the client does it, compiled and tried as the server does it,
and run once more; its outputs are compared with eager PyTorch's here. An outcome is

    EQUAL      the outputs agree,
    NAMED      they differ, and a warning of the compilation says so,
    REFUSED    the export, the compilation or the trial refuses the operator, with its reason,
    UNKNOWN    it is refused with a message of ExecuTorch's or torch's that has no remedy of its own,
    RANDOM     eager PyTorch does not repeat its own outputs,
    UNFIT      the inputs cannot be those of a program, such as numbers only,
    SILENT     the outputs differ, and nothing says so: a defect.

FILE has one line of JSON for each operator, dtype and recipe, written when it is done; a sweep with the same FILE continues after
them. All of it takes about an hour; `--seconds` ends it earlier. Exit code 1: something is silent.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from etfarm.client.export.eager import export_source
from etfarm.client.export.source import ModelSource
from etfarm.server.compile.errors import StageFailed
from etfarm.server.compile.lower.tasks import lower_model
from etfarm.server.compile.program import values
from etfarm.server.compile.request import LowerRequest
from etfarm.server.compile.verify import smoke
from etfarm.v1 import child_pb2
from etfarm.wire import recipes, tensors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.sqnr import sqnr_db

RECIPES: Final = ("portable", "xnnpack_fp32")
DTYPES: Final = (torch.float32, torch.int64, torch.bool)
MOST_ELEMENTS: Final = 2_000
"""Maximum number of elements of an operator's inputs."""
TIMEOUT_S: Final = 120.0
LEAST_DB: Final = 60.0
"""Minimum SQNR of equal outputs: approximations of exp, gelu and others are within it."""
WARNED: Final = ("OUTPUTS_DIFFER", "NOT_COMPARED", "NOT_RUN_ON_HOST")


_WARM: Final = """
import sys
from etfarm.server.compile.prewarm import warm
warm()
from tests.bench import operators
sys.exit(operators.run())
"""


@dataclass(frozen=True)
class Row:
    """The outcome of one operator."""

    operator: str
    dtype: str
    recipe: str
    outcome: str
    reason: str = ""
    message: str = ""

    @property
    def key(self) -> str:
        """What identifies the row in a file."""
        return f"{self.operator} {self.dtype} {self.recipe}"


class Operator(nn.Module):
    """One call of an operator; its tensors are the inputs, everything else is fixed."""

    def __init__(self, function: Any, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.function = function
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.spec = spec

    def forward(self, *inputs: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, value in zip(self.places, inputs, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def operators() -> list[Any]:
    """Return PyTorch's descriptions of operators, sorted by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=name_of)


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def sample(info: Any, dtype: torch.dtype) -> tuple[Operator, tuple[torch.Tensor, ...]] | None:
    """Return an operator with its first small, not empty inputs; None if there are none for the dtype."""
    if dtype not in info.supported_dtypes("cpu"):
        return None
    for each in info.sample_inputs("cpu", dtype, requires_grad=False):
        leaves, spec = pytree.tree_flatten(((each.input, *each.args), each.kwargs))
        inputs = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor))
        if inputs and min(x.numel() for x in inputs) > 0 and sum(x.numel() for x in inputs) <= MOST_ELEMENTS:
            return Operator(info.op, leaves, spec).eval(), inputs
    return None


def try_operator(info: Any, dtype: torch.dtype, recipe: str, folder: Path) -> Row | None:
    """Return the outcome of an operator with a dtype and a recipe; None if it has no such inputs."""
    torch.manual_seed(0)
    chosen = sample(info, dtype)
    if chosen is None:
        return None
    module, inputs = chosen
    row = (name_of(info), str(dtype).removeprefix("torch."), recipe)
    try:
        with torch.no_grad():
            expected, again = (pytree.tree_leaves(module(*(x.clone() for x in inputs))) for _ in range(2))
    except Exception as error:  # noqa: BLE001 - samples of some operators need what is not here
        return Row(*row, "UNFIT", type(error).__name__, str(error)[:300])
    if find_difference(expected, again):
        return Row(*row, "RANDOM")
    try:
        warnings, actual = compile_and_run(module, inputs, recipe, folder)
    except EtfarmError as error:
        is_known = StageFailed.UNKNOWN not in error.remedy and error.reason != "EXPORT_FAILED"
        return Row(*row, "REFUSED" if is_known else "UNKNOWN", error.reason, f"{error.message} {error.remedy}"[:600])
    except Exception as error:  # noqa: BLE001 - neither may the sweep end, nor an operator be left out
        return Row(*row, "UNKNOWN", type(error).__name__, str(error)[:600])
    difference = find_difference(expected, actual)
    if not difference:
        return Row(*row, "EQUAL")
    named = [warning for warning in warnings if warning.code in WARNED]
    if named:
        return Row(*row, "NAMED", named[0].code, f"{difference}: {named[0].message}"[:600])
    return Row(*row, "SILENT", "", difference)


def compile_and_run(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], recipe: str, folder: Path
) -> tuple[list[Any], list[Any]]:
    """Return the warnings of the compilation, and the outputs of the program on this host."""
    known = recipes.parse(recipe)
    exported = export_source(ModelSource.of(module, inputs), name="operator", folder_base=Path(__file__).parent, recipe=known)
    pt2 = folder / "forward.pt2"
    pt2.write_bytes(exported.methods["forward"].pt2)  # type: ignore[arg-type]
    out = folder / "out"
    out.mkdir()
    request = LowerRequest({"forward": pt2}, {"forward": pt2}, "operator", known.json, want_etrecord=False)
    answer = child_pb2.CompileResult.FromString(lower_model(request, out, lambda event: None))
    source, result = folder / "inputs.ett", folder / "outputs.ett"
    source.write_bytes(tensors.encode([values.to_value(str(place), leaf) for place, leaf in enumerate(inputs)]))
    runner = smoke.SmokeRunner(folder / "again.log")
    try:
        (outcome,) = runner.run(out / answer.pte, {}, [smoke.Run("forward", source, result)], TIMEOUT_S)
    finally:
        runner.close()
    if not outcome.ran:
        raise RuntimeError(f"the trial ran, and a second run did not: {outcome.why}")
    return list(answer.compilation.warnings), [values.to_leaf(value) for value in tensors.decode(result.read_bytes())]


def find_difference(expected: Sequence[Any], actual: Sequence[Any]) -> str:
    """Return how outputs differ; empty if they are equal but for rounding."""
    if len(expected) != len(actual):
        return f"{len(actual)} outputs instead of {len(expected)}"
    for place, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(want, torch.Tensor):
            if want != got and not (want != want and got != got):
                return f"output {place} is {got!r} instead of {want!r}"
            continue
        if not isinstance(got, torch.Tensor) or want.dtype != got.dtype or want.shape != got.shape:
            kind = f"{got.dtype} {list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
            return f"output {place} is {kind} instead of {want.dtype} {list(want.shape)}"
        if difference := _find_value_difference(want, got):
            return f"output {place}: {difference}"
    return ""


def _find_value_difference(want: torch.Tensor, got: torch.Tensor) -> str:
    if not want.is_floating_point():
        unequal = int((want != got).sum())
        return f"{unequal} of {want.numel()} values differ" if unequal else ""
    w, g = want.double().numpy().ravel(), got.double().numpy().ravel()
    if not np.array_equal(np.isfinite(w), np.isfinite(g)) or not np.array_equal(
        w[~np.isfinite(w)], g[~np.isfinite(g)], equal_nan=True
    ):
        return "other values are NaN or infinite"
    w, g = w[np.isfinite(w)], g[np.isfinite(g)]
    if w.size == 0 or float(np.abs(w - g).max()) <= 1e-5:
        return ""
    db = sqnr_db(w, g)
    return "" if db is not None and db >= LEAST_DB else f"{db} dB, largest error {float(np.abs(w - g).max()):g}"


def in_process(info: Any, dtype: torch.dtype, recipe: str) -> Row | None:
    """Return the outcome of an operator that is tried in a fork, which may crash or hang."""
    failed = Row(name_of(info), str(dtype).removeprefix("torch."), recipe, "UNKNOWN")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="etfarm-operators-", ignore_cleanup_errors=True) as folder:
        child = multiprocessing.get_context("fork").Process(
            target=_serve, args=(sender, info, dtype, recipe, Path(folder)), daemon=True
        )
        child.start()
        sender.close()
        try:
            if receiver.poll(TIMEOUT_S):
                outcome: Row | None = receiver.recv()
                return outcome
            return replace(failed, reason="TIMED_OUT")
        except EOFError:
            child.join()
            return replace(failed, reason="CRASHED", message=f"exit code {child.exitcode}")
        finally:
            child.kill()
            child.join()


def _serve(sender: Any, info: Any, dtype: torch.dtype, recipe: str, folder: Path) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sender.send(try_operator(info, dtype, recipe, folder))


def sweep(chosen: Sequence[Any], names: Sequence[str], done: Collection[str], *, until: float) -> Iterator[Row]:
    """Yield the outcome of each operator, dtype and recipe that is not done yet, until a time on the monotonic clock."""
    for info in chosen:
        for dtype, recipe in itertools.product(DTYPES, names):
            key = Row(name_of(info), str(dtype).removeprefix("torch."), recipe, "").key
            if time.monotonic() > until:
                return
            if dtype in info.supported_dtypes("cpu") and key not in done:
                outcome = in_process(info, dtype, recipe)
                if outcome is not None:
                    yield outcome


def read_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier sweep; none without a file. A line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        with suppress(ValueError):  # a row may have been written behind one that was cut off
            rows.append(Row(**json.loads(line)))
    return rows


def main() -> int:
    """Sweep in a process whose toolchain is warm and has one thread, as forks of one with several threads hang."""
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", _WARM, *sys.argv[1:]], env={**os.environ, **single}, check=False).returncode


def run() -> int:
    """Sweep in this process, and print what is silent or unknown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="operators whose name matches this regular expression")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no operator after this time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = read_rows(options.json)
    chosen = [info for info in operators() if re.search(options.only, name_of(info))]
    done = {row.key for row in rows}
    until = time.monotonic() + options.seconds
    gc.freeze()  # a fork that looks for garbage would copy the toolchain's pages
    for count, row in enumerate(sweep(chosen, options.recipes.split(","), done, until=until), 1):
        rows.append(row)
        print(f"{count:5} {row.key:60} {row.outcome:8} {row.reason}", file=sys.stderr, flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    for row in sorted(rows, key=lambda row: row.key):
        if row.outcome in ("SILENT", "UNKNOWN"):
            print(f"{row.outcome:8} {row.key:60} {row.reason} {row.message[:200]}")
    counts = Counter(row.outcome for row in rows)
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()) or "no operator matches")
    return 1 if counts["SILENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
