"""What the farm adds to a number: its p50 over that of a bare loop of the same runner on the same file.

Rounds are interleaved; in each, the farm and the bare loop twice, in an order that changes. The second bare loop over the
first is the same ratio with nothing between: its spread is what this machine can tell apart. Run it on an idle machine:

    python -m tests.bench.fidelity [--rounds 15] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

from etfarm.client import Farm
from etfarm.device_agents.runners.bundle import Bundle, unpack
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.protocol import MeasurePlan
from tests.support.farm import FarmProcess
from tests.support.runner import runner_archive


class Toy(torch.nn.Module):
    """About five microseconds of small operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(64):
            x = torch.sigmoid(x)
        return x


MODELS: Final = ("demo:resnet8", "demo:mobilenet_v1_025", "toy")
LIMIT = 0.01
"""The farm's median ratio may differ from 1 by this much, or by the spread of equal measurements where that is larger."""


async def bare(bundle: Bundle, program: Path, threads: int, folder: Path) -> float:
    """p50 in ns of the runner alone, as an agent asks it to measure."""
    async with NativeRunner.start(bundle.command(), folder) as runner:
        await runner.threads(threads)
        await runner.load(program)
        await runner.load_method("forward")
        await runner.default_inputs(0)
        measured = await runner.measure(MeasurePlan())
    return statistics.median(measured.samples_ns)


def farms(farm: Farm, program: Path, threads: int) -> float:
    """p50 in ns of a whole job."""
    p50_ns = farm.bench(program, threads=[threads], profile=False).result().report.latency.p50_ns
    assert p50_ns is not None
    return float(p50_ns)


def measure(farm: Farm, bundle: Bundle, program: Path, rounds: int, threads: int, folder: Path) -> dict[str, object]:
    """Return the ratios of all rounds, and their medians."""
    ways = {
        "farm": lambda: farms(farm, program, threads),
        "bare": lambda: asyncio.run(bare(bundle, program, threads, folder)),
        "bare_again": lambda: asyncio.run(bare(bundle, program, threads, folder)),
    }
    order = random.Random(0)
    result = []
    for number in range(rounds):
        names = order.sample(list(ways), len(ways))
        result.append({name: ways[name]() for name in names})
        print(f"round {number + 1}/{rounds}: {result[-1]}", file=sys.stderr)
    ratios = [each["farm"] / each["bare"] for each in result]
    same = [each["bare_again"] / each["bare"] for each in result]
    low, *_, high = statistics.quantiles(same, n=20)
    median = statistics.median(ratios)
    spread = max(1 - low, high - 1)
    return {
        "median_ratio": median, "ratios": ratios, "same_ratios": same, "same_median_ratio": statistics.median(same),
        "same_spread_p5_p95": [low, high], "limit": max(LIMIT, spread), "holds": abs(median - 1) <= max(LIMIT, spread),
        "bare_p50_ns": statistics.median(each["bare"] for each in result),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = unpack(runner_archive(), folder / "bundle")
        running = FarmProcess(folder)
        try:
            with running.start().client() as farm:
                for model in MODELS:
                    program = folder / f"{model.rpartition(':')[2]}.pte"
                    compiling = (
                        farm.compile(Toy().eval(), "portable", example_inputs=(torch.rand(8),))
                        if model == "toy"
                        else farm.compile(model)
                    )
                    compiling.wait()
                    compiling.save_program(program)
                    results[model] = measure(farm, bundle, program, arguments.rounds, arguments.threads, folder)
        finally:
            running.stop()
    print(
        json.dumps({"bench": "fidelity", "rounds": arguments.rounds, "threads": arguments.threads, "models": results}, indent=1)
    )
    return 0 if all(result["holds"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
