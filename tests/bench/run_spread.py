"""How much medians of fresh processes vary, by duration: what replaces the constants of a `PRIOR` spread on a device.

    python -m tests.bench.run_spread [--processes 20] [--threads 1] [--server ADDRESS] [--device SELECTOR]

Without --server it measures this machine, which should be idle. Each program is measured in that many processes, one after the
other (`bench --repeat`). The JSON has each program's median and spread, those of the runs that are VALID alone and of all runs,
with the spread's own 95 % interval, and beside it the spread that a report of a single run would assume
(`between_runs.typical`). Spreads of programs on one side of a millisecond are pooled, as a report pools those of its project.
A group's assumption holds if its pooled interval includes it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from etfarm.client import Farm
from etfarm.client.reports import Report
from etfarm.server.reports.latency import between_runs
from tests.bench.paired import Chain
from tests.support.farm import FarmProcess

DEMOS: Final = ("ds_cnn", "resnet8", "mobilenet_v1_025")
CHAINS: Final = (4, 60, 600)
"""Numbers of convolutions of further programs, which take about 0.1 to 30 ms."""

PER_JOB: Final = 50
"""Maximum number of processes that a job can measure in."""

NORMAL: Final = statistics.NormalDist()


@contextmanager
def connect(server: str, folder: Path) -> Iterator[Farm]:
    """Connect to a farm, or to one of this machine alone, which is ended afterwards."""
    if server:
        with Farm(server) as farm:
            yield farm
        return
    running = FarmProcess(folder)
    try:
        with running.start().client() as farm:
            yield farm
    finally:
        running.stop()


def compile_programs(farm: Farm, folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield each program with its name."""
    for name in names:
        if name.startswith("chain"):
            model: Any = Chain(int(name.removeprefix("chain"))).eval()
            job = farm.compile(model, "xnnpack_fp32", example_inputs=(torch.rand(1, 16, 16, 16),))
        else:
            job = farm.compile(f"demo:{name}", "xnnpack_fp32")
        job.result()
        job.save_program(folder / f"{name}.pte")
        yield name, folder / f"{name}.pte"


def chi_square_quantile(part: float, freedom: int) -> float:
    """Return a quantile of the chi-square distribution, by the approximation of Wilson and Hilferty (1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NORMAL.inv_cdf(part) * math.sqrt(spread)) ** 3


def estimate(groups: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return the standard deviation of logarithms within groups of medians; None below two medians.

    Its 95 % interval, from two degrees of freedom on: the approximation of the quantile is negative with one.
    """
    known = [[math.log(median) for median in group] for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in known)
    if not freedom:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in known)
    ends = [math.sqrt(squares / chi_square_quantile(part, freedom)) for part in (0.975, 0.025)] if freedom > 1 else None
    return {"stddev": math.sqrt(squares / freedom), "ci95": ends, "processes": freedom + len(known)}


def medians_of(reports: Sequence[Report], *, valid: bool) -> list[float]:
    """Return the medians of all runs, or of those that are VALID, in nanoseconds."""
    runs = [run for report in reports for run in report.runs]
    return [run.p50_ns for run in runs if run.p50_ns and (not valid or (run.verdict and run.verdict.status == "VALID"))]


def measure(farm: Farm, program: Path, processes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measure a program in fresh processes, and return how much their medians differ."""
    counts = [min(PER_JOB, processes - begin) for begin in range(0, processes, PER_JOB)]
    reports = [farm.bench(program, repeat=count, profile=False, **options).result().report for count in counts]
    medians, valid = medians_of(reports, valid=False), medians_of(reports, valid=True)
    p50_ns = statistics.median(medians)
    return {
        "p50_ns": p50_ns, "medians_ns": medians, "valid_ns": valid, "all": estimate([medians]), "valid": estimate([valid]),
        "assumed": between_runs.typical(p50_ns),
    }  # fmt: skip


def pool(programs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the pooled spread of the programs with one assumption, by that assumption."""
    result: dict[str, Any] = {}
    for assumed in sorted({program["assumed"] for program in programs.values()}):
        alike = [program for program in programs.values() if program["assumed"] == assumed]
        pooled = estimate([program["valid_ns"] for program in alike])
        holds = None if pooled is None or pooled["ci95"] is None else pooled["ci95"][0] <= assumed <= pooled["ci95"][1]
        result[f"{assumed:g}"] = {"programs": len(alike), "valid": pooled, "assumed": assumed, "holds": holds}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20, help="for each program, at least 2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", default="", help="of a farm; a new one on this machine by default")
    parser.add_argument("--device", default="", help="selector of the device")
    parser.add_argument("--program", action="append", help="a demo, or chainN of N convolutions; repeatable")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    names = arguments.program or [*DEMOS, *(f"chain{count}" for count in CHAINS)]
    options = {"threads": [arguments.threads], "devices": [arguments.device]}
    programs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as text, connect(arguments.server, Path(text)) as farm:
        for name, path in compile_programs(farm, Path(text), names):
            programs[name] = measure(farm, path, arguments.processes, options)
            print(f"{name}: {programs[name]['valid'] or 'no valid runs'}", file=sys.stderr)
    document = {
        "bench": "run_spread", "threads": arguments.threads, "seconds": time.perf_counter() - began_s, "programs": programs,
        "pooled": pool(programs),
    }  # fmt: skip
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
