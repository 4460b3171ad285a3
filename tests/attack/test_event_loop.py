"""Requests and child processes that try to block the daemon's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.store import Store
from etfarm.server.compile import answers
from etfarm.server.state.engine import Database
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.server.workers.errors import BadAnswer
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="each test holds up a server or its workers")

TASKS = "tests.support.attack_tasks"
A_TURN = 1_000
"""Far more than is done in one turn of the event loop, and far less than a flood has."""


class Turns:
    """Counts the events of each iteration of the event loop."""

    def __init__(self) -> None:
        self._turn = 0
        self.counts = Counter[int]()

    async def count(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)

    def note(self, what: object = None) -> None:
        self.counts[self._turn] += 1


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    counting = Turns()
    task = asyncio.create_task(counting.count())
    yield counting
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    limits = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1, processes=64)
    running = Workers(preload=[TASKS], limits=limits, folder=tmp_path / "jobs", concurrency=1)
    running.start()
    yield running
    await running.stop()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = SqliteDatabase(tmp_path / "farm.db")
    await opened.open()
    yield opened
    opened.close()


async def test_a_child_that_prints_a_million_lines_does_not_delay_others(workers: Workers, turns: Turns) -> None:
    lines: list[str] = []

    def on_log(line: str) -> None:
        turns.note()
        lines.append(line)

    async with await workers.run(f"{TASKS}:print_lines", 1_000_000, deadline_s=120, on_log=on_log):
        pass
    assert max(turns.counts.values()) < A_TURN
    assert 1_000 < len(lines) < 200_000
    assert "too many lines" in lines[-1]


async def test_a_child_that_emits_without_end_is_killed(workers: Workers, turns: Turns) -> None:
    with pytest.raises(BadAnswer, match="more than"):
        await workers.run(f"{TASKS}:emit_events", 1_000_000, deadline_s=120, on_event=turns.note)
    assert max(turns.counts.values()) < A_TURN


async def test_a_project_with_a_long_queue_yields_the_next_slot_to_another(workers: Workers) -> None:
    done: list[str] = []

    async def run(project: str) -> None:
        async with await workers.run(f"{TASKS}:print_lines", 0, deadline_s=120, whose=project):
            done.append(project)

    await workers.ready()
    async with asyncio.TaskGroup() as group:
        for project in [*["first"] * 12, "second"]:
            group.create_task(run(project))
    assert done.index("second") <= 2


async def test_a_search_for_many_artifacts_does_not_delay_others(
    tmp_path: Path, database: Database, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "artifacts", database)
    stored = (await store.put(b"one", "alice")).digest
    strangers = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(20_000)]
    look_up = store.blobs.sizes

    async def sizes(digests: Sequence[str]) -> dict[str, int]:
        for _ in digests:
            turns.note()
        return await look_up(digests)

    monkeypatch.setattr(store.blobs, "sizes", sizes)
    assert await store.missing([stored] * 20_000, "default") == []
    assert await store.absent([stored, *strangers]) == strangers
    assert max(turns.counts.values()) < A_TURN
    store.close()


async def test_a_childs_files_count_against_its_projects_quota(tmp_path: Path, database: Database) -> None:
    store = Store(tmp_path / "artifacts", database, StoreLimits(project_bytes=100))
    folder = tmp_path / "child"
    folder.mkdir()
    for name, size in (("small", 60), ("large", 60)):
        (folder / name).write_bytes(name.encode().ljust(size))
    files = answers.Files(store, folder, "alice", "default")
    await files.adopt("small")
    with refuses("QUOTA_EXCEEDED"):
        await files.adopt("large")
    store.close()


async def test_the_number_of_a_childs_files_is_bounded(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_FILES", 2)
    store = Store(tmp_path / "artifacts", database)
    folder = tmp_path / "child"
    folder.mkdir()
    for name in ("one", "two", "three"):
        (folder / name).write_text(name)
    files = answers.Files(store, folder, "alice", "default")
    await files.adopt("one")
    await files.adopt("two")
    with pytest.raises(answers.BadWorkerAnswer, match="more than 2 files"):
        await files.adopt("three")
    store.close()
