"""The artifact store: whole or absent, resumable, one writer an upload, and honest about its disk."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from etfarm.server.artifacts.store import ArtifactDamaged, DiskFull, Store
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.artifact_pb2 import Chunk, UploadStatus
from etfarm.v1.common_pb2 import Artifact
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import EtfarmError, Fault, Kind
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.stores import HeldUpload, Stores

DATA = bytes(range(256)) * 40
WAIT_S = 60.0


@pytest.fixture
async def store(tmp_path: Path, database: Database, stores: Stores) -> Store:
    created = stores.create(tmp_path / "artifacts", database)
    await created.open()
    return created


async def chunked(data: bytes, cuts: Sequence[int], offset: int = 0) -> AsyncIterator[Chunk]:
    """`data` in chunks that end at `cuts`, the first one at `offset`."""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield Chunk(offset=offset + start, data=data[start:end])


async def send(
    store: Store, data: bytes = DATA, *, cuts: Sequence[int] = (), offset: int = 0, artifact: Artifact | None = None
) -> UploadStatus:
    return await store.receive(artifact or artifact_of(DATA), chunked(data, cuts, offset), "vision", "ann")


async def read(store: Store, digest: str, offset: int = 0) -> bytes:
    return b"".join([chunk.data async for chunk in store.chunks(digest, offset)])


def status(committed: int, *, complete: bool) -> UploadStatus:
    return UploadStatus(digest=artifact_of(DATA).digest, committed_bytes=committed, complete=complete)


async def test_an_upload_is_stored_whole_read_only_and_recorded(store: Store, database: Database) -> None:
    digest = artifact_of(DATA).digest
    assert await store.missing([digest], "vision") == [digest]
    assert await store.upload_status(digest, "vision") == status(0, complete=False)
    assert await send(store, cuts=[10, 5000]) == status(len(DATA), complete=True)
    assert store.path(digest).read_bytes() == await read(store, digest) == DATA
    assert store.path(digest).stat().st_mode & 0o777 == 0o444
    assert await store.missing([digest], "vision") == []
    table = schema.artifacts
    rows = await database.read(lambda c: c.execute(select(table.c.digest, table.c.size_bytes, table.c.owner)).all())
    assert [tuple(row) for row in rows] == [(digest, len(DATA), "ann")]


@pytest.mark.parametrize("cut", [1, 4096, len(DATA) - 1])
async def test_a_broken_upload_goes_on_from_what_is_committed(
    store: Store, stores: Stores, tmp_path: Path, database: Database, cut: int
) -> None:
    assert await send(store, DATA[:cut]) == status(cut, complete=False)
    again = stores.create(tmp_path / "artifacts", database)  # as after a restart
    assert await again.upload_status(artifact_of(DATA).digest, "vision") == status(cut, complete=False)
    assert await send(again, DATA[cut:], offset=cut) == status(len(DATA), complete=True)
    assert await read(again, artifact_of(DATA).digest) == DATA


async def test_a_stream_that_breaks_keeps_what_came(store: Store) -> None:
    async def breaking() -> AsyncIterator[Chunk]:
        yield Chunk(offset=0, data=DATA[:100])
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await store.receive(artifact_of(DATA), breaking(), "vision", "ann")
    assert await store.upload_status(artifact_of(DATA).digest, "vision") == status(100, complete=False)
    assert (await send(store, DATA[100:], offset=100)).complete


@pytest.mark.remedy("CHUNK_OUT_OF_PLACE")
@pytest.mark.parametrize("offset", [0, 99, 101])
async def test_a_chunk_out_of_place_is_refused_and_what_is_committed_stays(golden: Golden, store: Store, offset: int) -> None:
    await send(store, DATA[:100])
    with golden.refuses("CHUNK_OUT_OF_PLACE") as refused:
        await send(store, DATA[100:], offset=offset)
    assert refused.value.kind is Kind.OUT_OF_RANGE
    assert refused.value.metadata["committed_bytes"] == "100"
    assert await store.upload_status(artifact_of(DATA).digest, "vision") == status(100, complete=False)
    assert (await send(store, DATA[100:], offset=100)).complete


@pytest.mark.remedy("DIGEST_MISMATCH")
async def test_other_bytes_of_the_same_size_are_discarded(golden: Golden, store: Store) -> None:
    with golden.refuses("DIGEST_MISMATCH") as refused:
        await send(store, DATA[::-1])
    assert refused.value.kind is Kind.DATA_LOSS
    assert await store.upload_status(artifact_of(DATA).digest, "vision") == status(0, complete=False)
    assert not await store.has(artifact_of(DATA).digest)
    assert (await send(store)).complete


async def test_a_part_that_rotted_on_the_disk_is_found_out(store: Store, tmp_path: Path) -> None:
    await send(store, DATA[:100])
    (part,) = (tmp_path / "artifacts" / "uploads").iterdir()
    part.write_bytes(bytes(100))
    with refuses("DIGEST_MISMATCH"):
        await send(store, DATA[100:], offset=100)


@pytest.mark.remedy("TOO_MANY_BYTES")
async def test_more_bytes_than_announced_are_refused(store: Store) -> None:
    with refuses("TOO_MANY_BYTES") as refused:
        await send(store, DATA + b"x", cuts=[5000])
    assert refused.value.kind is Kind.INVALID_ARGUMENT
    assert (await send(store, DATA[5000:], offset=5000)).complete


async def test_a_size_that_is_not_the_digests_is_not_stored(store: Store) -> None:
    artifact = Artifact(digest=artifact_of(DATA).digest, size_bytes=100)
    with refuses("DIGEST_MISMATCH"):
        await send(store, DATA[:100], artifact=artifact)
    assert not await store.has(artifact.digest)


async def test_nothing_is_an_artifact_too(store: Store) -> None:
    assert (await send(store, b"", artifact=artifact_of(b""))).complete
    assert await read(store, artifact_of(b"").digest) == b""


@pytest.mark.remedy("UPLOAD_IN_PROGRESS")
async def test_two_streams_of_one_upload_do_not_mix(store: Store) -> None:
    held = HeldUpload(DATA)
    first = asyncio.create_task(store.receive(artifact_of(DATA), held.chunks(), "vision", "ann"))
    async with asyncio.timeout(WAIT_S):
        await held.halts.wait()
        with refuses("UPLOAD_IN_PROGRESS") as refused:
            await send(store)
        assert refused.value.kind is Kind.ABORTED
        assert (await store.receive(artifact_of(DATA), chunked(DATA, []), "audio", "bob")).complete, "another holder's"
        held.may_go_on.set()
        assert (await first).complete
        assert (await send(store, b"")).complete, "what is stored needs no bytes"


async def test_a_stream_that_is_cancelled_lets_the_next_go_on(store: Store) -> None:
    held = HeldUpload(DATA)
    first = asyncio.create_task(store.receive(artifact_of(DATA), held.chunks(), "vision", "ann"))
    async with asyncio.timeout(WAIT_S):
        await held.halts.wait()
    first.cancel()
    await asyncio.wait([first])
    assert (await send(store, DATA[100:], offset=100)).complete


async def test_a_chunk_that_is_being_written_is_finished_before_its_stream_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread writes into whatever file gets the number next."""
    started, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    write, own_thread = os.write, threading.get_ident()

    def slow(fd: int, data: bytes) -> int:
        if threading.get_ident() != own_thread:
            loop.call_soon_threadsafe(started.set)
            gate.wait(WAIT_S)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)
    sending = asyncio.create_task(send(store, DATA[:100]))
    async with asyncio.timeout(WAIT_S):
        await started.wait()
        sending.cancel()
        _, pending = await asyncio.wait([sending], timeout=0.05)
        assert pending, "the stream has ended and its file is closed while the thread writes"
        with refuses("UPLOAD_IN_PROGRESS"):
            await send(store)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert await store.upload_status(artifact_of(DATA).digest, "vision") == status(100, complete=False)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel takes no byte beyond `size` into any file of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_reported_and_keeps_what_was_written(golden: Golden, store: Store) -> None:
    await store.missing([artifact_of(DATA).digest], "vision")  # the database's files are there before the limit
    with largest_file(1000), pytest.raises(DiskFull) as refused:
        await send(store, cuts=[500, 900])
    golden.check(refused.value)
    assert (refused.value.kind, refused.value.fault) == (Kind.RESOURCE_EXHAUSTED, Fault.FARM)
    assert await store.upload_status(artifact_of(DATA).digest, "vision") == status(1000, complete=False)
    assert (await send(store, DATA[1000:], offset=1000)).complete
    assert await read(store, artifact_of(DATA).digest) == DATA


@pytest.mark.parametrize("digest", ["", "abc", "A" * 64, "../../../etc/passwd", "a" * 63 + "/"])
async def test_what_is_no_digest_reaches_no_file(store: Store, digest: str) -> None:
    for attempt in (store.path, store.place):
        with pytest.raises(EtfarmError) as refused:
            attempt(digest)
        assert refused.value.reason == "DIGEST_MALFORMED"
    for asked in (
        store.has(digest),
        store.has_for_now(digest),
        store.upload_status(digest, "vision"),
        store.missing([digest], "vision"),
        store.is_held(digest, ["vision"]),
    ):
        with refuses("DIGEST_MALFORMED"):
            await asked
    with refuses("DIGEST_MALFORMED"):
        await send(store, artifact=Artifact(digest=digest, size_bytes=len(DATA)))
    with refuses("DIGEST_MALFORMED"):
        await read(store, digest)


@pytest.mark.remedy("ARTIFACT_NOT_FOUND", "OFFSET_PAST_END")
async def test_an_artifact_that_is_not_there_is_named(golden: Golden, store: Store) -> None:
    with golden.refuses("ARTIFACT_NOT_FOUND"):
        await read(store, "a" * 64)
    digest = artifact_of(DATA).digest
    with refuses("ARTIFACT_NOT_FOUND"):
        await read(store, digest)
    assert (await send(store)).complete
    assert await read(store, digest) == DATA
    for offset in (len(DATA) + 1, -1):
        with refuses("OFFSET_PAST_END"):
            await anext(store.chunks(digest, offset))
    assert (await anext(store.chunks(digest, len(DATA) - 1))).data == DATA[-1:]


async def test_large_artifacts_come_in_chunks_of_at_most_1_mib(store: Store) -> None:
    data = os.urandom(3 << 20)
    artifact = await store.put(data, "ann")
    got = [chunk async for chunk in store.chunks(artifact.digest, 7)]
    assert all(len(chunk.data) <= 1 << 20 for chunk in got)
    assert b"".join(chunk.data for chunk in got) == data[7:]
    assert [chunk.offset for chunk in got[1:]] == [chunk.offset + len(chunk.data) for chunk in got[:-1]]


async def test_putting_and_adopting_the_same_bytes_twice_is_one_artifact(store: Store, tmp_path: Path) -> None:
    one = await store.put(DATA, "ann", holder="vision")
    (tmp_path / "file").write_bytes(DATA)
    two = await store.adopt(tmp_path / "file", "bob")
    assert one == two == artifact_of(DATA)
    assert not (tmp_path / "file").exists()
    assert list((tmp_path / "artifacts" / "uploads").iterdir()) == []


async def test_an_upload_that_no_other_caller_knows_can_be_discarded(store: Store, database: Database) -> None:
    artifact = artifact_of(DATA)
    await send(store)
    assert await store.has_for_now(artifact.digest)
    await store.discard([artifact.digest, "a" * 64])
    assert not await store.has_for_now(artifact.digest)
    assert await database.read(lambda connection: connection.execute(select(schema.artifacts)).all()) == []
    await send(store)
    assert await read(store, artifact.digest) == DATA, "it can come again"


@pytest.mark.parametrize("how", ["has", "missing", "upload_status", "upload", "adopt", "restart"])
async def test_what_somebody_else_may_refer_to_is_not_discarded(
    store: Store, stores: Stores, database: Database, tmp_path: Path, how: str
) -> None:
    wanted = artifact_of(DATA).digest
    await send(store)
    match how:
        case "has":
            assert await store.has(wanted)
        case "missing":
            assert await store.missing([wanted], "vision") == []
        case "upload_status":
            assert (await store.upload_status(wanted, "vision")).complete
        case "upload":
            await send(store)
        case "adopt":
            await store.put(DATA, "ann", holder="vision")
        case "restart":
            store = stores.create(tmp_path / "artifacts", database)
    await store.discard([wanted])
    assert await read(store, wanted) == DATA


async def test_the_server_gives_holders_what_is_stored(store: Store) -> None:
    artifact = await store.put(DATA, "ann", holder="vision")
    await store.hold("audio", [artifact.digest, "a" * 64], "bob")
    assert await store.missing([artifact.digest, "a" * 64], "audio") == ["a" * 64]
    assert not await store.is_held("a" * 64, ["audio"])


async def test_what_a_holder_has_for_now_can_still_be_discarded(store: Store, database: Database) -> None:
    artifact = artifact_of(DATA)
    await send(store)
    await store.hold("audio", [artifact.digest], "bob", for_now=True)
    assert await store.is_held(artifact.digest, ["audio"])
    await store.discard([artifact.digest])
    assert not await store.is_held(artifact.digest, ["audio"])
    assert await database.read(lambda connection: connection.execute(select(schema.holdings)).all()) == []


@pytest.mark.remedy("ARTIFACT_DAMAGED")
async def test_what_the_database_names_and_nobody_can_read_is_the_farms_fault_and_named(store: Store, stores: Stores) -> None:
    kept, lost = [await store.put(data, "ann") for data in (b"kept", DATA)]
    await stores.lose(store, lost.digest)
    with pytest.raises(ArtifactDamaged) as raised:
        await anext(store.chunks(lost.digest, 0))
    assert raised.value.fault is Fault.FARM
    for _ in range(2):
        rows = [row async for row in store.verify()]
        assert [artifact for row in rows for artifact in row[3]] == [lost]
        assert rows[-1][:2] == (2, 2)
    # The remedy.
    await store.put(DATA, "ann")
    assert b"".join([chunk.data async for chunk in store.chunks(lost.digest, 0)]) == DATA
    assert [artifact async for row in store.verify() for artifact in row[3]] == []
    assert await store.find_lost([kept.digest, lost.digest]) == []


async def test_a_lost_file_is_known_without_a_verification(store: Store, stores: Stores) -> None:
    lost = await store.put(DATA, "ann")
    unknown = artifact_of(b"never stored").digest
    await stores.lose(store, lost.digest)
    with pytest.raises(ArtifactDamaged):
        await store.require_whole([unknown, lost.digest])
    assert await store.find_lost([unknown, lost.digest]) == [lost.digest]


async def test_a_deletion_is_no_loss(store: Store) -> None:
    artifact = await store.put(DATA, "ann")
    assert store.blobs.withdraw(artifact.digest)
    await store.require_whole([artifact.digest])
    assert [each async for row in store.verify() for each in row[3]] == []
    store.blobs.restore([artifact.digest])
    assert await store.remove([artifact.digest], unused_since_s=1e18) == {artifact.digest}
    with refuses("ARTIFACT_NOT_FOUND"):
        await anext(store.chunks(artifact.digest, 0))
