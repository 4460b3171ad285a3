"""Whether gates on separate runs are right about programs whose truth is known, on a machine with load beside it:

    python -m tests.bench.gates [--quick] [--seed 0]

Programs are chains of convolutions: two that differ in their weights only, and a third with 5 % more of them. The truth is their
ratio measured in turns without load. Then each pair is measured in separate jobs, in an order that the seed decides; first those
without load, then those while the seed's schedule starts and stops processes that copy memory:

- equal pairs, half of them of one program: at most one of 40 may be called different. Half of them have 5 runs on each side, the
  others a single one, whose spread the farm knows from earlier runs once it has three.
- slower pairs with 5 runs on each side, half of them without load: 9 of 10 must be called slower if both sides are VALID and vary
  by at most 2 %. Of all, at most one may pass a gate of 3 %, and none a strict one of 0 %.

A promise that no pair put to the test is null: `five_percent_are_noticed` where no runs vary so little, and that about equal
programs where no pair is VALID. The truth itself must be 5 %, and that of equal programs 0 %, within 2 points.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from etfarm.client import Farm
from tests.bench.paired import Chain
from tests.support.farm import FarmProcess

CONVOLUTIONS, SLOWER = 60, 63
REPEATS: Final = 5
MAX_SPREAD: Final = 0.02
"""Spread between runs up to which 5 repeats have to find a difference of 5 %."""
OPTIONS: Final[dict[str, Any]] = {"threads": [1], "profile": False, "warmup": 100, "min_time_s": 0.3}
"""Without a fixed warm-up, one beside changing load would take the whole 10 s."""

LOAD: Final = (0.0, 0.0, 0.05, 0.15, 1.0)
"""Parts of the time that a process beside the farm is busy, one of which an episode has."""
BUSY: Final = """
import sys, time
busy, data = float(sys.argv[1]), bytearray(16 << 20)
while True:
    end = time.perf_counter() + 0.02 * busy
    while time.perf_counter() < end:
        bytes(data)
    time.sleep(0.02 * (1 - busy))
"""


@dataclass
class Trial:
    """A pair that is measured in two separate jobs."""

    kind: str
    base: str
    candidate: str
    repeat: int
    loaded: bool
    jobs: dict[str, str] = field(default_factory=dict)


@contextmanager
def load(seed: int) -> Iterator[None]:
    """Run a process of changing load beside the farm, in episodes of half a second to four seconds."""
    done, chance = threading.Event(), random.Random(seed)

    def schedule() -> None:
        while not done.is_set():
            busy, duration_s = chance.choice(LOAD), chance.uniform(0.5, 4)
            if not busy:
                done.wait(duration_s)
                continue
            process = subprocess.Popen([sys.executable, "-c", BUSY, str(busy)])
            try:
                done.wait(duration_s)
            finally:
                process.kill()
                process.wait()

    thread = threading.Thread(target=schedule)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def truth(farm: Farm, folder: Path) -> dict[str, Any]:
    """Return the ratios to the base, measured in turns."""
    paths = [folder / f"{name}.pte" for name in ("base", "twin", "slower")]
    _, twin, slower = farm.bench(paths, interleave=True, **OPTIONS).result().reports
    return {name: [each.interleaved.ratio, each.interleaved.ratio_ci95] for name, each in (("twin", twin), ("slower", slower))}


def measure(farm: Farm, folder: Path, trials: list[Trial], chance: random.Random) -> None:
    """Measures both sides of each pair, all in a random order."""
    sides = [(trial, side) for trial in trials for side in ("base", "candidate")]
    chance.shuffle(sides)
    for number, (trial, side) in enumerate(sides):
        job = farm.bench(folder / f"{getattr(trial, side)}.pte", repeat=trial.repeat, **OPTIONS)
        job.wait()
        trial.jobs[side] = job.id
        print(f"{number + 1} of {len(sides)}", file=sys.stderr)


def judged(farm: Farm, trial: Trial) -> dict[str, Any]:
    """Return what the comparison says of a pair, and what gates of 0 % and 3 % do."""
    compared = {
        text: farm.compare(trial.jobs["base"], trial.jobs["candidate"], text, strict=strict).json()
        for text, strict in (("0%", True), ("3%", False))
    }
    (pair,) = compared["0%"]["pairs"]
    latency = pair["latency"]
    spreads = [latency[f"{side}_spread"] or {} for side in ("base", "candidate")]
    gates = {text: document["gate"] for text, document in compared.items()}
    return {
        "kind": trial.kind, "repeat": trial.repeat, "loaded": trial.loaded, "same_program": latency["same_program"],
        "ratio": latency["ratio"], "ci95": latency["ratio_ci95"], "outcome": latency["outcome"],
        "valid": all(pair[side]["verdict"]["status"] == "VALID" for side in ("base", "candidate")),
        "sources": [spread.get("source") for spread in spreads],
        "spreads": [spread.get("relative_stddev") for spread in spreads],
        "gates": {text: [gate["outcome"], [reason["code"] for reason in gate["reasons"]]] for text, gate in gates.items()},
    }  # fmt: skip


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of pairs by their outcomes."""
    outcomes = [result["outcome"] if result["valid"] else "invalid" for result in results]
    ratios = [result["ratio"] for result in results]
    return {
        "pairs": len(results), "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "gates": {text: [result["gates"][text][0] for result in results].count("failed") for text in ("0%", "3%")},
        "smallest": min(ratios), "median": statistics.median(ratios), "largest": max(ratios),
    }  # fmt: skip


def plan(quick: bool) -> list[Trial]:
    """Return all pairs."""
    equal, slower = (8, 4) if quick else (40, 20)
    pairs = [
        Trial("equal", "base", ("base", "twin")[number % 2], REPEATS if number % 4 < 2 else 1, loaded=True)
        for number in range(equal)
    ]
    return pairs + [Trial("slower", "base", "slower", REPEATS, loaded=bool(number % 2)) for number in range(slower)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the pairs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    trials = plan(arguments.quick)
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = FarmProcess(folder)
        try:
            with running.start().client() as farm:
                for stem, count, weights in (("base", CONVOLUTIONS, 0), ("twin", CONVOLUTIONS, 1), ("slower", SLOWER, 2)):
                    torch.manual_seed(weights)
                    model, inputs = Chain(count).eval(), (torch.rand(1, 16, 16, 16),)
                    job = farm.compile(model, "xnnpack_fp32", example_inputs=inputs)
                    job.result()
                    job.save_program(folder / f"{stem}.pte")
                known = truth(farm, folder)
                # First, since the spread that history shows covers loaded runs too.
                measure(farm, folder, [trial for trial in trials if not trial.loaded], chance)
                with load(arguments.seed):
                    measure(farm, folder, [trial for trial in trials if trial.loaded], chance)
                results = [judged(farm, trial) for trial in trials]
        finally:
            running.stop()
    equal, slower = ([result for result in results if result["kind"] == kind] for kind in ("equal", "slower"))
    different = [result for result in equal if result["valid"] and result["outcome"] in ("faster", "slower")]
    precise = [result for result in slower if result["valid"] and max(result["spreads"]) <= MAX_SPREAD]
    noticed = [result for result in precise if result["outcome"] == "slower"]
    valid = [result for result in equal if result["valid"]]
    truths = ((known["slower"][0], SLOWER / CONVOLUTIONS), (known["twin"][0], 1.0))
    limits = {
        "the_truth_is_5_percent": all(ratio is not None and abs(ratio - expected) <= 0.02 for ratio, expected in truths),
        "equal_programs_are_rarely_called_different": len(different) <= 1 if valid else None,
        "no_gate_of_3_percent_fails_on_equal_programs": not any(result["gates"]["3%"][0] == "failed" for result in equal),
        "five_percent_are_noticed": len(noticed) >= 0.9 * len(precise) if precise else None,
        "what_is_slower_rarely_passes_3_percent": [result["gates"]["3%"][0] for result in slower].count("passed") <= 1,
        "what_is_slower_never_passes_strictly": not any(result["gates"]["0%"][0] == "passed" for result in slower),
    }
    print(
        json.dumps(
            {
                "bench": "gates", "seed": arguments.seed, "seconds": time.perf_counter() - began_s, "truth": known,
                "equal": {**summary(equal), "called_different": len(different)},
                "slower": {**summary(slower), "precise": len(precise), "noticed": len(noticed)},
                "trials": results, "holds": limits,
            },
            indent=1,
        )
    )  # fmt: skip
    return 0 if False not in limits.values() else 1


if __name__ == "__main__":
    sys.exit(main())
