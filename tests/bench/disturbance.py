"""What measuring costs a number, and whether a disturbed number is distinguished from a calm one. Run it on an idle machine:

    python -m tests.bench.disturbance [--trials 20] [--rounds 15]

The telemetry's cost is the ratio of p50 with and without it over interleaved rounds, beside the same ratio with nothing
between. A process that keeps one cpu busy is started when the timed pass begins and runs until the traced pass has ended: the
verdict has to name interference each time. The traced pass has a verdict of its own, whose shares are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from etfarm.device_agents.attempts.passes import Passes, plan_of, traced_iterations
from etfarm.device_agents.conditions.sampler import Sampler, watched
from etfarm.device_agents.runners.bundle import Bundle, unpack
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.server.reports.latency import statistics as summaries
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.reports.trace import profile
from etfarm.server.reports.traced_verdict import judge_trace
from etfarm.server.reports.verdict import Thresholds, judge
from etfarm.v1 import agent_pb2, job_pb2, report_pb2
from tests.support.phases import RecordedPhases
from tests.support.programs import program
from tests.support.runner import runner_archive

COST_LIMIT = 0.005
"""Telemetry may change the median by this much, or by the spread of equal measurements where that is larger."""
INTERFERENCE = {"CPU_STARVED", "INVOLUNTARY_SWITCHES", "CPU_PRESSURE", "BACKGROUND_LOAD"}


class TimedPassListener(RecordedPhases):
    """Calls a function when the timed pass begins."""

    def __init__(self, on_timed: Callable[[], None]) -> None:
        super().__init__()
        self._on_timed = on_timed

    def enter_phase(self, name: str) -> None:
        if name == "TIMED" and self.now != name:
            self._on_timed()
        super().enter_phase(name)


class Unwatched(Sampler):
    """Samples nothing."""

    def begin(self) -> None:
        pass


async def measured(
    bundle: Bundle,
    threads: int,
    folder: Path,
    sampler: Callable[[], Sampler],
    on_timed: Callable[[], None] = lambda: None,
    *,
    traced: bool = False,
) -> tuple[agent_pb2.CandidateResult, summaries.Summary]:
    """One measurement with the defaults, of a small convolutional network, as an agent makes it."""
    created, result = program("conv"), agent_pb2.CandidateResult()
    folder.mkdir(exist_ok=True)
    async with NativeRunner.start(bundle.command(), folder) as runner:
        result.threads = await runner.threads(threads)
        await runner.load(created.path)
        await runner.load_method("forward")
        await runner.set_inputs(created.inputs)
        passes = Passes(runner, "forward", result, TimedPassListener(on_timed))
        samples = await passes.measure(plan_of(job_pb2.Measurement()), watched(sampler))
        if traced:
            await passes.compared_outputs(folder / "trace.etdp", traced_iterations(samples), writes_state=False)
    summary = summaries.summarize(np.frombuffer(samples.tobytes(), dtype="<i8"))
    assert summary is not None
    return result, summary


def verdicts(
    result: agent_pb2.CandidateResult, summary: summaries.Summary, folder: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the codes of what is wrong with a timed pass and with the traced pass after it."""
    latency = report_pb2.Latency(
        p50_ns=summary.p50, p50_ci95_ns=summary.p50_ci95 or (), drift=summary.drift,
        effective_samples=summary.effective_samples,
    )  # fmt: skip
    thresholds = Thresholds()
    timed = judge(result, latency, emulated=False, thresholds=thresholds, cores=os.cpu_count() or 1)
    report = report_pb2.Report(latency=latency)
    request = AnalyzeRequest(
        pte=None, etdump=folder / "trace.etdp", etrecord=None, model=None, inputs=None, outputs=None, samples=None,
        method="forward", output_names=(), traced_ns=tuple(result.traced_ns),
    )  # fmt: skip
    profile.fill(report, request, lambda code, message: None, lambda times: None)
    traced = judge_trace(report.profile, result, emulated=False, thresholds=thresholds)
    return tuple(reason.code for reason in timed.reasons), tuple(reason.code for reason in traced.reasons)


def cost(bundle: Bundle, rounds: int, folder: Path) -> dict[str, object]:
    """p50 with telemetry over p50 without, and without over without."""
    cpus = [list(range(os.cpu_count() or 1))]
    ways = {"with": Sampler, "without": Unwatched, "again": Unwatched}
    order, result = random.Random(0), []
    for _ in range(rounds):
        names = order.sample(list(ways), len(ways))
        result.append({name: asyncio.run(measured(bundle, 1, folder, lambda: ways[name](cpus)))[1].p50 for name in names})  # noqa: B023
    ratios = [each["with"] / each["without"] for each in result]
    equal = [each["again"] / each["without"] for each in result]
    spread = max(abs(1 - value) for value in statistics.quantiles(equal, n=4, method="inclusive"))
    ratio = statistics.median(ratios)
    return {"ratio": ratio, "spread_of_equals": spread, "ok": abs(1 - ratio) <= max(COST_LIMIT, spread)}


def disturbed(bundle: Bundle, trials: int, folder: Path, *, hog: bool) -> dict[str, object]:
    """Return the verdicts of measurements beside which a process starts to keep a cpu busy, or none does."""
    cpus = [list(range(os.cpu_count() or 1))]
    result: list[tuple[str, ...]] = []
    traced: list[tuple[str, ...]] = []
    for number in range(trials):
        hogs: list[subprocess.Popen[bytes]] = []

        def start(hogs: list[subprocess.Popen[bytes]] = hogs) -> None:
            hogs.append(subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]))

        threads = 1 + number % 2
        try:
            begin = start if hog else lambda: None
            pass_results = asyncio.run(measured(bundle, threads, folder, lambda: Sampler(cpus), begin, traced=True))
            of_timed, of_traced = verdicts(*pass_results, folder)
            result.append(of_timed)
            traced.append(of_traced)
        finally:
            for process in hogs:
                process.kill()
                process.wait()
    named = sum(bool(INTERFERENCE & set(codes)) for codes in result)
    return {
        "codes": result, "named": named, "valid": sum(not codes for codes in result), "trials": trials,
        "traced_codes": traced, "traced_valid_share": sum(not codes for codes in traced) / trials,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = unpack(runner_archive(), folder / "bundle")
        calm = disturbed(bundle, arguments.trials, folder / "work", hog=False)
        hogged = disturbed(bundle, arguments.trials, folder / "work", hog=True)
        telemetry = cost(bundle, arguments.rounds, folder / "work")
    limits = {
        "idle_is_valid": calm["valid"] == calm["trials"],
        "a_hog_is_named": hogged["named"] == hogged["trials"],
        "telemetry_costs_nothing": telemetry["ok"],
    }
    print(json.dumps({"idle": calm, "hog": hogged, "telemetry": telemetry, "limits": limits}, indent=1))
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
