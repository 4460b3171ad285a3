"""What an agent announces that its machine runs programs with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from etfarm.device_agents.daemon import own_runners as module
from etfarm.device_agents.daemon.own_runners import REMEMBERED, own_runners
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.v1.common_pb2 import RunnerKind

pytestmark = pytest.mark.skipif(not PythonRunner.available(), reason="torch and executorch are not installed")

PATIENT_S = 120.0
"""Seconds for an answer where torch is imported from a disk that may be slow."""


async def test_the_binding_is_announced_with_the_backends_that_work_on_this_machine(tmp_path: Path) -> None:
    (runner,) = await own_runners(tmp_path, PATIENT_S)
    assert runner.kind == RunnerKind.RUNNER_KIND_PYTHON
    assert list(runner.backends) == ["XnnpackBackend"], "the wheel registers QnnBackend as well, which needs what is not here"
    assert "aten::add.out" in runner.operators
    assert [path.name for path in tmp_path.iterdir()] == [REMEMBERED]


async def test_it_is_asked_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await own_runners(tmp_path, PATIENT_S)
    begun: list[list[str]] = []
    command = PythonRunner.command()

    def seen() -> list[str]:
        begun.append(command)
        return command

    monkeypatch.setattr(PythonRunner, "command", staticmethod(seen))
    assert await own_runners(tmp_path, PATIENT_S) == first
    assert begun == []
    kept = json.loads((tmp_path / REMEMBERED).read_text())
    kept["versions"]["torch"] = "1.0"
    (tmp_path / REMEMBERED).write_text(json.dumps(kept))
    assert await own_runners(tmp_path, PATIENT_S) == first
    assert len(begun) == 1


async def test_a_damaged_memory_is_made_again(tmp_path: Path) -> None:
    versions = module._versions()
    assert versions is not None
    unknown = json.dumps({"versions": versions, "runners": [{"kind": "unknown"}]})
    for text in ("{", "[]", '{"versions": {}}', unknown):
        (tmp_path / REMEMBERED).write_text(text)
        assert module._remembered(tmp_path / REMEMBERED, versions) is None
    assert [runner.kind for runner in await own_runners(tmp_path, PATIENT_S)] == [RunnerKind.RUNNER_KIND_PYTHON]
    assert json.loads((tmp_path / REMEMBERED).read_text())["runners"]


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "import time; time.sleep(600)"])
async def test_a_binding_that_does_not_work_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    monkeypatch.setattr(PythonRunner, "command", staticmethod(lambda: [sys.executable, "-c", code]))
    assert await own_runners(tmp_path, 0.5) == []
    assert "cannot be used" in caplog.text
    assert list(tmp_path.iterdir()) == []


async def test_nothing_is_announced_where_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonRunner, "available", staticmethod(lambda: False))
    assert await own_runners(tmp_path) == []
