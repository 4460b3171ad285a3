"""Artifacts over real streams: resumable both ways, verified on both ends, refused as the contract says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.store import MAX_CHUNK_BYTES, Store
from etfarm.server.jobs.records.verification import find_damaged
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.references import References
from etfarm.server.rpc.door.interceptor import AuthErrorInterceptor
from etfarm.server.rpc.services.artifacts import ArtifactService
from etfarm.server.state.backup_lock import BackupLock
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import artifact_pb2, artifact_pb2_grpc
from etfarm.v1.artifact_pb2 import Chunk, UploadArtifactRequest, UploadHeader, UploadStatus
from etfarm.v1.common_pb2 import Artifact
from etfarm.wire import chunks, status
from etfarm.wire.channel import SERVER_OPTIONS, Access, open_channel
from etfarm.wire.chunks import CHUNK_BYTES, CorruptDownload, artifact_of
from etfarm.wire.errors import EtfarmError
from tests.support.authentications import authentication
from tests.support.refusals import refusal

DATA = os.urandom(3 * CHUNK_BYTES + 12_345)
ARTIFACT = artifact_of(DATA)
WAIT_S = 60.0


class Served:
    """A store behind a port."""

    def __init__(self, store: Store, stub: artifact_pb2_grpc.ArtifactServiceAsyncStub) -> None:
        self.store = store
        self.stub = stub

    async def status(self, digest: str = ARTIFACT.digest) -> UploadStatus:
        return await self.stub.GetUploadStatus(artifact_pb2.GetUploadStatusRequest(digest=digest))

    async def upload_error(self, *requests: UploadArtifactRequest) -> EtfarmError:
        return await refusal(self.stub.Upload(stream_of(requests)))


async def needed_by_no_agent(principal: str, digest: str) -> bool:
    """Every caller here is an admin."""
    return False


@asynccontextmanager
async def serving(folder: Path, limits: StoreLimits | None = None) -> AsyncIterator[Served]:
    database = SqliteDatabase(folder / "farm.sqlite")
    await database.open()
    store = Store(folder / "artifacts", database, limits)
    server = grpc.aio.server(interceptors=[AuthErrorInterceptor(authentication(folder))], options=SERVER_OPTIONS)
    references = References(database, MeasurementLock().work)
    collection = ArtifactCollection(store, database, references, lambda: (), BackupLock(folder))
    service = ArtifactService(store, needed_by_no_agent, collection, lambda: find_damaged(database))
    artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(Access(f"127.0.0.1:{port}")) as channel:
        yield Served(store, artifact_pb2_grpc.ArtifactServiceStub(channel))  # type: ignore[arg-type]
    await server.stop(None)
    store.close()
    database.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as created:
        yield created


async def stream_of(requests: Sequence[UploadArtifactRequest]) -> AsyncIterator[UploadArtifactRequest]:
    for request in requests:
        yield request


def header(artifact: Artifact = ARTIFACT) -> UploadArtifactRequest:
    return UploadArtifactRequest(header=UploadHeader(artifact=artifact))


def chunk(offset: int, data: bytes) -> UploadArtifactRequest:
    return UploadArtifactRequest(chunk=Chunk(offset=offset, data=data))


@pytest.mark.parametrize("from_file", [False, True])
async def test_an_uploaded_artifact_can_be_downloaded(served: Served, tmp_path: Path, from_file: bool) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    reported: list[tuple[int, int]] = []
    assert await chunks.artifact_of_file(path) == ARTIFACT
    await chunks.upload(served.stub, ARTIFACT, path if from_file else DATA, on_progress=lambda *done: reported.append(done))
    assert reported[-1] == (len(DATA), len(DATA))
    assert (await served.status()).complete
    assert await chunks.download_bytes(served.stub, ARTIFACT) == DATA


async def test_missing_artifacts_are_requested_in_order(served: Served) -> None:
    await served.store.put(DATA, "ann")
    wanted = ["f" * 64, ARTIFACT.digest, "0" * 64]
    answer = await served.stub.FindMissing(artifact_pb2.FindMissingArtifactsRequest(digests=wanted))
    assert list(answer.missing) == ["f" * 64, "0" * 64]


async def test_an_interrupted_upload_resumes_at_the_committed_bytes(served: Served) -> None:
    call = served.stub.Upload()
    await call.write(header())
    await call.write(chunk(0, DATA[:1000]))
    async with asyncio.timeout(WAIT_S):
        while (await served.status()).committed_bytes < 1000:  # each turn is a round trip
            pass
    call.cancel()
    sent: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while True:  # until the server has noticed the cut
            try:
                await chunks.upload(served.stub, ARTIFACT, DATA, on_progress=lambda done, _: sent.append(done))
                break
            except grpc.aio.AioRpcError as error:
                assert status.from_rpc_error(error, server="").reason == "UPLOAD_IN_PROGRESS"
                sent.clear()
    assert sent[0] == 1000 + CHUNK_BYTES
    assert await chunks.download_bytes(served.stub, ARTIFACT) == DATA


async def test_an_upload_of_a_stored_artifact_returns_without_reading_data(served: Served) -> None:
    await served.store.put(DATA, "ann")
    call = served.stub.Upload()
    await call.write(header())
    async with asyncio.timeout(WAIT_S):
        answer = await call
    assert answer.complete


@pytest.mark.remedy("NO_HEADER", "BAD_UPLOAD")
async def test_an_upload_begins_with_a_single_header(served: Served) -> None:
    assert (await served.upload_error(header(), chunk(0, DATA[:5]), header())).reason == "BAD_UPLOAD"
    assert (await served.status()).committed_bytes == 5
    await chunks.upload(served.stub, ARTIFACT, DATA)
    assert (await served.status()).committed_bytes == len(DATA)


ABC = header(artifact_of(b"abc"))
ABSURD = {size: header(Artifact(digest="a" * 64, size_bytes=size)) for size in ((16 << 30) + 1, (1 << 63) - 1, -1, -(1 << 63))}


@pytest.mark.parametrize(
    ("requests", "reason", "kind", "metadata"),
    [
        ([], "NO_HEADER", "INVALID_ARGUMENT", {}),
        ([UploadArtifactRequest()], "NO_HEADER", "INVALID_ARGUMENT", {}),
        ([chunk(0, DATA)], "NO_HEADER", "INVALID_ARGUMENT", {}),
        ([ABC, ABC], "BAD_UPLOAD", "INVALID_ARGUMENT", {}),
        ([ABC, UploadArtifactRequest()], "BAD_UPLOAD", "INVALID_ARGUMENT", {}),
        ([ABC, chunk(7, b"abc")], "CHUNK_OUT_OF_PLACE", "OUT_OF_RANGE", {"committed_bytes": "0"}),
        ([ABC, chunk(-1, b"abc")], "CHUNK_OUT_OF_PLACE", "OUT_OF_RANGE", {"committed_bytes": "0"}),
        ([ABC, chunk(0, b"abd")], "DIGEST_MISMATCH", "DATA_LOSS", {}),
        ([ABC, chunk(0, b"abcd")], "TOO_MANY_BYTES", "INVALID_ARGUMENT", {}),
        ([header(), chunk(0, bytes(MAX_CHUNK_BYTES + 1))], "TOO_MANY_BYTES", "INVALID_ARGUMENT", {}),
        ([header(Artifact(digest="ABC", size_bytes=3))], "DIGEST_MALFORMED", "INVALID_ARGUMENT", {}),
        *(
            ([request], "LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED", {"limit_bytes": str(16 << 30)}) if size > 0
            else ([request], "BAD_UPLOAD", "INVALID_ARGUMENT", {})
            for size, request in ABSURD.items()
        ),
    ],
    ids=range(15),
)  # fmt: skip
async def test_uploads_are_refused_as_the_contract_says(
    served: Served, requests: list[UploadArtifactRequest], reason: str, kind: str, metadata: dict[str, str]
) -> None:
    error = await served.upload_error(*requests)
    assert (error.reason, error.kind) == (reason, kind)
    assert metadata.items() <= error.metadata.items()
    await chunks.upload(served.stub, artifact_of(b"abc"), b"abc")


async def test_an_upload_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, StoreLimits(artifact_bytes=1 << 62)) as served:
        error = await served.upload_error(header(Artifact(digest="a" * 64, size_bytes=1 << 60)))
    assert (error.reason, error.kind, error.fault) == ("DISK_FULL", "RESOURCE_EXHAUSTED", "FARM")
    assert {"free_bytes", "needed_bytes"} <= set(error.metadata)


async def test_a_second_stream_of_an_upload_is_refused_with_a_retry(served: Served) -> None:
    first = served.stub.Upload()
    await first.write(header())
    await first.write(chunk(0, DATA[:1000]))
    async with asyncio.timeout(WAIT_S):
        while (await served.status()).committed_bytes < 1000:
            pass
        error = await served.upload_error(header())
        assert (error.reason, error.kind) == ("UPLOAD_IN_PROGRESS", "ABORTED")
        for start in range(1000, len(DATA), MAX_CHUNK_BYTES):
            await first.write(chunk(start, DATA[start : start + MAX_CHUNK_BYTES]))
        await first.done_writing()
        assert (await first).complete


@pytest.mark.parametrize("digests", [["abc"], ["A" * 64], ["a" * 64] * 10_001])
async def test_bad_digests_are_refused(served: Served, digests: list[str]) -> None:
    error = await refusal(served.stub.FindMissing(artifact_pb2.FindMissingArtifactsRequest(digests=digests)))
    assert (error.reason, error.kind) == ("DIGEST_MALFORMED", "INVALID_ARGUMENT")
    assert error.fault == "USER"


async def download_error(served: Served, digest: str, offset: int) -> EtfarmError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in served.stub.Download(artifact_pb2.DownloadArtifactRequest(digest=digest, offset=offset)):
            pass
    return status.from_rpc_error(failed.value, server="here")


async def test_downloads_are_refused_as_the_contract_says(served: Served) -> None:
    await served.store.put(DATA, "ann")
    error = await download_error(served, "a" * 64, 0)
    assert (error.reason, error.kind) == ("ARTIFACT_NOT_FOUND", "NOT_FOUND")
    error = await download_error(served, ARTIFACT.digest, len(DATA) + 1)
    assert (error.reason, error.kind) == ("OFFSET_PAST_END", "OUT_OF_RANGE")


@pytest.mark.parametrize("have", [0, 1, CHUNK_BYTES, len(DATA)])
async def test_a_download_resumes_at_its_partial_file(served: Served, tmp_path: Path, have: int) -> None:
    await served.store.put(DATA, "ann")
    target = tmp_path / "got"
    target.with_name("got.part").write_bytes(DATA[:have])
    reported: list[int] = []
    await chunks.download(served.stub, ARTIFACT, target, on_progress=lambda done, _: reported.append(done))
    assert target.read_bytes() == DATA
    assert sum(1 for _ in reported) == len(list(chunks.spans(have, len(DATA))))
    assert not target.with_name("got.part").exists()


async def test_a_damaged_partial_file_is_detected_and_downloaded_from_0(served: Served, tmp_path: Path) -> None:
    await served.store.put(DATA, "ann")
    target = tmp_path / "got"
    target.with_name("got.part").write_bytes(bytes(1000))
    with pytest.raises(CorruptDownload):
        await chunks.download(served.stub, ARTIFACT, target)
    assert not target.exists() and not target.with_name("got.part").exists()
    await chunks.download(served.stub, ARTIFACT, target)
    assert target.read_bytes() == DATA


async def test_an_overlong_partial_file_is_discarded(served: Served, tmp_path: Path) -> None:
    await served.store.put(DATA, "ann")
    target = tmp_path / "got"
    target.with_name("got.part").write_bytes(DATA + b"more")
    await chunks.download(served.stub, ARTIFACT, target)
    assert target.read_bytes() == DATA


def damage(path: Path) -> None:
    """Flip the last bit of a stored file."""
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("size", [0, len(DATA) - 1])
async def test_damaged_bytes_of_the_store_are_not_sent(served: Served, tmp_path: Path, size: int) -> None:
    await served.store.put(DATA, "ann")
    damage(served.store.path(ARTIFACT.digest))
    error = await download_error(served, ARTIFACT.digest, size)
    assert (error.reason, error.kind, error.fault) == ("ARTIFACT_DAMAGED", "FAILED_PRECONDITION", "FARM")
    assert "upload" in error.remedy and error.metadata["digest"] == ARTIFACT.digest
    assert [path.name.partition(".")[0] for path in (tmp_path / "artifacts" / "quarantine").iterdir()] == [ARTIFACT.digest]
    # It stays the reason until the artifact is healed, and after a restart too.
    assert (await download_error(served, ARTIFACT.digest, 0)).reason == "ARTIFACT_DAMAGED"
    await chunks.upload(served.stub, ARTIFACT, DATA)
    assert await chunks.download_bytes(served.stub, ARTIFACT) == DATA


async def test_a_damaged_artifact_is_requested_again(served: Served) -> None:
    await served.store.put(DATA, "ann")
    damage(served.store.path(ARTIFACT.digest))
    answer = await served.stub.FindMissing(artifact_pb2.FindMissingArtifactsRequest(digests=[ARTIFACT.digest]))
    assert list(answer.missing) == [ARTIFACT.digest]


async def test_verify_reads_all_artifacts_and_names_damaged_ones(served: Served) -> None:
    artifacts = [await served.store.put(os.urandom(1000), "ann") for _ in range(5)]
    damage(served.store.path(artifacts[3].digest))
    reported = [progress async for progress in served.stub.Verify(artifact_pb2.VerifyArtifactsRequest())]
    assert (reported[-1].done, reported[-1].total, reported[-1].done_bytes) == (5, 5, 5000)
    assert [artifact for progress in reported for artifact in progress.damaged] == [artifacts[3]]
    again = [progress async for progress in served.stub.Verify(artifact_pb2.VerifyArtifactsRequest())]
    assert (again[-1].total, list(again[-1].damaged)) == (5, [artifacts[3]]), "as long as the database names it"


async def test_the_list_is_paged_newest_first(served: Served) -> None:
    artifacts = [await served.store.put(os.urandom(10), "ann", holder=f"p{number % 2}") for number in range(7)]
    await served.store.put(b"of an agent", "pi", holder="agent:pi")
    listed: list[artifact_pb2.StoredArtifact] = []
    token, pages = "", 0
    while True:
        page = await served.stub.List(artifact_pb2.ListArtifactsRequest(page_size=3, page_token=token))
        listed += page.artifacts
        pages += 1
        if not (token := page.next_page_token):
            break
    assert pages == 3
    assert [row.artifact for row in listed] == artifacts[::-1]
    assert {row.project for row in listed} == {"p0", "p1"} and {row.owner for row in listed} == {"ann"}


@pytest.mark.parametrize("token", ["x", "bm9uZQ==", "W10=", "WyIyMDI1IiwgMSwgMl0=" * 2])
async def test_a_forged_page_token_is_refused(served: Served, token: str) -> None:
    error = await refusal(served.stub.List(artifact_pb2.ListArtifactsRequest(page_token=token)))
    assert (error.reason, error.kind) == ("BAD_PAGE_TOKEN", "INVALID_ARGUMENT")


@pytest.mark.remedy("UPLOAD_IDLE")
async def test_a_silent_upload_times_out_and_keeps_its_bytes(tmp_path: Path) -> None:
    async with serving(tmp_path, StoreLimits(upload_idle_s=0.3)) as served:
        silent = served.stub.Upload()
        await silent.write(header())
        await silent.write(chunk(0, DATA[:1000]))
        async with asyncio.timeout(WAIT_S):
            error = await refusal(silent)
        assert (error.reason, error.kind, error.metadata["committed_bytes"]) == ("UPLOAD_IDLE", "ABORTED", "1000")
        await chunks.upload(served.stub, ARTIFACT, DATA)
        nothing = served.stub.Upload()
        async with asyncio.timeout(WAIT_S):
            assert (await refusal(nothing)).reason == "NO_HEADER"


async def test_an_unread_download_frees_its_slot(tmp_path: Path) -> None:
    async with serving(tmp_path, StoreLimits(downloads=1, download_idle_s=0.3)) as served:
        big = await served.store.put(os.urandom(40 << 20), "ann")
        stuck = served.stub.Download(artifact_pb2.DownloadArtifactRequest(digest=big.digest))
        assert (await stuck.read()).offset == 0
        async with asyncio.timeout(WAIT_S):
            small = await served.store.put(b"small", "ann")
            assert await chunks.download_bytes(served.stub, small) == b"small"
        stuck.cancel()
