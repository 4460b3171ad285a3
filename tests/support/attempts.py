"""What attempts on the real runner need: a store of artifacts in this process, and a look at the processes that are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from etfarm.device_agents.attempts.attempt import Attempt
from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.device import inventory
from etfarm.device_agents.targets.local import Machine
from etfarm.v1 import agent_pb2, artifact_pb2, artifact_pb2_grpc, common_pb2, compile_pb2
from etfarm.wire import digest, tensors
from etfarm.wire.channel import Access
from etfarm.wire.chunks import artifact_of
from tests.support.fake_servers import serving
from tests.support.farm import wait_until
from tests.support.programs import program
from tests.support.runner import runner_archive


class Blobs(artifact_pb2_grpc.ArtifactServiceServicer):
    """A store that has what it is given and takes everything."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.downloads: list[str] = []
        """Digests, in the order of the requests."""

    def put(self, data: bytes) -> common_pb2.Artifact:
        self.blobs[artifact_of(data).digest] = data
        return artifact_of(data)

    def program(self, data: bytes) -> compile_pb2.Program:
        """Return a stored program of one file."""
        pte = self.put(data)
        return compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {}))

    def candidate(self, name: str, cell: str = "cell", **more: Any) -> agent_pb2.RunCandidate:
        """Return a candidate of one of the tests' programs with its inputs and this machine's runner, all stored."""
        created = program(name)
        if "inputs" not in more:
            more["inputs"] = self.put(tensors.encode(created.inputs))
        if "bundle" not in more:
            more["bundle"] = agent_pb2.RunnerBundle(artifact=self.put(runner_archive().read_bytes()))
        return agent_pb2.RunCandidate(cell_id=cell, program=self.program(created.bytes), **more)

    async def Download(self, request: artifact_pb2.DownloadArtifactRequest, context: Any) -> AsyncIterator[artifact_pb2.Chunk]:
        self.downloads.append(request.digest)
        data = self.blobs[request.digest]
        for start in range(request.offset, len(data), 1 << 18):
            yield artifact_pb2.Chunk(offset=start, data=data[start : start + (1 << 18)])

    async def FindMissing(
        self, request: artifact_pb2.FindMissingArtifactsRequest, context: Any
    ) -> artifact_pb2.FindMissingArtifactsResponse:
        return artifact_pb2.FindMissingArtifactsResponse(missing=[each for each in request.digests if each not in self.blobs])

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: Any) -> artifact_pb2.UploadStatus:
        return artifact_pb2.UploadStatus(digest=request.digest, complete=request.digest in self.blobs)

    async def Upload(
        self, requests: AsyncIterator[artifact_pb2.UploadArtifactRequest], context: Any
    ) -> artifact_pb2.UploadStatus:
        digest, data = "", bytearray()
        async for request in requests:
            digest = digest or request.header.artifact.digest
            data += request.chunk.data
        assert self.put(bytes(data)).digest == digest
        return artifact_pb2.UploadStatus(digest=digest, committed_bytes=len(data), complete=True)


@dataclass(frozen=True)
class Board:
    """Where attempts run: the store at `address`, and the folder that they write to."""

    blobs: Blobs
    address: str
    folder: Path


def new_attempt(
    board: Board,
    start: agent_pb2.StartRun,
    on_progress: Callable[[agent_pb2.RunProgress], None] = lambda _: None,
    *,
    kind: type[Attempt] = Attempt,
    target: type[Machine] = Machine,
    cache: Cache | None = None,
    **config: Any,
) -> Attempt:
    """Return an attempt on this machine, which need not be idle; `config` are values of `AgentConfig`."""
    folder = board.folder
    own = AgentConfig(Access(board.address), "board", folder, **{"gates": GateLimits(idle_wait_s=0, cool_wait_s=0), **config})
    machine = target(own, inventory.parse(inventory.collect()))
    return kind(own, machine, cache or Cache(folder / "cache", 1 << 30), folder / "run", start, on_progress)


async def no_runner_is_left() -> bool:
    """Whether no runner is below this process, as soon as those of a server that other tests share have ended too."""

    def is_runner(child: psutil.Process) -> bool:
        try:
            return "runner" in child.name()
        except psutil.NoSuchProcess:
            return False

    children = psutil.Process().children
    return await asyncio.to_thread(wait_until, lambda: not any(map(is_runner, children(recursive=True))), 10.0)


@pytest.fixture
async def board(tmp_path: Path) -> AsyncIterator[Board]:
    blobs = Blobs()
    async with serving(blobs) as address:
        yield Board(blobs, address, tmp_path)
