"""Transfers of artifacts between this machine and the server, in both directions and over links that break."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from etfarm.device_agents.attempts.links import AVOID_S, Links
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.errors import TransferTimedOut
from etfarm.device_agents.jail.box import require_plain_file
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import chunks
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import EtfarmError
from etfarm.wire.farm_channel import farm_channel
from etfarm.wire.status import from_rpc_error

if TYPE_CHECKING:
    from etfarm.v1.artifact_pb2_grpc import ArtifactServiceAsyncStub

log = logging.getLogger(__name__)

T = TypeVar("T")
_TRY_AGAIN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        # A server that is shutting down cancels the open streams.
        grpc.StatusCode.CANCELLED,
    }
)
_FULL: Final = frozenset({"DISK_FULL", "QUOTA_EXCEEDED"})
"""Reasons why the server has no room for a result at the moment. The agent waits, so that no measurement is lost."""
_CORRUPTIONS: Final = 3
"""Number of damaged arrivals of an artifact after which the transfer fails."""


@asynccontextmanager
async def attempt_channel(config: AgentConfig, left_s: float, limit_s: float) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel of an attempt to the farm. Like transfers, it is tried again without limit: no program is to blame for it.

    Args:
        left_s: the attempt's remaining time in seconds.
        limit_s: all of its time in seconds.

    Raises:
        TransferTimedOut: no server of the farm was reached within the attempt's time.
    """
    async with AsyncExitStack() as opened:
        try:
            async with asyncio.timeout(left_s):
                for pause in config.pauses():
                    try:
                        channel = await opened.enter_async_context(farm_channel(config.access))
                        break
                    except EtfarmError as error:
                        log.info("an attempt does not reach the farm (%s); trying again in %.1f s", error.message, pause)
                    await asyncio.sleep(pause)
        except TimeoutError:
            raise TransferTimedOut("FETCH", limit_s) from None
        yield channel


class Transfers:
    """Downloads from and uploads to the server, retried without limit while the link is cut or the server restarts.

    The caller sets the deadline, or cancels.

    Args:
        stub: the artifact service.
        pauses: returns the seconds to wait before each further try of one transfer.
    """

    def __init__(self, stub: ArtifactServiceAsyncStub, pauses: Callable[[], Iterator[float]]) -> None:
        self._stub = stub
        self._pauses = pauses

    async def download(
        self, artifact: common_pb2.Artifact, path: Path, on_progress: Progressed | None = None, links: Links | None = None
    ) -> None:
        """Download the artifact to `path`, whole and verified; see `etfarm.wire.chunks.download`.

        Args:
            links: reads from the farm's S3 server where the server answers with a link; if that fails, and without it, the
                bytes come through the server.
        """

        async def download() -> None:
            if links is not None and links.are_usable:
                try:
                    return await chunks.download(self._stub, artifact, path, on_progress=on_progress, follow=links.follow)
                except chunks.LinkFailed as error:
                    links.avoid()
                    log.warning(
                        "%s could not be read from the farm's S3 server (%s); it comes through the server, as others do for %g s",
                        artifact.digest[:12], error, AVOID_S,
                    )  # fmt: skip
            await chunks.download(self._stub, artifact, path, on_progress=on_progress)

        await self._persist(download)

    async def upload(self, source: bytes | Path, on_progress: Progressed | None = None) -> common_pb2.Artifact:
        """Upload `source` and return its artifact, once the server holds it whole."""
        if isinstance(source, Path):
            # A runner wrote it: a link in its place could refer to a file that only the agent may read.
            require_plain_file(source)
            artifact = await chunks.artifact_of_file(source)
        else:
            artifact = chunks.artifact_of(source)
        await self._persist(lambda: self._upload(artifact, source, on_progress))
        return artifact

    async def _upload(self, artifact: common_pb2.Artifact, source: bytes | Path, on_progress: Progressed | None) -> None:
        response = await self._stub.FindMissing(artifact_pb2.FindMissingArtifactsRequest(digests=[artifact.digest]))
        if response.missing:
            await chunks.upload(self._stub, artifact, source, on_progress=on_progress)

    async def _persist(self, transfer: Callable[[], Awaitable[T]]) -> T:
        corruptions = 0
        for pause in self._pauses():
            try:
                return await transfer()
            except chunks.CorruptDownload:
                corruptions += 1
                if corruptions == _CORRUPTIONS:
                    raise
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DATA_LOSS:
                    corruptions += 1
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _reason(error) in _FULL
                if corruptions == _CORRUPTIONS or not (is_full or error.code() in _TRY_AGAIN | {grpc.StatusCode.DATA_LOSS}):
                    raise
                log.info("a transfer was cut (%s); trying again in %.1f s", error.code().name, pause)
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")


def _reason(error: grpc.aio.AioRpcError) -> str:
    return from_rpc_error(error, server="").reason
