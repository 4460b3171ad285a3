"""Comparisons of real measurements, interleaved and separate, by the command, the library and the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etfarm.client import Comparison, JobResult
from etfarm.client.jobs.comparison import Side
from etfarm.wire import comparison
from tests.support.farm import FarmProcess, etfarm

pytestmark = pytest.mark.slow(reason="a farm measures several jobs")

CONVOLUTIONS, SLOWER = 10, 13
"""A chain, and one that takes 30 % longer."""
INPUT = (torch.rand(1, 16, 16, 16),)


class Chain(torch.nn.Module):
    """A chain of convolutions; chains of equal length are equal."""

    def __init__(self, convolutions: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(convolutions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(scope="module")
def in_turns(farm: FarmProcess) -> JobResult:
    """An interleaved job of a chain, a longer chain and the first chain again, in cells 0, 1 and 2."""
    chain, longer = Chain(CONVOLUTIONS).eval(), Chain(SLOWER).eval()
    with farm.client() as client:
        job = client.bench([chain, longer, chain], example_inputs=INPUT, threads=[1], interleave=True, min_time_s=0.2)
        return job.result()


@pytest.fixture(scope="module")
def alone(farm: FarmProcess) -> JobResult:
    """The longer chain by itself."""
    with farm.client() as client:
        return client.bench(Chain(SLOWER).eval(), example_inputs=INPUT, threads=[1], min_time_s=0.2).result()


@pytest.fixture
def command(farm: FarmProcess, tmp_path: Path) -> Iterator[Any]:
    def run(*arguments: str) -> tuple[int, str, str]:
        done = etfarm("compare", *arguments, "--server", farm.address, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    yield run


def test_a_program_that_is_thirty_percent_slower_fails_a_gate_of_ten(in_turns: JobResult, command: Any, tmp_path: Path) -> None:
    job = in_turns.job.id
    code, out, err = command(
        f"{job}#0", f"{job}#1", "--gate", "10%", "--accept-invalid", "--json", "c.json", "--markdown", "c.md"
    )
    assert code == 3, out + err
    assert err.startswith("etfarm: The gate is not passed: at least ") and err.count("\n") == 1
    (pair,) = json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)["pairs"]
    assert (pair["latency"]["method"], pair["latency"]["outcome"]) == ("paired", "slower")
    assert 1.1 < pair["latency"]["ratio_ci95"][0] < pair["latency"]["ratio"] < 1.7
    assert pair["latency"]["ratio"] == in_turns.reports[1].interleaved.ratio
    assert "% slower" in out.splitlines()[0] and "Measured in separate runs" not in out
    assert "❌ gate not passed" in (tmp_path / "c.md").read_text()


def test_equal_interleaved_programs_pass_the_gate(in_turns: JobResult, command: Any) -> None:
    job = in_turns.job.id
    code, out, err = command(f"{job}#0", f"{job}#2", "--gate", "10%", "--accept-invalid")
    assert (code, err) == (0, ""), out
    assert "gate passed  latency 10 %" in out
    code, _, err = command(f"{job}#2", f"{job}#1", "--gate", "5%", "--accept-invalid")
    assert code == 3, "two later candidates are compared through the first"


def test_added_layers_are_named_and_the_others_matched(farm: FarmProcess, in_turns: JobResult) -> None:
    job = in_turns.job.id
    with farm.client() as client:
        (pair,) = client.compare(f"{job}#0", f"{job}#1").pairs
        (same,) = client.compare(f"{job}#0", f"{job}#2").pairs
    rows = [row for row in pair.operators.rows if row.kind == "OPERATOR"]
    assert {row.module for row in rows if row.base is None} == {f"layers.{at}" for at in range(CONVOLUTIONS, SLOWER)}
    assert {row.module for row in rows if row.base is not None} == {f"layers.{at}" for at in range(CONVOLUTIONS)}
    # What the backend inserted behind the last layer, a transposition back, serves the other last layer in the candidate.
    gone = [row for row in rows if row.candidate is None]
    assert {(row.module, row.op_types) for row in gone} <= {(f"layers.{CONVOLUTIONS - 1}", ())}
    assert not [row for row in same.operators.rows if row.base is None or row.candidate is None]
    assert pair.size.total_bytes.change > 0 and same.size.total_bytes.change == 0
    assert [change.what for change in pair.changes] == ["model"] and same.changes == ()


def test_separate_runs_are_compared_as_not_interleaved(
    farm: FarmProcess, in_turns: JobResult, alone: JobResult, command: Any
) -> None:
    code, out, _ = command(f"{in_turns.job.id}#1", alone.job.id)
    assert code == 0 and "Measured in separate runs, and it is not known how much runs of both sides vary" in out
    with farm.client() as client:
        result = client.compare(f"{in_turns.job.id}#1", alone.job.id)
    assert result.pairs[0].latency.method == "separate"
    # A machine with sensors may be warmer by then.
    assert {change.what for change in result.pairs[0].changes} <= {"temperature", "throttled"} and result.passed


def test_job_ids_files_and_results_compare_equally(
    farm: FarmProcess, in_turns: JobResult, alone: JobResult, tmp_path: Path, command: Any
) -> None:
    file = tmp_path / "base.json"
    file.write_text(json.dumps(in_turns.json()))
    with farm.client() as client:
        client.tag(alone.job.id, "compared")
        on_farm = client.compare(f"{in_turns.job.id}#0", "compared", "1000%", accept_invalid=True)
        mixed = client.compare(f"{file}#0", "compared", ["latency=1000%"], accept_invalid=True)
        at_hand = client.compare(f"{file}#0", alone)
        handle = client.compare(f"{in_turns.job.id}#0", client.job("compared"), "1000%", accept_invalid=True)
    assert handle.json() == on_farm.json()
    sides = (
        Side(in_turns.json()["reports"], in_turns.json()["job"], None, "0"),
        Side(alone.json()["reports"], alone.json()["job"]),
    )
    here = comparison.document(comparison.compare(*sides))
    assert isinstance(on_farm, Comparison) and on_farm.gate.limits[0].limit == 1000
    assert not on_farm.passed and on_farm.gate.outcome == mixed.gate.outcome == "inconclusive"
    assert on_farm.json()["pairs"] == mixed.json()["pairs"] == at_hand.json()["pairs"] == here["pairs"]
    assert json.dumps({**on_farm.json(), "gate": None}) == json.dumps(here)
    assert (mixed.base.file, mixed.candidate.job.id) == (str(file), alone.job.id)
    assert command(f"{file}#0", "compared")[0] == 0
