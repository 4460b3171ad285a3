"""A farm on a machine without a compiler whose runner comes from the distribution `etfarm-runner`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.farm import etfarm
from tests.support.programs import program

PROJECT = Path(__file__).parents[2] / "device_agents" / "runner_wheel"

pytestmark = pytest.mark.slow(reason="builds the runner and its wheel")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this machine's architecture, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(PROJECT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = folder.glob("etfarm_runner-*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True, timeout=120)
    with zipfile.ZipFile(wheel) as archive:
        assert {"etfarm_runner/licenses/executorch.txt", "etfarm_runner/bundle.tar.xz"} <= set(archive.namelist())
    return site


def test_the_first_command_needs_no_compiler(installed: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    environment = {"PYTHONPATH": str(installed), "PATH": str(programs), "ETFARM_DATA": str(tmp_path / "data")}
    report = tmp_path / "report.json"
    result = etfarm(
        "bench",
        "demo:resnet8",
        "--iterations",
        "20",
        "--min-time",
        "0",
        "--json",
        str(report),
        cwd=tmp_path,
        environment=environment,
    )
    assert result.returncode == 0, result.stderr
    (only,) = json.loads(report.read_text())["reports"]
    assert only["runner"]["kind"] == "native"
    assert only["runner"]["bundle_digest"]
    assert "building the runner" not in result.stdout + result.stderr


def test_a_local_session_needs_no_compiler(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "PATH": str(tmp_path / "bin"),
        "ETFARM_DATA": str(tmp_path / "data"),
    }
    code = f"""
from etfarm.client import LocalSession
with LocalSession({str(program("add").path)!r}) as session:
    print(session.device.runner)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("native", "")
