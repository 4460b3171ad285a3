"""Whether an operator's time changed: an interval for each, and "no difference" as an answer."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.support.comparisons import against, operator, report

SPREAD = {"source": "REPEATS", "runs": 5, "relative_stddev": 0.01, "p50_ci95_ns": [900.0, 1100.0]}


def traced(cell: str, *times_ns: float, half: float = 0.02, **changes: Any) -> dict[str, Any]:
    """Return a REPORT of operators with times and intervals of `half` on either side."""
    whole = sum(times_ns)
    rows = [
        operator(
            at, time / whole, op_types=["conv"], module=f"layer{at}", debug_handles=[at], mean_ns=time,
            mean_ci95_ns=[time * (1 - half), time * (1 + half)],
        )
        for at, time in enumerate(times_ns)
    ]  # fmt: skip
    profile = {"iterations": 30, "p50_ns": whole, "mean_ns": whole, "verdict": {"status": "VALID"}}
    return report(cell, **{"operators": rows, "profile": profile, "run_spread": SPREAD, **changes})


def changes(base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    (pair,) = against(base, candidate)["pairs"]
    return {row["module"]: row for row in pair["operators"]["rows"]}


def test_a_change_within_its_interval_is_no_difference_and_one_beyond_it_is() -> None:
    rows = changes(traced("b", 100_000.0, 200_000.0, 50_000.0), traced("k", 103_000.0, 260_000.0, 40_000.0))
    assert {module: row["outcome"] for module, row in rows.items()} == {
        "layer0": "no_difference", "layer1": "slower", "layer2": "faster",
    }  # fmt: skip
    low, high = rows["layer1"]["change_ci95_ns"]
    assert 0 < low < 60_000 < high
    assert rows["layer1"]["base"]["time_ci95_ns"] == pytest.approx([196_000, 204_000])


def test_times_are_the_shares_of_the_mean_of_the_whole() -> None:
    for row in changes(traced("b", 100_000.0, 300_000.0), traced("k", 100_000.0, 200_000.0)).values():
        for side, whole_ns in (("base", 400_000), ("candidate", 300_000)):
            assert row[side]["time_ns"] == pytest.approx(row[side]["share"] * whole_ns)


@pytest.mark.parametrize(
    "unknown",
    [
        {"run_spread": None},
        {"run_spread": {**SPREAD, "source": "PRIOR", "runs": 40}},
        {"run_spread": {**SPREAD, "runs": 2}},
        {"profile": {"iterations": 30, "p50_ns": 4e5, "mean_ns": 4e5, "verdict": {"status": "INVALID"}}},
        {"profile": {"iterations": 30, "p50_ns": 4e5, "mean_ns": 4e5}},
    ],
)
def test_a_difference_is_inconclusive_if_a_pass_is_not_valid_or_runs_vary_by_an_unknown_amount(unknown: dict[str, Any]) -> None:
    base, candidate = traced("b", 100_000.0, 200_000.0), traced("k", 100_000.0, 300_000.0, **unknown)
    for rows in (changes(base, candidate), changes(candidate, base)):
        assert {module: row["outcome"] for module, row in rows.items()} == {"layer0": "no_difference", "layer1": "inconclusive"}


def test_the_variation_between_runs_widens_the_interval() -> None:
    quiet = changes(traced("b", 100_000.0), traced("k", 106_000.0))["layer0"]
    shaky = {"run_spread": {**SPREAD, "relative_stddev": 0.05}}
    noisy = changes(traced("b", 100_000.0, **shaky), traced("k", 106_000.0, **shaky))["layer0"]
    assert (quiet["outcome"], noisy["outcome"]) == ("slower", "no_difference")


def test_a_step_of_the_clock_is_no_difference() -> None:
    base, candidate = traced("b", 5000.0, half=0.0), traced("k", 6000.0, half=0.0)
    for side in (base, candidate):
        side["operators"][0]["resolution_ns"] = 1000.0
        side["run_spread"]["relative_stddev"] = 0.0
    (row,) = changes(base, candidate).values()
    assert row["outcome"] == "slower", "rounding explains 0.8 steps in 95 % of cases"
    candidate["operators"][0] |= {"mean_ns": 5700.0, "share": 1.0, "mean_ci95_ns": [5700.0, 5700.0]}
    candidate["profile"]["mean_ns"] = 5700.0
    (row,) = changes(base, candidate).values()
    assert row["outcome"] == "no_difference"


def rounded(cell: str, time_ns: float, rounding_ns: float | None, kernels: int = 20) -> dict[str, Any]:
    """Return a REPORT of equal kernels, which a clock of microseconds measured."""
    created = traced(cell, *[time_ns] * kernels, half=0.0)
    for row in created["operators"]:
        ends = [time_ns - (rounding_ns or 0.0), time_ns + (rounding_ns or 0.0)]
        row |= {
            "kind": "KERNEL",
            "debug_handles": [0],
            "module": "m",
            "resolution_ns": 1000.0,
            "rounding_ns": rounding_ns,
            "mean_ci95_ns": ends,
        }
    created["run_spread"] = {**SPREAD, "relative_stddev": 0.0}
    # Programs of different recipes are compared by module.
    created |= {"recipe": f"of {cell}", "recipe_digest": cell * 64}
    created["compile"] = {**created["compile"], "program": {"digest": cell * 64, "size_bytes": 1000}}
    return created


def test_roundings_of_many_kernels_do_not_add_up() -> None:
    (row,) = changes(rounded("b", 4500.0, 500.0), rounded("k", 4900.0, 500.0)).values()
    half_ns = 1.96 * math.sqrt(2 * 20 / 3) * 500
    assert row["change_ci95_ns"] == pytest.approx([8000 - half_ns, 8000 + half_ns], rel=1e-3) and row["outcome"] == "slower"
    low, high = row["base"]["time_ci95_ns"]
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(20 / 3) * 500, rel=1e-3)


def test_a_half_step_that_an_older_report_lacks_is_no_difference_of_programs() -> None:
    old, new = rounded("b", 4000.0, None), rounded("k", 4500.0, 100.0)
    for pair in ((old, new), (new, old)):
        (row,) = changes(*pair).values()
        assert row["outcome"] == "inconclusive"
    (row,) = changes(old, rounded("k", 6000.0, None)).values()
    assert row["outcome"] == "slower"


def test_kernels_that_no_iteration_saw_have_a_bound_and_no_time() -> None:
    base, candidate = rounded("b", 12_500.0, 100.0, kernels=1), rounded("k", 12_500.0, 100.0, kernels=2)
    unseen = {"mean_ns": None, "share": 0.0, "mean_ci95_ns": None, "rounding_ns": None, "module": "m"}
    candidate["operators"][0] |= unseen
    candidate["operators"][1]["module"] = "other"
    row = changes(base, candidate)["m"]
    assert (row["candidate"]["time_ns"], row["candidate"]["time_ci95_ns"]) == (None, [0.0, 1000.0])
    assert row["change_ns"] == pytest.approx(-12_000) and row["outcome"] == "faster"


def test_without_intervals_there_are_too_few_iterations() -> None:
    base, candidate = traced("b", 100_000.0), traced("k", 100_000.0)
    candidate["operators"][0]["mean_ci95_ns"] = None
    (row,) = changes(base, candidate).values()
    assert (row["outcome"], row["change_ci95_ns"], row["candidate"]["time_ci95_ns"]) == ("too_few", None, None)


def test_an_operator_that_one_side_lacks_has_no_outcome() -> None:
    rows = changes(traced("b", 100_000.0), traced("k", 100_000.0, 50_000.0))
    assert (rows["layer1"]["outcome"], rows["layer1"]["change_ci95_ns"]) == (None, None)


def test_runs_of_one_program_seldom_differ_and_a_change_is_found() -> None:
    draw = random.Random(0)
    false = detected = 0
    trials, operators, spread = 400, 10, 0.02

    def run(cell: str, factor: float) -> dict[str, Any]:
        shift = 1 + draw.gauss(0, spread)
        times = [1e5 * shift * (1 + draw.gauss(0, 0.01)) for _ in range(operators)]
        times[0] *= factor
        return traced(cell, *times, half=1.96 * 0.01, run_spread={**SPREAD, "relative_stddev": spread})

    for _ in range(trials):
        rows = changes(run("b", 1.0), run("k", 1.0))
        false += sum(row["outcome"] != "no_difference" for row in rows.values())
        detected += changes(run("b", 1.0), run("k", 1.2))["layer0"]["outcome"] == "slower"
    assert false <= 0.07 * trials * operators
    assert detected >= 0.95 * trials


@pytest.mark.parametrize(
    ("runs", "stddevs", "quantile"), [((3, 3), (0.02, 0.02), 2.776), ((5, 5), (0.02, 0.02), 2.306), ((3, 9), (0.02, 0.0), 4.303)]
)
def test_few_runs_widen_the_interval_by_students_quantile(
    runs: tuple[int, int], stddevs: tuple[float, float], quantile: float
) -> None:
    base, candidate = (
        traced(cell, 1e5, half=0.0, run_spread={**SPREAD, "runs": count, "relative_stddev": stddev})
        for cell, count, stddev in zip("bk", runs, stddevs, strict=True)
    )
    (row,) = changes(base, candidate).values()
    assert row["change_ci95_ns"][1] == pytest.approx(quantile * 1e5 * math.hypot(*stddevs), rel=0.01)


def test_large_times_have_an_interval() -> None:
    (row,) = changes(traced("b", 1e200), traced("k", 2e200)).values()
    low, high = row["change_ci95_ns"]
    assert 0 < low < 1e200 < high and row["outcome"] == "slower"
