"""The example program of the Python API: it type-checks against the installed package, and it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.farm import FarmProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "bench.py"
PROGRAM = """
from etfarm.client import AsyncFarm, Farm, Job, Report, Session

async def wait(address: str) -> Report:
    async with AsyncFarm(address) as farm:
        job = await farm.bench("x.pte", iterations=10)
        reveal_type((await job.result()).report.latency)
        return (await job.result()).report

with Farm() as farm:
    job = farm.bench("x.pte", ["portable"], "arch=aarch64", iterations=10)
    reveal_type(job)
    report = job.result().report
    reveal_type(farm.session("x.pte"))
    reveal_type(farm.compare("a.json", job.result()).pairs[0].latency)
    if report.latency is not None:
        reveal_type(report.latency.p50_ns)
        reveal_type(report.latency.samples_ns[0])
    for row in report.operators or ():
        reveal_type(row.source)
    report.latency.p51_ns
    farm.bench("x.pte", iteration=10)
"""


def _mypy(folder: Path, file: Path) -> list[str]:
    """Return what mypy --strict says, as a user's own program is checked: without this project's configuration."""
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(folder / "cache"), str(file)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return [line.removeprefix(f"{file.name}:") for line in done.stdout.splitlines()]


@pytest.mark.slow(reason="mypy reads the types of torch and numpy")
def test_programs_type_check_against_the_installed_package(tmp_path: Path) -> None:
    example, program = tmp_path / "bench.py", tmp_path / "program.py"
    example.write_text(EXAMPLE.read_text())
    program.write_text(PROGRAM)
    assert _mypy(tmp_path, example) == ["Success: no issues found in 1 source file"]
    lines = _mypy(tmp_path, program)
    types = [
        re.sub(r"[\w.]+\.(\w+)", r"\1", match[1]) for line in lines if (match := re.search(r'Revealed type is "(.+)"', line))
    ]
    assert types == [
        "Latency | None", "Job", "Session", "LatencyComparison | None", "float | None", "int", "SourceLine | None",
    ]  # fmt: skip
    errors = [line for line in lines if "error:" in line]
    assert any('has no attribute "p51_ns"' in line for line in errors)
    assert any('"iteration"' in line for line in errors)


@pytest.mark.slow(reason="measures a demo with two recipes on a farm")
def test_the_example_program_runs(farm: FarmProcess, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path, env={**os.environ, "ETFARM_SERVER": farm.address}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"xnnpack_fp32: [\d.]+ µs, (VALID|INVALID), SQNR [\d.]+ dB", first)
    assert re.fullmatch(r"xnnpack_pt2e_int8_static_per_channel: [\d.]+ µs, (VALID|INVALID), SQNR [\d.]+ dB", second)
