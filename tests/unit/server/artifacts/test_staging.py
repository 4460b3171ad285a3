"""Staging, quotas and integrity of the artifact store, below the wire."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import Connection, text, update

from etfarm.server.artifacts.errors import ArtifactDamaged
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.store import Store
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.v1.artifact_pb2 import Chunk
from etfarm.v1.common_pb2 import Artifact
from etfarm.wire.chunks import artifact_of
from tests.support.databases import new_database
from tests.support.databases import opened as opened_database
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.stores import HeldUpload, Stores, damage

DATA = bytes(range(256)) * 4
DIGEST = artifact_of(DATA).digest
WAIT_S = 60.0
T = TypeVar("T")


class CountingDatabase(SqliteDatabase):
    """A database that keeps the names of the functions that wrote to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: list[str] = []

    async def write(self, do: Callable[[Connection], T], **options: bool) -> T:
        self.written.append(do.__qualname__)
        return await super().write(do, **options)


Opened = Callable[..., AbstractAsyncContextManager[Store]]
"""Opens a store: (folder, limits, database)."""


def opening(stores: Stores) -> Opened:
    @asynccontextmanager
    async def opened(folder: Path, limits: StoreLimits | None = None, database: Database | None = None) -> AsyncIterator[Store]:
        async with opened_database(database or new_database(folder / "farm.sqlite")) as database:
            store = stores.create(folder / "artifacts", database, limits)
            try:
                await store.open()
                yield store
            finally:
                store.close()

    return opened


@pytest.fixture(name="opened")
def opened_of_each_kind(stores: Stores) -> Opened:
    return opening(stores)


opened_files = opening(Stores(None))
"""Opens a store of files."""


async def chunked(data: bytes, offset: int = 0) -> AsyncIterator[Chunk]:
    yield Chunk(offset=offset, data=data)


async def send(store: Store, data: bytes, holder: str = "vision", announced: Artifact | None = None) -> bool:
    return (await store.receive(announced or artifact_of(data), chunked(data), holder, "ann")).complete


def rot(folder: Path, digest: str = DIGEST) -> None:
    damage(folder / "artifacts" / "blobs" / digest[:2] / digest)


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "artifacts" / "uploads").iterdir())


class TestParts:
    async def test_parts_of_yesterday_go_at_the_start_and_those_of_today_stay(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path) as store:
            for holder in ("vision", "audio"):
                await send(store, DATA[:100], holder, artifact_of(DATA))
        first, second = parts(tmp_path)
        os.utime(first, (time.time() - 25 * 3600,) * 2)
        (tmp_path / "artifacts" / "uploads" / "put-0123").write_bytes(b"of a server that was killed")
        (tmp_path / "artifacts" / "uploads" / f"{DIGEST}.part").write_bytes(b"of an earlier version")
        async with opened(tmp_path):
            assert parts(tmp_path) == [second]

    async def test_an_expired_part_goes_while_the_server_runs_but_not_one_that_is_written(
        self, tmp_path: Path, opened: Opened
    ) -> None:
        async with opened(tmp_path, StoreLimits(part_age_s=0.0)) as store:
            await send(store, DATA[:100], "vision", artifact_of(DATA))
            held = HeldUpload(DATA)
            upload = asyncio.create_task(store.receive(artifact_of(DATA), held.chunks(), "audio", "bob"))
            async with asyncio.timeout(WAIT_S):
                await held.halts.wait()
                await store.expire()
                assert len(parts(tmp_path)) == 1
                held.may_go_on.set()
                assert (await upload).complete

    async def test_a_holder_keeps_so_many_parts_the_oldest_go(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(parts=3)) as store:
            datas = [os.urandom(100) for _ in range(5)]
            await send(store, DATA[:10], "audio", artifact_of(DATA))
            for place, data in enumerate(datas):
                await send(store, data[:50], "vision", artifact_of(data))
                newest = max(parts(tmp_path), key=lambda path: path.stat().st_mtime_ns)
                os.utime(newest, (1e9 + place,) * 2)
            committed = [(await store.upload_status(artifact_of(data).digest, "vision")).committed_bytes for data in datas]
            assert committed == [0, 0, 50, 50, 50]
            assert (await store.upload_status(DIGEST, "audio")).committed_bytes == 10, "another's stay"

    async def test_interleaved_uploads_of_several_holders_never_mix(self, tmp_path: Path, opened: Opened) -> None:
        loop, numbers, ends = asyncio.get_running_loop(), count(), set[str]()
        async with opened(tmp_path) as store:

            @given(STEPS)
            @example([("vision", 0, 400, True), ("audio", 0, 100, True), ("audio", 0, 400, False), ("agent:pi", 1, 400, True)])
            def play_all(steps: list[Step]) -> None:
                playing = play(store, steps, next(numbers))
                ends.update(asyncio.run_coroutine_threadsafe(playing, loop).result(WAIT_S))

            await asyncio.to_thread(play_all)
        assert ends == {"incomplete", "complete", "damaged"}, "uploads came to every end"


Step = tuple[str, int, int, bool]
"""(holder, which artifact, bytes to send, whether they are the right ones)"""
HOLDERS = ("vision", "audio", "agent:pi")
STEPS = st.lists(st.tuples(st.sampled_from(HOLDERS), st.integers(0, 2), st.integers(1, 400), st.booleans()), max_size=14)


async def play(store: Store, steps: list[Step], number: int) -> set[str]:
    """Take the steps and compare with what uploads that share nothing but the store would have come to; return their ends."""
    ends: set[str] = set()
    datas = [f"{number}-{place}".encode() + DATA[: 300 + 100 * place] for place in range(3)]
    sent: dict[tuple[str, int], bytes] = {}
    held: set[tuple[str, int]] = set()
    for holder, which, size, is_right in steps:
        data, artifact, key = datas[which], artifact_of(datas[which]), (holder, which)
        so_far = sent.get(key, b"")
        status = await store.upload_status(artifact.digest, holder)
        assert (status.committed_bytes, status.complete) == (len(data if key in held else so_far), key in held)
        if key in held:
            continue
        more = data[len(so_far) :][:size]
        more = more if is_right else b"\xff" * len(more)
        sent[key] = so_far + more
        upload = store.receive(artifact, chunked(more, len(so_far)), holder, "ann")
        if len(sent[key]) < len(data):
            assert not (await upload).complete
            ends.add("incomplete")
        elif sent[key] == data:
            assert (await upload).complete
            held.add(key)
            ends.add("complete")
        else:
            with refuses("DIGEST_MISMATCH"):
                await upload
            del sent[key]
            ends.add("damaged")
    for which, data in enumerate(datas):
        holders = {holder for holder, place in held if place == which}
        digest = artifact_of(data).digest
        assert {holder for holder in HOLDERS if await store.is_held(digest, [holder])} == holders
        assert not holders or store.path(digest).read_bytes() == data
    return ends


class TestQuotas:
    async def test_a_project_holds_what_its_limit_allows(self, golden: Golden, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(project_bytes=1000)) as store:
            await send(store, os.urandom(600))
            with golden.refuses("QUOTA_EXCEEDED") as refused:
                await send(store, os.urandom(401))
            assert (refused.value.metadata["limit_bytes"], refused.value.metadata["used_bytes"]) == ("1000", "600")
            assert await send(store, os.urandom(400))
            with refuses("QUOTA_EXCEEDED"):
                await store.quotas.require("vision")
            assert await send(store, os.urandom(1000), "audio"), "each project has its own"

    async def test_the_server_s_own_grants_count_and_are_never_refused(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(project_bytes=1000)) as store:
            created = await store.put(os.urandom(1500), "ann", holder="vision")
            assert await store.holdings.used_bytes("vision") == 1500
            await store.hold("audio", [created.digest], "bob")
            await store.hold("audio", [created.digest], "bob")
            assert await store.holdings.used_bytes("audio") == 1500
            with refuses("QUOTA_EXCEEDED"):
                await send(store, b"x", "audio")

    async def test_a_project_s_own_limit_goes_before_the_server_s(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(project_bytes=1000)) as store:
            store.quotas.own_limit_bytes = {"default": 10}.get
            with refuses("QUOTA_EXCEEDED"):
                await send(store, os.urandom(11), "default")

    async def test_unfinished_uploads_count_but_not_twice(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(project_bytes=1000)) as store:
            data = os.urandom(900)
            await send(store, data[:500], announced=artifact_of(data))
            with refuses("QUOTA_EXCEEDED"):
                await send(store, os.urandom(501))
            assert (await store.receive(artifact_of(data), chunked(data[500:], 500), "vision", "ann")).complete
            assert await store.holdings.used_bytes("vision") == 900

    async def test_a_taken_result_makes_room_for_the_agent(self, golden: Golden, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(agent_bytes=1000)) as store:
            data = os.urandom(800)
            await send(store, data, "agent:pi")
            with golden.refuses("QUOTA_EXCEEDED"):
                await send(store, os.urandom(300), "agent:pi")
            await store.take_results("vision", [artifact_of(data).digest], "ann")
            assert await store.is_held(artifact_of(data).digest, ["vision"])
            assert await store.holdings.used_bytes("agent:pi") == 0
            assert await store.missing([artifact_of(data).digest], "agent:pi") == [], "it need not be sent again"
            assert await send(store, os.urandom(300), "agent:pi")

    async def test_an_agent_without_an_attempt_holds_little(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path, StoreLimits(agent_bytes=1000, idle_agent_bytes=100)) as store:
            busy = {"pi"}
            store.quotas.has_attempt = busy.__contains__
            assert await send(store, os.urandom(800), "agent:pi")
            with refuses("QUOTA_EXCEEDED"):
                await send(store, os.urandom(101), "agent:other")
            assert await send(store, os.urandom(100), "agent:other")
            busy.clear()
            with refuses("QUOTA_EXCEEDED"):
                await send(store, os.urandom(1), "agent:pi")

    async def test_uploads_without_a_result_expire_once_their_agent_has_been_without_an_attempt_for_long(
        self, tmp_path: Path, opened: Opened
    ) -> None:
        async with opened(tmp_path, StoreLimits(idle_agent_age_s=0.0)) as store:
            busy = {"pi"}
            store.quotas.has_attempt = busy.__contains__
            first, later = os.urandom(80), os.urandom(90)
            await send(store, first, "agent:pi")
            await store.expire()
            assert await store.has_for_now(artifact_of(first).digest)
            busy.clear()
            await store.expire()
            assert not await store.has_for_now(artifact_of(first).digest)
            await send(store, later, "agent:pi")
            await store.expire()
            assert await store.has_for_now(artifact_of(later).digest), "it came afterwards"

    async def test_what_no_result_ever_names_expires(self, tmp_path: Path, opened: Opened) -> None:
        async with opened(tmp_path) as store:
            orphan, shared, fresh = (os.urandom(100) for _ in range(3))
            for data in (orphan, shared):
                await send(store, data, "agent:pi")
            await send(store, shared, "vision")
            old = update(schema.holdings).values(held_at=datetime.now(UTC) - timedelta(days=8))
            await store.holdings._database.write(lambda connection: connection.execute(old))
            await send(store, fresh, "agent:pi")
            assert await store.holdings.used_bytes("agent:pi") == 300
            await store.expire()
            assert not await store.has_for_now(artifact_of(orphan).digest)
            assert await store.has_for_now(artifact_of(shared).digest) and await store.has_for_now(artifact_of(fresh).digest)
            assert await store.holdings.used_bytes("agent:pi") == 100

    async def test_the_sum_of_a_large_project_is_taken_once(self, tmp_path: Path, opened: Opened) -> None:
        database = CountingDatabase(tmp_path / "farm.sqlite")
        async with opened(tmp_path, StoreLimits(project_bytes=1 << 40), database) as store:
            await send(store, DATA)
            database.written.clear()
            for _ in range(3):
                await send(store, os.urandom(10))
            assert database.written
            assert not [name for name in database.written if "used_bytes" in name]


class TestIntegrity:
    async def test_a_file_is_verified_on_its_first_read_by_each_server(self, golden: Golden, tmp_path: Path) -> None:
        async with opened_files(tmp_path) as store:
            await send(store, DATA)
            await store.require_whole([DIGEST, "a" * 64])
        rot(tmp_path)
        async with opened_files(tmp_path) as store:
            with golden.refuses("ARTIFACT_DAMAGED"):
                await store.require_whole([DIGEST])
            with pytest.raises(ArtifactDamaged):
                store.path(DIGEST)
            assert not await store.has(DIGEST)
            assert await store.missing([DIGEST], "vision") == [DIGEST]
        async with opened_files(tmp_path) as store:
            with pytest.raises(ArtifactDamaged):
                store.path(DIGEST)
            with refuses("ARTIFACT_NOT_FOUND"):
                store.path("a" * 64)
            assert await send(store, DATA), "the upload heals it"
            assert store.path(DIGEST).read_bytes() == DATA
            await store.require_whole([DIGEST])

    @pytest.mark.parametrize("how", ["missing", "absent", "status", "upload", "read", "verify"])
    async def test_damage_is_detected_for_any_first_caller(self, tmp_path: Path, how: str) -> None:
        async with opened_files(tmp_path) as store:
            await send(store, DATA)
        rot(tmp_path)
        result: list[tuple[str, int]] = []
        async with opened_files(tmp_path) as store:
            store.integrity.on_damaged = lambda digest, size: result.append((digest, size))
            match how:
                case "missing":
                    assert await store.missing([DIGEST], "vision") == [DIGEST]
                case "absent":
                    assert await store.absent([DIGEST]) == [DIGEST]
                case "status":
                    assert not (await store.upload_status(DIGEST, "vision")).complete
                case "upload":
                    assert await send(store, DATA)
                case "read":
                    with pytest.raises(ArtifactDamaged):
                        assert [chunk async for chunk in store.chunks(DIGEST, 0)] == []
                case "verify":
                    assert [each async for row in store.verify() for each in row[3]] == [artifact_of(DATA)]
            assert result == [(DIGEST, len(DATA))]
            (kept,) = (tmp_path / "artifacts" / "quarantine").iterdir()
            assert kept.read_bytes()[1:] == DATA[1:]

    async def test_what_the_server_makes_again_heals_too(self, tmp_path: Path) -> None:
        async with opened_files(tmp_path) as store:
            await store.put(DATA, "ann")
        rot(tmp_path)
        async with opened_files(tmp_path) as store:
            assert await store.absent([DIGEST]) == [DIGEST]
            await store.put(DATA, "ann")
            assert await store.absent([DIGEST]) == []

    async def test_a_file_is_hashed_once_however_many_ask(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from etfarm.server.artifacts import integrity

        async with opened_files(tmp_path) as store:
            await send(store, DATA)
        hashed: list[Path] = []
        of_file = integrity.digests.of_file
        monkeypatch.setattr(integrity.digests, "of_file", lambda path: (hashed.append(path), of_file(path))[1])
        async with opened_files(tmp_path) as store:
            await asyncio.gather(*(store.require_whole([DIGEST, DIGEST]) for _ in range(20)))
            await store.require_whole([DIGEST])
        assert len(hashed) == 1

    async def test_many_files_are_looked_at_together(self, tmp_path: Path) -> None:
        async with opened_files(tmp_path) as store:
            created = [await store.put(os.urandom(8), "ann") for _ in range(250)]
        rot(tmp_path, created[17].digest)
        async with opened_files(tmp_path) as store:
            assert await store.absent([artifact.digest for artifact in created]) == [created[17].digest]


class TestThreads:
    async def test_neither_screening_nor_analysis_keeps_an_upload_waiting(self, tmp_path: Path, opened: Opened) -> None:
        """The threads that the rest of the daemon shares are all busy; before, an upload waited 63 s for one."""
        ended = threading.Event()
        loop = asyncio.get_running_loop()
        busy = [loop.run_in_executor(None, ended.wait, WAIT_S) for _ in range(64)]
        try:
            async with opened(tmp_path) as store, asyncio.timeout(WAIT_S / 2):
                assert await send(store, DATA)
                await store.put(os.urandom(100), "ann")
                await store.require_whole([DIGEST])
                assert b"".join([chunk.data async for chunk in store.chunks(DIGEST, 0)]) == DATA
        finally:
            ended.set()
            await asyncio.gather(*busy)

    async def test_transfers_that_wait_for_the_disk_do_not_keep_screening_waiting(self, tmp_path: Path, opened: Opened) -> None:
        ended = threading.Event()
        async with opened(tmp_path) as store, asyncio.timeout(WAIT_S):
            busy = [store._run(ended.wait, WAIT_S) for _ in range(64)]
            try:
                assert await asyncio.to_thread(lambda: 42) == 42
            finally:
                ended.set()
                await asyncio.gather(*busy)


async def test_holdings_outlive_the_server(tmp_path: Path, opened: Opened) -> None:
    async with opened(tmp_path) as store:
        await send(store, DATA)
    async with opened(tmp_path) as store:
        assert await store.missing([DIGEST], "vision") == []
        assert await store.holdings.used_bytes("vision") == len(DATA)
        rows = await store.holdings._database.read(lambda c: c.execute(text("SELECT holder FROM holdings")).scalars().all())
        assert rows == ["vision"]
