"""Attacks on a real server's artifacts: reading by digest, poisoned and silent uploads, sizes that are only announced."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from etfarm.v1 import artifact_pb2
from etfarm.v1.artifact_pb2 import Chunk, UploadArtifactRequest, UploadHeader
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.v1.common_pb2 import Artifact
from etfarm.wire import chunks, status
from etfarm.wire.chunks import artifact_of
from tests.support.farm import FarmProcess
from tests.support.farm_calls import open_channels
from tests.support.refusals import refusal

WAIT_S = 60.0
TOKENS = {name: f"{name}-token-of-24-characters" for name in ("root", "ann", "pi", "mole")}
ROLES = {"root": "admin", "ann": "user", "pi": "agent", "mole": "agent"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server with four principals and 1 GiB for each project."""
    folder = tmp_path_factory.mktemp("attacked")
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{name} {ROLES[name]} {token}\n" for name, token in TOKENS.items()))
    tokens.chmod(0o600)
    with FarmProcess(folder, bundle=False, serve=["--tokens", str(tokens), "--project-storage-gib", "1"]) as farm:
        farm.restart()
        yield farm


class Caller:
    """One principal's connection."""

    def __init__(self, stub: ArtifactServiceStub) -> None:
        self.stub = stub

    async def missing(self, *artifacts: Artifact) -> list[str]:
        digests = [artifact.digest for artifact in artifacts]
        return list((await self.stub.FindMissing(artifact_pb2.FindMissingArtifactsRequest(digests=digests))).missing)

    async def status(self, artifact: Artifact) -> tuple[int, bool]:
        answer = await self.stub.GetUploadStatus(artifact_pb2.GetUploadStatusRequest(digest=artifact.digest))
        return answer.committed_bytes, answer.complete

    async def begin(self, artifact: Artifact, data: bytes = b"") -> grpc.aio.StreamUnaryCall:
        """Return an upload whose stream stays open; what it sends is committed when this returns."""
        call = self.stub.Upload()
        await call.write(UploadArtifactRequest(header=UploadHeader(artifact=artifact)))
        if data:
            await call.write(UploadArtifactRequest(chunk=Chunk(offset=0, data=data)))
            async with asyncio.timeout(WAIT_S):
                while (await self.status(artifact))[0] < len(data):  # each turn is a round trip
                    pass
        return call

    async def upload(self, data: bytes) -> Artifact:
        artifact = artifact_of(data)
        async with asyncio.timeout(WAIT_S):
            await chunks.upload(self.stub, artifact, data)
        return artifact

    async def read(self, artifact: Artifact) -> bytes:
        return await chunks.download_bytes(self.stub, artifact)


@pytest.fixture
async def callers(served: FarmProcess) -> AsyncIterator[dict[str, Caller]]:
    async with open_channels(served.address, TOKENS) as channels:
        yield {name: Caller(ArtifactServiceStub(channel)) for name, channel in channels.items()}


async def test_a_digest_alone_grants_no_access(callers: dict[str, Caller]) -> None:
    secret = os.urandom(1000)
    artifact = await callers["pi"].upload(secret)
    for name in ("ann", "mole"):
        caller = callers[name]
        assert await caller.missing(artifact) == [artifact.digest], "it does not tell that somebody has it"
        assert await caller.status(artifact) == (0, False)
        empty = await caller.begin(artifact)
        await empty.done_writing()
        assert not (await empty).complete, "a header is no proof of possession"
        assert await caller.missing(artifact) == [artifact.digest]
    error = await refusal(callers["ann"].read(artifact))
    unknown = await refusal(callers["ann"].read(Artifact(digest="a" * 64)))
    assert (error.reason, error.kind) == (unknown.reason, unknown.kind) == ("ARTIFACT_NOT_FOUND", "NOT_FOUND")
    assert error.message.replace(artifact.digest[:12], "") == unknown.message.replace("a" * 12, "")
    listed = await callers["ann"].stub.List(artifact_pb2.ListArtifactsRequest(page_size=1000))
    assert artifact.digest not in {row.artifact.digest for row in listed.artifacts}
    assert await callers["root"].read(artifact) == secret


async def test_an_uploader_of_all_bytes_can_read_them(callers: dict[str, Caller]) -> None:
    data = os.urandom(1000)
    artifact = await callers["pi"].upload(data)
    assert await callers["ann"].upload(data) == artifact
    assert await callers["ann"].read(artifact) == data


async def test_bad_bytes_of_a_holder_do_not_abort_anothers_upload(callers: dict[str, Caller]) -> None:
    data = os.urandom(5000)
    artifact = artifact_of(data)
    poisoned = await callers["mole"].begin(artifact, os.urandom(4999))
    assert await callers["ann"].status(artifact) == (0, False)
    assert await callers["ann"].upload(data) == artifact
    await poisoned.write(UploadArtifactRequest(chunk=Chunk(offset=4999, data=b"x")))
    await poisoned.done_writing()
    assert (await refusal(poisoned)).reason == "DIGEST_MISMATCH"
    assert await callers["ann"].read(artifact) == data


async def test_a_silent_stream_does_not_block_another_holder(callers: dict[str, Caller]) -> None:
    data = os.urandom(5000)
    silent = await callers["mole"].begin(artifact_of(data), data[:10])
    assert await callers["pi"].upload(data) == artifact_of(data)
    assert await callers["ann"].upload(data) == artifact_of(data)
    silent.cancel()


async def test_announced_bytes_count_against_the_quota(callers: dict[str, Caller]) -> None:
    held = [await callers["ann"].begin(Artifact(digest=f"{number:064x}", size_bytes=300 * MIB), b"x") for number in range(3)]
    error = await refusal(await callers["ann"].begin(Artifact(digest="d" * 64, size_bytes=300 * MIB)))
    assert (error.reason, error.kind, error.fault) == ("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED", "USER")
    assert error.metadata["limit_bytes"] == str(1 << 30)
    assert int(error.metadata["used_bytes"]) >= 900 * MIB
    assert "admin" in error.remedy
    # Another holder has a share of its own, and what was given up counts with what came of it.
    await callers["pi"].upload(os.urandom(1000))
    for call in held:
        call.cancel()
    async with asyncio.timeout(WAIT_S):
        while True:
            begun = await callers["ann"].begin(Artifact(digest="d" * 64, size_bytes=300 * MIB))
            await begun.done_writing()
            try:
                assert not (await begun).complete
                break
            except grpc.aio.AioRpcError as failed:  # until the server has seen that the streams are gone
                assert status.from_rpc_error(failed, server="").reason == "QUOTA_EXCEEDED"


async def test_a_path_as_a_digest_is_refused(callers: dict[str, Caller], served: FarmProcess) -> None:
    for digest in ("../../tokens", "/etc/passwd", "A" * 64, "a" * 63 + "\n", ""):
        for work in (callers["root"].read(Artifact(digest=digest)), callers["ann"].read(Artifact(digest=digest))):
            assert (await refusal(work)).reason == "DIGEST_MALFORMED"
        assert (await refusal(await callers["ann"].begin(Artifact(digest=digest, size_bytes=1)))).reason == "DIGEST_MALFORMED"


def test_the_attacks_leave_no_misnamed_files(served: FarmProcess) -> None:
    folder = served.folder / "server" / "artifacts"
    assert all(path.parent.name == path.name[:2] and len(path.name) == 64 for path in folder.glob("blobs/*/*"))
    assert {path.suffix for path in folder.glob("uploads/*")} <= {".part"}
    assert not Path(folder / "quarantine").exists()
