"""The agent's cache against a real artifact stream: verified, resumed, bounded, one fetch at a time."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc
import pytest

from etfarm.device_agents.attempts.cache import DOWNLOADS, Cache, Lease
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.errors import DiskFull
from etfarm.server.rpc.door.calls import MAX_UNREAD
from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.bundles import BundledFile, BundleManifest
from etfarm.wire.chunks import CorruptDownload, artifact_of
from etfarm.wire.errors import Fault
from tests.support.fake_servers import serving
from tests.support.receivers import Answer, receiver, status
from tests.support.refusals import refuses


class Store(artifact_pb2_grpc.ArtifactServiceServicer):
    """Blobs, and the offsets that were requested."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []
        self.cut_after: int | None = None
        self.link: artifact_pb2.ArtifactLink | None = None
        self.received: dict[str, bytes] = {}
        self.downloads = self.most_downloads = 0
        """Numbers of downloads in progress, now and at most."""
        self.awaited_downloads = 1
        """Number of downloads that must be in progress before the first one ends."""
        self.enough = asyncio.Event()

    def put(self, data: bytes) -> common_pb2.Artifact:
        artifact = artifact_of(data)
        self.blobs[artifact.digest] = data
        return artifact

    async def Download(self, request: artifact_pb2.DownloadArtifactRequest, context: Any) -> AsyncIterator[artifact_pb2.Chunk]:
        self.asked.append((request.digest, request.offset))
        if request.digest not in self.blobs:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such artifact")
        if request.accepts_link and self.link is not None:
            yield artifact_pb2.Chunk(offset=request.offset, link=self.link)
            return
        data = self.blobs[request.digest]
        self.downloads += 1
        self.most_downloads = max(self.most_downloads, self.downloads)
        if self.downloads == self.awaited_downloads:
            self.enough.set()
        async with asyncio.timeout(60):
            await self.enough.wait()
        await asyncio.sleep(0.05)  # others may come
        self.downloads -= 1
        for start in range(request.offset, len(data), 1000):
            if self.cut_after is not None and start >= self.cut_after:
                self.cut_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield artifact_pb2.Chunk(offset=start, data=data[start : start + 1000])

    async def FindMissing(
        self, request: artifact_pb2.FindMissingArtifactsRequest, context: Any
    ) -> artifact_pb2.FindMissingArtifactsResponse:
        return artifact_pb2.FindMissingArtifactsResponse(missing=[name for name in request.digests if name not in self.blobs])

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: Any) -> artifact_pb2.UploadStatus:
        return artifact_pb2.UploadStatus(digest=request.digest, committed_bytes=len(self.received.get(request.digest, b"")))

    async def Upload(self, request_iterator: Any, context: Any) -> artifact_pb2.UploadStatus:
        digest = (await anext(request_iterator)).header.artifact.digest
        async for request in request_iterator:
            have = self.received.get(digest, b"")
            assert request.chunk.offset == len(have)
            self.received[digest] = have + request.chunk.data
            if self.cut_after is not None:
                self.cut_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        self.blobs[digest] = self.received[digest]
        return artifact_pb2.UploadStatus(digest=digest, complete=True)


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def transfers(store: Store) -> AsyncIterator[Transfers]:
    async with serving(store) as address, grpc.aio.insecure_channel(address) as channel:
        yield Transfers(artifact_pb2_grpc.ArtifactServiceStub(channel), at_once)


@pytest.fixture
def lease(transfers: Transfers, tmp_path: Path) -> Iterator[Lease]:
    with Cache(tmp_path, 4 << 20).lease(transfers) as lease:
        yield lease


def at_once() -> Iterator[float]:
    while True:
        yield 0.0


async def test_an_artifact_is_fetched_once(store: Store, transfers: Transfers, tmp_path: Path) -> None:
    artifact = store.put(b"program" * 1000)
    cache = Cache(tmp_path, 1 << 20)
    with cache.lease(transfers) as lease:
        paths = await asyncio.gather(*(lease.fetch(artifact) for _ in range(5)))
        assert {path.read_bytes() for path in paths} == {b"program" * 1000}
    with cache.lease(transfers) as lease:
        await lease.fetch(artifact)
    assert store.asked == [(artifact.digest, 0)]


async def test_downloads_take_turns(store: Store, lease: Lease) -> None:
    artifacts = [store.put(os.urandom(100)) for _ in range(3 * DOWNLOADS)]
    store.awaited_downloads = DOWNLOADS
    await asyncio.gather(*(lease.fetch(artifact) for artifact in artifacts))
    assert store.most_downloads == DOWNLOADS < MAX_UNREAD, "else the server would close the agent's connection"


async def test_a_cut_download_goes_on_where_it_was(store: Store, lease: Lease) -> None:
    artifact = store.put(os.urandom(10_000))
    store.cut_after = 4000
    assert (await lease.fetch(artifact)).read_bytes() == store.blobs[artifact.digest]
    assert store.asked == [(artifact.digest, 0), (artifact.digest, 4000)]


SECRET = "?X-Amz-Signature=0123456789abcdef"


def s3(data: bytes, cut_after: int | None = None) -> Answer:
    """Answer as an S3 server that has these bytes; `cut_after` breaks off after as many."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.end_headers()
        request.wfile.write(data[start:cut_after])

    return answer


async def test_a_link_is_followed_and_goes_on_where_an_earlier_download_was(
    store: Store, transfers: Transfers, tmp_path: Path
) -> None:
    first, second = store.put(os.urandom(10_000)), store.put(os.urandom(10_000))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"{second.digest}.part").write_bytes(store.blobs[second.digest][:3000])
    cache = Cache(tmp_path, 1 << 20)
    for artifact, start in ((first, None), (second, "bytes=3000-")):
        with receiver(s3(store.blobs[artifact.digest])) as bucket, cache.lease(transfers) as lease:
            store.link = artifact_pb2.ArtifactLink(url=bucket.url(f"/key{SECRET}"))
            assert (await lease.fetch(artifact)).read_bytes() == store.blobs[artifact.digest]
            assert bucket.requests.get_nowait().headers.get("Range") == start
    assert store.asked == [(first.digest, 0), (second.digest, 3000)]


@pytest.mark.parametrize(
    ("answer", "resumed_at"),
    [
        (status(403), 0), (status(302, Location="http://127.0.0.1/"), 0), (s3(bytes(2 << 20)), 0),
        (s3(os.urandom(2 << 20), cut_after=1 << 20), 1 << 20),
    ],
    ids=["refused", "redirected", "other bytes", "cut"],
)  # fmt: skip
async def test_what_a_link_does_not_yield_comes_through_the_server(
    store: Store, lease: Lease, caplog: pytest.LogCaptureFixture, answer: Answer, resumed_at: int
) -> None:
    artifact, other = store.put(os.urandom(2 << 20)), store.put(b"other" * 1000)
    if resumed_at:  # what arrived before the cut was right
        answer = s3(store.blobs[artifact.digest], cut_after=resumed_at)
    with receiver(answer) as bucket:
        store.link = artifact_pb2.ArtifactLink(url=bucket.url(f"/key{SECRET}"))
        assert (await lease.fetch(artifact)).read_bytes() == store.blobs[artifact.digest]
        assert store.asked == [(artifact.digest, 0), (artifact.digest, resumed_at)]
        assert (await lease.fetch(other)).read_bytes() == store.blobs[other.digest]
        assert bucket.requests.qsize() == 1, "after a failure, no link is followed for a while"
    assert "it comes through the server" in caplog.text
    assert "Signature" not in caplog.text


@pytest.mark.parametrize("url", ["file:///etc/hostname", "http://192.0.2.1/key", "http://localhost.example/", "https://a b/", ""])
async def test_a_hostile_link_is_not_followed(store: Store, lease: Lease, url: str) -> None:
    artifact = store.put(b"program" * 1000)
    store.link = artifact_pb2.ArtifactLink(url=url)
    assert (await lease.fetch(artifact)).read_bytes() == store.blobs[artifact.digest]
    assert store.asked == [(artifact.digest, 0)] * 2


async def test_a_file_that_was_damaged_meanwhile_is_fetched_again(store: Store, transfers: Transfers, tmp_path: Path) -> None:
    artifact = store.put(b"x" * 5000)
    with Cache(tmp_path, 1 << 20).lease(transfers) as lease:
        path = await lease.fetch(artifact)
    path.write_bytes(b"y" + b"x" * 4999)
    for _ in range(2):
        with Cache(tmp_path, 1 << 20).lease(transfers) as lease:  # as the next process would
            assert (await lease.fetch(artifact)).read_bytes() == b"x" * 5000
    assert len(store.asked) == 2


async def test_wrong_bytes_are_never_kept(store: Store, lease: Lease, tmp_path: Path) -> None:
    artifact = store.put(b"good")
    store.blobs[artifact.digest] = b"evil"
    with pytest.raises(CorruptDownload):
        await lease.fetch(artifact)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    store.blobs[artifact.digest] = b"good"
    assert (await lease.fetch(artifact)).read_bytes() == b"good"


async def test_the_longest_unused_go_when_the_limit_is_passed(store: Store, transfers: Transfers, tmp_path: Path) -> None:
    artifacts = [store.put(bytes([number]) * 1000) for number in range(4)]
    cache = Cache(tmp_path, 3000)
    for artifact in [*artifacts[:3], artifacts[0]]:
        with cache.lease(transfers) as lease:
            await lease.fetch(artifact)
    store.asked.clear()
    with cache.lease(transfers) as lease:
        await lease.fetch(artifacts[3])
        for artifact in (artifacts[0], artifacts[2], artifacts[3]):
            await lease.fetch(artifact)
    assert [digest for digest, _ in store.asked] == [artifacts[3].digest], "only the second one had to go"


async def test_what_a_run_holds_stays_whatever_the_limit(store: Store, transfers: Transfers, tmp_path: Path) -> None:
    artifacts = [store.put(bytes([number]) * 1000) for number in range(3)]
    cache = Cache(tmp_path, 1500)
    with cache.lease(transfers) as lease:
        paths = [await lease.fetch(artifact) for artifact in artifacts]
        assert all(path.exists() for path in paths)
    assert [path.exists() for path in paths] == [False, False, True]


async def test_an_artifact_that_is_not_there_is_not_asked_for_again(store: Store, lease: Lease) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lease.fetch(artifact_of(b"unknown"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with refuses("DIGEST_MALFORMED"):
        await lease.fetch(common_pb2.Artifact(digest="../../etc/passwd", size_bytes=1))
    assert len(store.asked) == 1


async def test_a_cut_upload_goes_on_where_it_was(store: Store, transfers: Transfers, tmp_path: Path) -> None:
    data = os.urandom(3 << 19)
    path = tmp_path / "trace.etdp"
    path.write_bytes(data)
    store.cut_after = 1
    artifact = await transfers.upload(path)
    assert store.blobs[artifact.digest] == data
    assert await transfers.upload(data) == artifact


def bundle_archive(entry: bytes = b"runner") -> bytes:
    """Return a bundle that nothing is started from; its manifest is right about b"runner" only."""
    member = BundledFile(digests.of_bytes(b"runner"), 6)
    manifest = BundleManifest("x86_64", "1.5.1", "s", (), (), {"runner": member}, loader="runner", entry="runner")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in (("bundle.json", json.dumps(manifest.to_json()).encode()), ("runner", entry)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("archive_is_whole", [True, False], ids=["alone", "with its archive"])
async def test_a_bundle_that_was_damaged_is_unpacked_or_fetched_again(
    store: Store, lease: Lease, tmp_path: Path, archive_is_whole: bool
) -> None:
    artifact = store.put(bundle_archive())
    bundle = await lease.open_bundle(artifact)
    (bundle.folder / "runner").write_bytes(b"runnex")
    if not archive_is_whole:
        (tmp_path / "blobs" / artifact.digest).write_bytes(b"x")
    assert await lease.open_bundle(artifact) == bundle
    assert (bundle.folder / "runner").read_bytes() == b"runner"
    assert len(store.asked) == (1 if archive_is_whole else 2)


@pytest.mark.parametrize("data", [b"no archive", bundle_archive(b"runnex")])
async def test_a_bundle_that_cannot_be_unpacked_is_never_the_users_fault(
    store: Store, lease: Lease, tmp_path: Path, data: bytes
) -> None:
    artifact = store.put(data)
    for _ in range(2):
        with refuses("DEVICE_BUNDLE_UNUSABLE") as failed:
            await lease.open_bundle(artifact)
    assert failed.value.fault is Fault.DEVICE
    assert list((tmp_path / "bundles").iterdir()) == []


@pytest.mark.remedy("DEVICE_BUNDLE_UNUSABLE", "DEVICE_DISK_FULL")
@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, DiskFull.reason), (errno.EIO, "DEVICE_BUNDLE_UNUSABLE")])
async def test_a_disk_that_takes_no_bundle_is_the_devices_fault(
    store: Store, lease: Lease, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    artifact = store.put(bundle_archive())
    monkeypatch.setattr("etfarm.device_agents.runners.bundle.shutil.copyfileobj", fail)
    with refuses(reason):
        await lease.open_bundle(artifact)
    monkeypatch.undo()
    assert (await lease.open_bundle(artifact)).manifest.entry == "runner"
