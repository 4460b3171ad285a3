"""An embedded farm on a machine without a compiler and without a prebuilt runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etfarm.device_agents.runners.python import PythonRunner
from tests.support.farm import etfarm

pytestmark = [
    pytest.mark.skipif(not PythonRunner.available(), reason="torch and executorch are not installed"),
    pytest.mark.slow(reason="the Python runner loads torch"),
]


def test_bench_warns_that_the_python_binding_ran_and_names_the_remedy(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    environment = {"PATH": str(programs), "ETFARM_DATA": str(tmp_path / "data")}
    report = tmp_path / "report.json"
    options = ("--iterations", "20", "--min-time", "0", "--json", str(report))
    result = etfarm("bench", "demo:resnet8", *options, cwd=tmp_path, environment=environment)
    assert result.returncode == 0, result.stderr
    (only,) = json.loads(report.read_text())["reports"]
    assert only["runner"]["kind"] == "python"
    assert "PYTHON_RUNNER" in {warning["code"] for warning in only["compile"]["warnings"]}
    assert "apt-get install g++" in result.stderr
    assert "etfarm-runner" in result.stdout
