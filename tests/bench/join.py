"""What joining a trace with its ETRecord costs here and in ExecuTorch's Inspector, side by side, with the same rows.

python -m tests.bench.join [--operators 1000] [--iterations 100] [--rounds 3]

A chain of portable operators is lowered and traced by the native runner once; each round then joins the same files in two fresh
processes, one after the other. Times are of the join alone, without imports; memory is the process's peak, and for Inspector
not that of the flatc that it starts. The file runs itself for the parts, by --make, --own and --inspector.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

OF_TIME: Final = 0.5
OF_MEMORY: Final = 0.25

WARMUP: Final = 3


def make(folder: Path, operators: int) -> None:
    """A .pte of so many kernels in a row, and its ETRecord."""
    import torch
    from executorch.exir import to_edge_transform_and_lower

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = torch.sin(x)
            return turned + 0.5

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(operators // 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    exported = torch.export.export(Chain().eval(), (torch.rand(64),))
    program = to_edge_transform_and_lower(exported, generate_etrecord=True).to_executorch()
    (folder / "program.pte").write_bytes(program.buffer)
    program.get_etrecord().save(str(folder / "program.etrecord"))


async def trace(folder: Path, iterations: int) -> None:
    """Run it by the native runner; return its .etdp, and how long each iteration took by the runner's clock."""
    from etfarm.device_agents.runners.bundle import unpack
    from etfarm.device_agents.runners.native import NativeRunner
    from tests.support.runner import runner_archive

    bundle = unpack(runner_archive(), folder / "bundle")
    async with NativeRunner.start(bundle.command(), folder) as runner:
        await runner.load(folder / "program.pte")
        await runner.load_method("forward", trace=True)
        await runner.default_inputs(0)
        traced = await runner.trace(iterations, folder / "trace.etdp", warmup=WARMUP)
    (folder / "traced_ns.json").write_text(json.dumps(list(traced.samples_ns)))


def join_here(folder: Path) -> dict[str, Any]:
    """As the analysis does it: rows with lines and times."""
    from etfarm.server.reports.request import AnalyzeRequest
    from etfarm.server.reports.trace import profile
    from etfarm.v1 import report_pb2

    request = AnalyzeRequest(
        pte=folder / "program.pte", etdump=folder / "trace.etdp", etrecord=folder / "program.etrecord", model=None, inputs=None,
        outputs=None, samples=None, method="forward", output_names=(),
        traced_ns=tuple(json.loads((folder / "traced_ns.json").read_text())),
    )  # fmt: skip
    before = _peak_bytes()
    start = time.perf_counter()
    report, warnings, times_ns = report_pb2.Report(), [], []

    def keep(rows: Sequence[Sequence[int]]) -> None:
        times_ns[:] = rows

    profile.fill(report, request, lambda code, message: warnings.append(f"{code}: {message}"), keep)
    took_s = time.perf_counter() - start
    peak = _peak_bytes()
    rows = {
        str(row.instruction_id): [
            row.name.partition(".")[2],
            list(row.op_types),
            [*row.debug_handles],
            [*times_ns[1 + row.index]],
        ]
        for row in report.operators
        if row.kind == report_pb2.OPERATOR_KIND_OPERATOR
    }
    lines = sum(row.HasField("source") for row in report.operators)
    return {"seconds": took_s, "peak_bytes": peak, "imports_bytes": before, "rows": rows, "lines": lines, "warnings": warnings}


def join_by_inspector(folder: Path) -> dict[str, Any]:
    """As ExecuTorch's documentation does it."""
    import warnings

    from executorch.devtools import Inspector

    warnings.simplefilter("ignore")
    before = _peak_bytes()
    start = time.perf_counter()
    inspector = Inspector(etdump_path=str(folder / "trace.etdp"), etrecord=str(folder / "program.etrecord"))
    took_s = time.perf_counter() - start
    peak = _peak_bytes()
    (block,) = [block for block in inspector.event_blocks if block.name == "Execute"]
    prefix, edge = "native_call_", "executorch.exir.dialects.edge.ops."
    rows = {
        str(event._instruction_id): [
            event.name.removeprefix(prefix),
            [kind.removeprefix(edge) for kind in event.op_types],
            [event.debug_handles] if isinstance(event.debug_handles, int) else [*event.debug_handles],
            [round(ms * 1e6) for ms in event.perf_data.raw],
        ]
        for event in block.events
        if event.name.startswith(prefix)
    }
    lines = sum(bool(event.stack_traces) for event in block.events if event.name.startswith(prefix))
    return {"seconds": took_s, "peak_bytes": peak, "imports_bytes": before, "rows": rows, "lines": lines, "warnings": []}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _part(*arguments: object) -> Any:
    """Return what this file says when it runs itself."""
    command = [sys.executable, "-m", "tests.bench.join", *map(str, arguments)]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    """Both ways in turns, over the same files."""
    own, theirs = [], []
    for _ in range(rounds):
        own.append(_part("--own", folder))
        theirs.append(_part("--inspector", folder))
    one, other = own[0], theirs[0]
    equal = one["rows"] == other["rows"]

    def middle(runs: list[dict[str, Any]], key: str) -> float:
        return statistics.median(run[key] for run in runs)

    def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "seconds": round(middle(runs, "seconds"), 3), "peak_mb": round(middle(runs, "peak_bytes") / 1e6, 1),
            "of_which_imports_mb": round(middle(runs, "imports_bytes") / 1e6, 1), "rows": len(runs[0]["rows"]),
            "rows_with_lines": runs[0]["lines"], "warnings": runs[0]["warnings"],
        }  # fmt: skip

    time_ratio = middle(own, "seconds") / middle(theirs, "seconds")
    memory_ratio = middle(own, "peak_bytes") / middle(theirs, "peak_bytes")
    return {
        "etdump_bytes": (folder / "trace.etdp").stat().st_size,
        "rounds": rounds,
        "etfarm": summary(own),
        "inspector": summary(theirs),
        "time_ratio": round(time_ratio, 4),
        "time_limit": OF_TIME,
        "memory_ratio": round(memory_ratio, 4),
        "memory_limit": OF_MEMORY,
        "rows_equal": equal,
        "passed": equal and time_ratio < OF_TIME and memory_ratio < OF_MEMORY,
    }


def main() -> int:
    """Print the comparison as JSON; 1 where a limit is missed or the rows differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    for part in ("make", "own", "inspector"):
        parser.add_argument(f"--{part}", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    values = parser.parse_args()
    if values.make is not None:
        make(values.make, values.operators)
    elif values.own is not None:
        print(json.dumps(join_here(values.own)))
    elif values.inspector is not None:
        print(json.dumps(join_by_inspector(values.inspector)))
    else:
        with tempfile.TemporaryDirectory(prefix="etfarm-join-") as name:
            folder = Path(name)
            command = [sys.executable, "-m", "tests.bench.join", "--make", name, "--operators", str(values.operators)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            asyncio.run(trace(folder, values.iterations))
            result = compare(folder, values.rounds)
        print(json.dumps(result, indent=2))
        return 0 if result["passed"] else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
