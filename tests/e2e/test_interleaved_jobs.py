"""Candidates that are interleaved on a device, from the command line to the line that compares them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.farm import FarmProcess
from tests.support.programs import program
from tests.support.quick_jobs import bench

pytestmark = pytest.mark.slow(reason="a farm measures interleaved jobs")


def interleave(farm: FarmProcess, folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run bench; return the reports and the printed text."""
    document, printed = bench(farm, folder, *arguments, "--min-time", "0.1", "--no-profile", "--interleave")
    return document["reports"], printed


def test_a_slower_program_is_detected_in_a_single_attempt(farm: FarmProcess, tmp_path: Path) -> None:
    (base, other), printed = interleave(farm, tmp_path, str(program("add").path), str(program("conv").path), "--threads", "1")
    assert base["attempt"] == other["attempt"]
    assert base["interleaved"] is None
    result = other["interleaved"]
    assert result["base_cell"] == base["cell"]
    assert result["rounds"] == len(result["ratios"]) >= 20 and result["process_pairs"] >= 5
    assert result["ratio"] == pytest.approx(np.median(result["ratios"]))
    low, high = result["ratio_ci95"]
    assert 1 < low <= result["ratio"] <= high, "a convolution takes longer than an addition"
    for report in (base, other):
        assert len(report["latency"]["samples_ns"]) == report["measurement"]["iterations"]
        assert report["verdict"]["status"] in ("VALID", "INVALID")
    names = [re.escape(report["model"]["name"]) for report in (other, base)]
    assert names[0] != names[1], "their files have one name"
    reported = " / ".join(names) + r"  [\d.]+x \[[\d.]+, [\d.]+\]  [\d.]+ (% slower|times as slow)  \d+ rounds, \d+ process pairs"
    assert re.search(reported, printed), printed


def test_a_program_is_compared_with_itself(farm: FarmProcess, tmp_path: Path) -> None:
    conv = str(program("conv").path)
    (base, other), printed = interleave(farm, tmp_path, conv, conv)
    result = other["interleaved"]
    assert result["base_cell"] == base["cell"]
    assert result["ratio_ci95"][0] <= result["ratio"] <= result["ratio_ci95"][1]
    assert 0.5 < result["ratio"] < 2, "which of them is faster is chance"
    assert re.search(r"(\S+) #1 / \1 #0 .* process pairs", printed), printed


def test_each_choice_has_a_separate_comparison(farm: FarmProcess, tmp_path: Path) -> None:
    add, conv = (str(program(name).path) for name in ("add", "conv"))
    reports, _ = interleave(farm, tmp_path, add, conv, conv, "--threads", "1,2")
    assert [report["threads"] for report in reports] == [1, 2] * 3
    by_threads = [{report["attempt"] for report in reports if report["threads"] == count} for count in (1, 2)]
    assert all(len(attempts) == 1 for attempts in by_threads) and by_threads[0] != by_threads[1]
    bases = [report["interleaved"] and report["interleaved"]["base_cell"] for report in reports]
    assert bases == [None, None, *[reports[0]["cell"], reports[1]["cell"]] * 2]


def test_a_candidate_is_measured_alone_if_the_other_cannot_run(farm: FarmProcess) -> None:
    with farm.client() as client:
        pair = [program("external_xnnpack").path, program("conv").path]
        result = client.bench(pair, min_time_s=0.0, profile=False, interleave=True).result()
    assert [report.state for report in result.reports] == ["FAILED", "SUCCEEDED"]
    assert result.reports[1].interleaved is None and result.reports[1].latency.p50_ns
