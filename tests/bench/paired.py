"""Whether --interleave detects a program that is 3 % slower, and no difference of a program to itself. Run it on an idle machine:

    python -m tests.bench.paired [--trials 20]

Each trial is a bench of its own on a farm of one device: a program beside its equal, then beside one that executes 3 % more
convolutions. The spread is that of the ratios of equal programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from etfarm.client import Farm
from tests.support.farm import FarmProcess

CONVOLUTIONS = 66
SLOWER = 68


class Chain(torch.nn.Module):
    """A chain of convolutions.

    Not a chain of an elementwise function: how fast one calls its libm function depends on where the loader happens to put
    the two libraries, by up to 27 % from one start of a process to the next, which is no property of the program.
    """

    def __init__(self, convolutions: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(convolutions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def trial(farm: Farm, folder: Path, convolutions: int) -> dict[str, Any]:
    """Return the ratio of a chain to that of CONVOLUTIONS, and how long it took to know."""
    began_s = time.perf_counter()
    pair = [folder / f"{count}.pte" for count in (CONVOLUTIONS, convolutions)]
    base, other = farm.bench(pair, threads=[1], interleave=True, profile=False).result().reports
    result = other.interleaved
    return {
        "ratio": result.ratio, "ci95": result.ratio_ci95, "rounds": result.rounds, "starts": result.process_pairs,
        "verdicts": [report.verdict.status for report in (base, other)], "seconds": time.perf_counter() - began_s,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = FarmProcess(folder)
        try:
            with running.start().client() as farm:
                for count in (CONVOLUTIONS, SLOWER):
                    job = farm.compile(Chain(count).eval(), "xnnpack_fp32", example_inputs=(torch.rand(1, 16, 16, 16),))
                    job.result()
                    job.save_program(folder / f"{count}.pte")
                equal = [trial(farm, folder, CONVOLUTIONS) for _ in range(trials)]
                slower = [trial(farm, folder, SLOWER) for _ in range(trials)]
        finally:
            running.stop()
    told_apart = sum(not each["ci95"][0] <= 1 <= each["ci95"][1] for each in equal)
    result = sum(each["ci95"][0] > 1 for each in slower)
    ratios = [each["ratio"] for each in equal]
    limits = {"equal_programs_are_not_told_apart": told_apart <= trials / 20, "three_percent_are_found": result == trials}
    summary = {
        "equal": {"told_apart": told_apart, "smallest": min(ratios), "largest": max(ratios), "trials": equal},
        "slower": {"found": result, "median": statistics.median(each["ratio"] for each in slower), "trials": slower},
    }
    print(json.dumps({"bench": "paired", **summary, "holds": limits}, indent=1))
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
