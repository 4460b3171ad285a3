"""Several runs of one program, from the command line to the report; and another measurement of an INVALID one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from etfarm.client import Farm
from etfarm.server.reports.latency.statistics import median_interval
from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="a farm measures several runs")


def test_a_report_has_every_run_and_their_spread(farm: FarmProcess, tmp_path: Path) -> None:
    arguments = ("--repeat", "3", "--min-time", "0.1", "--threads", "1", "--json", "r.json", "--html", "r.html")
    done = etfarm("bench", str(program("conv").path), *arguments, "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"3 runs, [\d.]+ % between runs", done.stdout), done.stdout
    (report,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["reports"]
    runs, samples = report["runs"], np.array(report["latency"]["samples_ns"])
    assert len(runs) == 3 and sum(run["iterations"] for run in runs) == len(samples) == report["measurement"]["iterations"]
    parts = np.split(samples, np.cumsum([run["iterations"] for run in runs])[:-1])
    for run, part in zip(runs, parts, strict=True):
        interval = median_interval(part)  # None if a busy machine's samples are worth fewer than 6 independent ones
        assert run["p50_ns"] == np.median(part) and run["p50_ci95_ns"] == (interval and list(interval))
        assert interval is None or interval[0] <= run["p50_ns"] <= interval[1]
        assert run["verdict"]["status"] in ("VALID", "INVALID") and run["load"]["first_run_ns"] > 0
        assert run["telemetry"]["wall_time_ns"] and run["telemetry"]["series"] == []
    if all(run["verdict"] == runs[0]["verdict"] for run in runs):
        assert report["latency"]["p50_ns"] == pytest.approx(np.exp(np.mean([np.log(run["p50_ns"]) for run in runs])))
        assert report["run_spread"]["source"] == "REPEATS" and report["run_spread"]["runs"] == 3
        assert report["latency"]["p50_ci95_ns"] == report["run_spread"]["p50_ci95_ns"]
    assert report["profile"]["iterations"] and report["telemetry"]["wall_time_ns"]
    assert "between runs" in (tmp_path / "r.html").read_text()
    with Farm(farm.address) as client:
        typed = client.job("latest").result().reports[0]
        assert len(typed.runs) == 3 and typed.run_spread is not None and typed.runs[0].verdict is not None


def test_an_invalid_cell_is_measured_again_and_every_try_is_named(farm: FarmProcess, tmp_path: Path) -> None:
    few = ("--iterations", "10", "--min-time", "0", "--warmup", "1", "--threads", "1")
    required = ("--require-valid", "--retry-invalid", "1", "--json", "r.json")
    done = etfarm("bench", str(program("add").path), *few, *required, "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    (again,) = re.findall(r"is INVALID \(.*TOO_FEW_SAMPLES.*\)\. Retry 1 of 1 is job (\w+)\.", done.stdout + done.stderr)
    document = json.loads((tmp_path / "r.json").read_text())
    (report,) = document["reports"]
    (job,) = re.findall(r"Job (\w+): 1 cell\.", done.stdout + done.stderr)
    assert document["job"]["id"] == again != job
    assert f"etfarm report show {again}" in done.stdout and f"report show {job}" not in done.stdout
    with Farm(farm.address) as client:
        first, second = (client.job(each).result().reports[0] for each in (job, again))
    assert report["id"] == second.id != first.id
    assert first.compile is not None and second.compile is not None and first.compile.program == second.compile.program
    assert first.device is not None and second.device is not None and first.device.id == second.device.id
    assert (first.method, first.threads) == (second.method, second.threads)
    outcome = document["requirements"]
    assert outcome["valid"] and not outcome["passed"] and outcome["reasons"][0]["outcome"] == "inconclusive"
    assert "the latency is INVALID" in done.stderr and "--retry-invalid measured it again, 1 time at most" in done.stderr
