"""Sessions on this machine without a farm, served on a socket: `python -m etfarm.device_agents.daemon.serve_local FOLDER`.

Started by the client's LocalSession, whose end of stdin also ends this process. Tensors and programs are transferred with
ArtifactService, as on a farm; they are files in FOLDER, which this process deletes at the end, since a killed caller cannot.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc

from etfarm.device_agents.attempts.session_program import Exchange, ServedProgram
from etfarm.device_agents.attempts.session_text import OnTokens
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.daemon.local_bundle import RunnerUnbuilt, local_bundle
from etfarm.device_agents.daemon.own_runners import WORKING_BACKENDS
from etfarm.device_agents.device import inventory
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.protocol import Hello
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.device_agents.targets.local import Machine
from etfarm.v1 import (
    artifact_pb2,
    artifact_pb2_grpc,
    common_pb2,
    device_pb2,
    session_pb2,
    session_pb2_grpc,
)
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.wire import chunks
from etfarm.wire.channel import SERVER_OPTIONS, Access
from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, Kind, UserError, error_for
from etfarm.wire.owner import at_end_of_stdin
from etfarm.wire.shielding import shielded
from etfarm.wire.status import to_proto, to_status
from etfarm.wire.token_buffer import TokenBuffer
from etfarm.wire.words import value_of

BUILDING: Final = "building the runner for this machine, once; it takes about a minute"
"""What a session waits for while a runner is built; the client reports it to users who follow nothing else."""

FALLBACK: Final = "using ExecuTorch's Python binding instead of a runner"
"""The start of what a session waits for if no runner can be built; the client reports it as it does `BUILDING`."""

_GRACE_S: Final = 2.0
"""Seconds for calls to end by themselves: the caller has cancelled them before it closes stdin. For calls that the server cuts
at once, gRPC would complain on the caller's stderr."""
_MAX_TENSOR_BYTES: Final = 2 << 30
"""Size limit of transferred tensors in bytes; above it the least recently used are deleted."""


class ArtifactUnknown(UserError):
    """A digest for which nothing was uploaded here."""

    reason = "ARTIFACT_MISSING"
    kind = Kind.FAILED_PRECONDITION


class ArtifactDamaged(DeviceError):
    """An upload with another digest than announced."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS


class LocalArtifacts(artifact_pb2_grpc.ArtifactServiceServicer):
    """The part of ArtifactService that sessions of this process need: whole files by digest, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._sizes: dict[str, int] = {}
        self.held: set[str] = set()
        """Digests of the program's files, which are never deleted."""

    def path(self, artifact: common_pb2.Artifact) -> Path:
        """Return the file of an artifact.

        Raises:
            ArtifactUnknown: it was not uploaded.
        """
        if artifact.digest not in self._sizes:
            raise ArtifactUnknown(f"Artifact {artifact.digest[:12]!r} was not sent.", "Upload it first.", digest=artifact.digest)
        self._sizes[artifact.digest] = self._sizes.pop(artifact.digest)  # mark as most recently used
        return self._folder / artifact.digest

    async def fetch(self, artifact: common_pb2.Artifact) -> bytes:
        """Return an artifact's bytes."""
        return await asyncio.to_thread(self.path(artifact).read_bytes)

    async def keep(self, data: bytes) -> common_pb2.Artifact:
        """Store `data` as an artifact and return it."""
        artifact = chunks.artifact_of(data)
        await asyncio.to_thread((self._folder / artifact.digest).write_bytes, data)
        self._record(artifact.digest, len(data))
        return artifact

    async def FindMissing(
        self, request: artifact_pb2.FindMissingArtifactsRequest, context: Any
    ) -> artifact_pb2.FindMissingArtifactsResponse:
        return artifact_pb2.FindMissingArtifactsResponse(
            missing=[digest for digest in request.digests if digest not in self._sizes]
        )

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: Any) -> artifact_pb2.UploadStatus:
        size = self._sizes.get(request.digest)
        return artifact_pb2.UploadStatus(digest=request.digest, committed_bytes=size or 0, complete=size is not None)

    async def Upload(
        self, request_iterator: AsyncIterator[artifact_pb2.UploadArtifactRequest], context: Any
    ) -> artifact_pb2.UploadStatus:
        reader = aiter(request_iterator)
        artifact = (await anext(reader)).header.artifact
        part = self._folder / f"{uuid.uuid4().hex}.part"
        hasher, size = hashlib.sha256(), 0
        try:
            with part.open("wb") as file:
                async for request in reader:
                    await chunks.append(file.fileno(), hasher, request.chunk.data)
                    size += len(request.chunk.data)
            if hasher.hexdigest() != artifact.digest:
                await _refuse(context, ArtifactDamaged(f"{artifact.digest[:12]!r} arrived damaged.", "Send it again."))
            part.replace(self._folder / artifact.digest)
        finally:
            part.unlink(missing_ok=True)
        self._record(artifact.digest, size)
        return artifact_pb2.UploadStatus(digest=artifact.digest, committed_bytes=size, complete=True)

    async def Download(self, request: artifact_pb2.DownloadArtifactRequest, context: Any) -> AsyncIterator[artifact_pb2.Chunk]:
        try:
            data = await self.fetch(common_pb2.Artifact(digest=request.digest))
        except ArtifactUnknown as error:
            await _refuse(context, error)
        for start, length in chunks.spans(request.offset, len(data)):
            yield artifact_pb2.Chunk(offset=start, data=data[start : start + length])

    def _record(self, name: str, size: int) -> None:
        self._sizes.pop(name, None)
        self._sizes[name] = size
        total = sum(self._sizes.values())
        for old in [old for old in self._sizes if old not in self.held and old != name]:
            if total <= _MAX_TENSOR_BYTES:
                return
            total -= self._sizes.pop(old)
            (self._folder / old).unlink(missing_ok=True)


class LocalSessions(session_pb2_grpc.SessionServiceServicer):
    """The service of session.proto on this machine, without a queue for the device."""

    def __init__(self, config: AgentConfig, artifacts: LocalArtifacts) -> None:
        self._config = config
        self._artifacts = artifacts
        self._machine = Machine(config, _device())
        self._live: dict[str, _LocalSession] = {}

    async def Open(self, request: session_pb2.OpenSessionRequest, context: Any) -> AsyncIterator[session_pb2.SessionEvent]:
        session = _LocalSession(uuid.uuid4().hex[:16])
        folder = self._config.data / session.id
        folder.mkdir()
        leading = asyncio.create_task(self._lead(session, request, folder), name=f"session-{session.id}")
        self._live[session.id] = session
        try:
            while (event := await session.events.get()) is not None:
                yield event
        finally:
            del self._live[session.id]
            leading.cancel()
            await asyncio.shield(asyncio.ensure_future(asyncio.wait([leading])))
            shutil.rmtree(folder, ignore_errors=True)

    async def Call(self, request: session_pb2.CallSessionRequest, context: Any) -> session_pb2.CallSessionResponse:
        session = await self._find(request.session_id, context)
        working = asyncio.ensure_future(session.answer(request.task))
        # A caller that disconnects must not stop the runner in the middle of a command.
        return session_pb2.CallSessionResponse(call_id=request.call_id, answer=await shielded(working))

    async def Generate(
        self, request: session_pb2.GenerateSessionRequest, context: Any
    ) -> AsyncIterator[session_pb2.GenerateSessionResponse]:
        session = await self._find(request.session_id, context)
        task = session_pb2.SessionTask(generation=request.generation)
        if request.HasField("timeout_s"):
            task.timeout_s = request.timeout_s
        buffer, stop = TokenBuffer(request.generation.tokens), asyncio.Event()
        working = asyncio.ensure_future(session.answer(task, buffer.put, stop))
        working.add_done_callback(lambda _: buffer.close())
        try:
            await context.send_initial_metadata(())
            while (tokens := await buffer.take()) is not None:
                yield session_pb2.GenerateSessionResponse(call_id=request.call_id, tokens=tokens)
            yield session_pb2.GenerateSessionResponse(call_id=request.call_id, answer=await shielded(working))
        finally:
            stop.set()

    async def _find(self, session_id: str, context: Any) -> _LocalSession:
        session = self._live.get(session_id)
        if session is None or session.program is None:
            await _refuse(context, error_for("SESSION_NOT_FOUND", f"There is no session {session_id!r}.", "Open another."))
        return session

    async def _lead(self, session: _LocalSession, request: session_pb2.OpenSessionRequest, folder: Path) -> None:
        """Run a session to its end; the last event states why it ended, unless the caller left."""
        try:
            error = await self._serve(session, request, folder)
        except EtfarmError as raised:
            error = raised
        except Exception as bug:  # noqa: BLE001 - whoever waits for the session hears of it
            error = FarmError(f"etfarm has a bug: {bug!r}.")
        session.put_event(session_pb2.SessionEvent(ended=to_proto(error)))
        session.events.put_nowait(None)

    async def _serve(self, session: _LocalSession, request: session_pb2.OpenSessionRequest, folder: Path) -> EtfarmError:
        def on_log(line: object) -> None:
            session.put_event(session_pb2.SessionEvent(log_line=str(line)))

        bundle: Bundle | None = None

        def on_wait(why: str) -> None:
            session.put_event(session_pb2.SessionEvent(waiting=session_pb2.SessionWaiting(why=why)))

        on_wait("preparing the runner for this machine")
        try:
            bundle = await asyncio.shield(asyncio.ensure_future(local_bundle(lambda: on_wait(BUILDING))))
        except RunnerUnbuilt as error:
            if not PythonRunner.available():
                raise
            on_wait(f"{FALLBACK}: {error}")
            on_log(f"{error.message} ExecuTorch's Python binding runs the program instead.")
        files = [request.program.pte, *request.program.data.values()]
        self._artifacts.held.update(file.digest for file in files)
        program, *data = (self._artifacts.path(file) for file in files)
        cpus = inventory.choose_cpus(self._machine.device, request.cores, self._machine.restricted)
        threads = request.threads if request.HasField("threads") else inventory.choose_threads(self._machine.device, cpus)
        async with self._machine.start_runner(bundle, folder, on_log) as runner:
            hello = await runner.hello()
            served = ServedProgram(runner, Exchange(self._artifacts.fetch, self._artifacts.keep))
            ready = await served.load(program, data, cpus=cpus, threads=threads, methods=request.methods)
            ready.runner.kind = value_of(common_pb2.RunnerKind, runner.kind)
            ready.device.CopyFrom(_in_use(self._machine.device, runner.kind, hello))
            session.program = served
            session.put_event(session_pb2.SessionEvent(ready=ready))
            return await session.over


class _LocalSession:
    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.program: ServedProgram | None = None
        self.events: asyncio.Queue[session_pb2.SessionEvent | None] = asyncio.Queue()
        self.over: asyncio.Future[EtfarmError] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()

    def put_event(self, event: session_pb2.SessionEvent) -> None:
        event.session_id = self.id
        self.events.put_nowait(event)

    async def answer(
        self, task: session_pb2.SessionTask, on_tokens: OnTokens | None = None, stop: asyncio.Event | None = None
    ) -> session_pb2.SessionAnswer:
        """Return the answer to one call, in its turn; see `ServedProgram.answer`.

        A generation whose caller left before its turn is not started: it would execute the whole prompt before it stops.
        """
        assert self.program is not None
        async with self._turn:
            if stop is not None and stop.is_set():
                return session_pb2.SessionAnswer()
            answer, end = await self.program.answer(task, on_tokens, stop)
        if end is not None and not self.over.done():
            self.over.set_result(end)
        return answer


def _device() -> device_pb2.Device:
    device = inventory.parse(inventory.collect())
    device.id, device.name = "local", socket.gethostname()
    return device


def _in_use(device: device_pb2.Device, kind: str, hello: Hello) -> device_pb2.Device:
    """Return the device as a farm would describe it while it serves this session."""
    description = device_pb2.Device(
        state=device_pb2.DEVICE_STATE_BUSY,
        runner=RunnerKind.Value(f"RUNNER_KIND_{kind.upper()}"),
        backends=[name for name in hello.backends if name in WORKING_BACKENDS],
        operator_count=len(hello.operators),
    )
    description.MergeFrom(device)
    description.last_seen_time.GetCurrentTime()
    return description


async def _refuse(context: Any, error: EtfarmError) -> NoReturn:
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort raises")


async def serve(folder: Path) -> None:
    """Serve until stdin ends, then delete the folder."""
    stop = asyncio.Event()
    at_end_of_stdin(stop.set)
    address = f"unix:{folder / 's'}"
    config = AgentConfig(access=Access(address), name=socket.gethostname(), data=folder)
    # Other methods answer UNIMPLEMENTED, and are never called here.
    artifacts = LocalArtifacts(folder / "artifacts")  # type: ignore[abstract]
    server = grpc.aio.server(options=SERVER_OPTIONS)
    artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(artifacts, server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(LocalSessions(config, artifacts), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        print(f"etfarm: serving sessions on {address}", flush=True)
        await stop.wait()
        await server.stop(_GRACE_S)
    finally:
        # The caller deletes it too, unless it was killed.
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1])))
