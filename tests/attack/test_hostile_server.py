"""A hostile server: endless data, and control sequences for the user's terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, token_pb2, token_pb2_grpc
from etfarm.wire import chunks
from etfarm.wire.channel import Access, open_channel
from tests.support.contract import WAIT_S
from tests.support.fake_servers import ReadyFarm, serving

pytestmark = pytest.mark.slow(reason="a server sends its clients answers without end")

SIZE = 1 << 20
PROMISED = common_pb2.Artifact(digest="a" * 64, size_bytes=SIZE)
CLEAR = "\x1b[2J\x1b]0;owned\x07"


class Artifacts(artifact_pb2_grpc.ArtifactServiceServicer):
    """Sends more bytes than announced, up to a bound that a client must not reach."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def Download(self, request: artifact_pb2.DownloadArtifactRequest, context: object) -> AsyncIterator[artifact_pb2.Chunk]:
        for _ in range(64):
            self.sent_bytes += SIZE
            yield artifact_pb2.Chunk(offset=self.sent_bytes, data=bytes(SIZE))

    async def Verify(
        self, request: artifact_pb2.VerifyArtifactsRequest, context: object
    ) -> AsyncIterator[artifact_pb2.VerifyArtifactsProgress]:
        yield artifact_pb2.VerifyArtifactsProgress(done=1, total=1, damaged=[common_pb2.Artifact(digest=CLEAR)])


class Tokens(token_pb2_grpc.TokenServiceServicer):
    """Answers with names that contain terminal control sequences."""

    async def Revoke(self, request: token_pb2.RevokeTokenRequest, context: object) -> token_pb2.Token:
        return token_pb2.Token(id=CLEAR, principal=CLEAR, role=common_pb2.ROLE_USER)

    async def Rotate(self, request: token_pb2.RotateTokenRequest, context: object) -> token_pb2.CreateTokenResponse:
        token = token_pb2.Token(id=CLEAR, principal=CLEAR, role=common_pb2.ROLE_USER)
        return token_pb2.CreateTokenResponse(token=token, secret=CLEAR)


@pytest.fixture
async def liar() -> AsyncIterator[tuple[str, Artifacts]]:
    artifacts = Artifacts()
    async with serving(artifacts, Tokens(), ReadyFarm()) as address:
        yield address, artifacts


async def test_a_download_stops_at_the_artifacts_size(liar: tuple[str, Artifacts], tmp_path: Path) -> None:
    address, artifacts = liar
    async with open_channel(Access(address)) as channel:
        stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
        with pytest.raises(chunks.CorruptDownload):
            await chunks.download(stub, PROMISED, tmp_path / "model.pte")
        assert not list(tmp_path.iterdir())
        with pytest.raises(chunks.CorruptDownload):
            await chunks.download_bytes(stub, PROMISED)
    assert artifacts.sent_bytes < 2 * 64 * SIZE


@pytest.mark.parametrize(
    "command", [("tokens", "revoke", "x"), ("tokens", "rotate"), ("artifacts", "verify")], ids=lambda words: "-".join(words)
)
async def test_a_servers_answers_send_no_control_sequences_to_the_terminal(
    liar: tuple[str, Artifacts], tmp_path: Path, command: tuple[str, ...]
) -> None:
    address, _ = liar
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "etfarm.wire.command", *command, "--server", address),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    async with asyncio.timeout(WAIT_S):
        output, _ = await process.communicate()
    assert b"owned" in output
    assert b"\x1b" not in output
    assert b"\x07" not in output
