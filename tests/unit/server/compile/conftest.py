"""A compiler whose children run cheap tasks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etfarm.server.workers.jail.isolation import JailOptions
from etfarm.server.workers.limits import Limits
from tests.support.compiling_children import MODULE, ROOT, RecordingWorkers, World
from tests.support.databases import new_database


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    limits = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1)
    gates = tmp_path / "gates"
    gates.mkdir()
    options = JailOptions(readable=(gates,))
    workers = RecordingWorkers(preload=[MODULE], limits=limits, folder=tmp_path / "children", concurrency=3, options=options)
    workers.ran, workers.requests = [], []
    workers.start()
    database = new_database(tmp_path / "farm.sqlite")
    await database.open()
    yield World(tmp_path, database, workers)
    await workers.stop()
    database.close()
