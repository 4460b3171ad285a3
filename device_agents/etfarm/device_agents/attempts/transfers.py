"""Transfers of artifacts between this machine and the server, in both directions and over links that break."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from etfarm.device_agents.attempts.links import AVOID_S, Links
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.errors import transfer_timed_out
from etfarm.device_agents.jail.box import require_plain_file
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
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
_RENEW_S: Final = 5.0
"""Age in seconds from which a channel without an answer is opened anew."""
_CORRUPTIONS: Final = 3
"""Number of damaged arrivals of an artifact after which the transfer fails."""


class AttemptChannel:
    """The channel of an attempt to the farm.

    It is to the servers that had proven to be the farm's when it was opened. Where none of these answers any more, such as one
    that was stopped for good, or has another certificate, it is opened anew, so that others are asked.

    Args:
        config: how to reach the farm.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._opened_s = 0.0
        self.channel: grpc.aio.Channel

    async def open(self, left_s: float, limit_s: float) -> None:
        """Open it. Like transfers, that is tried again without limit: no program is to blame for it.

        Args:
            left_s: the attempt's remaining time in seconds.
            limit_s: all of its time in seconds.

        Raises:
            TRANSFER_TIMED_OUT: no server of the farm was reached within the attempt's time.
        """
        try:
            async with asyncio.timeout(left_s):
                for pause in self._config.pauses():
                    try:
                        return await self._open()
                    except EtfarmError as error:
                        log.info("an attempt does not reach the farm (%s); trying again in %.1f s", error.message, pause)
                    await asyncio.sleep(pause)
        except TimeoutError:
            raise transfer_timed_out("FETCH", limit_s) from None

    async def renew(self) -> grpc.aio.Channel:
        """Return a new channel if the present one has been open for a while; that one if no server is reached."""
        async with self._turn:
            if time.monotonic() - self._opened_s >= _RENEW_S:
                self._opened_s = time.monotonic()
                try:
                    await self._open()
                except EtfarmError as error:
                    log.info("an attempt does not reach the farm (%s)", error.message)
        return self.channel

    async def close(self) -> None:
        """Close it."""
        await self._opened.aclose()

    async def _open(self) -> None:
        async with AsyncExitStack() as opening:
            self.channel = await opening.enter_async_context(farm_channel(self._config.access))
            former, self._opened = self._opened, opening.pop_all()
        self._opened_s = time.monotonic()
        await former.aclose()


@asynccontextmanager
async def attempt_channel(config: AgentConfig, left_s: float, limit_s: float) -> AsyncIterator[AttemptChannel]:
    """Open the channel of an attempt, as `AttemptChannel.open`, until the end of the block."""
    own = AttemptChannel(config)
    try:
        await own.open(left_s, limit_s)
        yield own
    finally:
        await own.close()


class Transfers:
    """Downloads from and uploads to the server, retried without limit while the link is cut or the server restarts.

    The caller sets the deadline, or cancels.

    Args:
        stub: the artifact service.
        pauses: returns the seconds to wait before each further try of one transfer.
        renew: returns the stub to go on with when no server has answered.
    """

    def __init__(
        self,
        stub: ArtifactServiceAsyncStub,
        pauses: Callable[[], Iterator[float]],
        renew: Callable[[], Awaitable[ArtifactServiceAsyncStub]] | None = None,
    ) -> None:
        self._stub = stub
        self._pauses = pauses
        self._renew = renew

    @classmethod
    def over(cls, channel: AttemptChannel, pauses: Callable[[], Iterator[float]]) -> Transfers:
        """Return the transfers of an attempt."""

        async def renew() -> ArtifactServiceAsyncStub:
            return ArtifactServiceStub(await channel.renew())

        return cls(ArtifactServiceStub(channel.channel), pauses, renew)

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
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and from_rpc_error(error, server="").reason in _FULL
                if corruptions == _CORRUPTIONS or not (is_full or error.code() in _TRY_AGAIN | {grpc.StatusCode.DATA_LOSS}):
                    raise
                log.info("a transfer was cut (%s); trying again in %.1f s", error.code().name, pause)
                if error.code() is grpc.StatusCode.UNAVAILABLE and self._renew is not None:
                    self._stub = await self._renew()
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")
