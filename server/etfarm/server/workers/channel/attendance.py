"""The daemon's side of one child: its request, its output, its deadlines, and the result of its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError

_KILL_S = 5.0
"""Seconds to wait for the end of a killed tree before the daemon continues."""
_MAX_FRAME_BYTES = {frames.EVENT: 64 << 10, frames.ERROR: 16 << 20}
"""Maximum size of the frames that are decoded on arrival, by kind."""

_MAX_FRAMES = 10_000
"""Maximum number of frames of one child, which reports a few stages and answers once."""

_LINE_BYTES = 64 << 10
"""Maximum length of a log line; a longer line is passed on in pieces."""

_LOG_BYTES = 16 << 20
_LOG_LINES = 100_000
"""Maximum size of a child's log that is passed on; the rest is read and dropped."""

_LINES_A_TURN = 100
"""Number of lines that are passed on before the event loop serves other tasks; one read may have 65,536 lines."""


@dataclass(frozen=True)
class Answer:
    """A successful child's answer and resource usage."""

    result: bytes
    peak_rss_bytes: int
    cpu_s: float


def encode_request(files: Sequence[Path], request: bytes) -> bytes:
    """Return the frames to send to a child: the files that it may read, then the request's bytes."""
    paths = json.dumps([str(path) for path in files]).encode()
    return frames.encode(frames.FILES, paths) + frames.encode(frames.REQUEST, request)


async def attend(
    task: str,
    data: bytes,
    ends: tuple[socket.socket, int, socket.socket],
    limits: Limits,
    *,
    deadline_s: float,
    stage_deadline_s: float | None,
    on_event: Callable[[bytes], None],
    on_log: Callable[[str], None],
) -> Answer:
    """Send a child its request, follow it until it ends, and return its answer. The child's tree has ended afterwards.

    Args:
        data: from `encode_request`.
        ends: the daemon's ends of the channel, the log and the status socket.

    Raises:
        EtfarmError: as `Workers.run`.
    """
    channel, log, status = ends
    output = ChildOutput()
    stage_clock = asyncio.timeout(stage_deadline_s)

    def on_stage() -> None:
        if stage_deadline_s is not None and not stage_clock.expired():
            stage_clock.reschedule(asyncio.get_running_loop().time() + stage_deadline_s)

    reader, writer = await asyncio.open_unix_connection(sock=channel)
    ended, status_writer = await asyncio.open_unix_connection(sock=status)
    lines = await open_log(log)
    try:
        async with asyncio.timeout(deadline_s), stage_clock, asyncio.TaskGroup() as group:
            group.create_task(send(writer, data), name=f"request of {task}")
            group.create_task(read_frames(reader, output, on_event, on_stage), name=f"channel of {task}")
            group.create_task(read_log(lines, output, on_log), name=f"log of {task}")
            final = group.create_task(ended.read(), name=f"status of {task}")
    except TimeoutError:
        if stage_deadline_s is not None and stage_clock.expired():
            raise errors.ChildTimedOut(task, stage_deadline_s, output.stage, clock="stage") from None
        raise errors.ChildTimedOut(task, deadline_s, output.stage) from None
    except ExceptionGroup as failed:
        raise _first_error(failed) from None
    finally:
        # The supervisor takes this as the order to kill. If it has already ended, nothing happens.
        await asyncio.shield(hang_up(status_writer, ended))
        writer.close()
    return conclude(task, limits, output, final.result())


def conclude(task: str, limits: Limits, output: ChildOutput, report: bytes) -> Answer:
    """Return the answer of a child that has ended.

    Args:
        report: the supervisor's report; empty if it was killed as well. A connector's report has `lost`, the name of the
            child's node, and `why`, or `error`, the JSON of an error instead of the child's answer.

    Raises:
        EtfarmError: the child has no answer; as `Workers.run`.
    """
    try:
        status_report = json.loads(report)
        if (node := status_report.get("lost")) is not None:
            raise errors.NodeLost(task, str(node), str(status_report["why"]), output.stage)
        if (sent := status_report.get("error")) is not None:
            error = errors.from_json(sent.encode())
            error.stage = error.stage or output.stage
            raise error
        status = int(status_report["exit"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise errors.SupervisorKilled(task, output.stage, "\n".join(output.tail)) from None
    if output.result is None or status != 0:
        # A process of the tree was refused or killed for this, however the child handled it.
        if status_report["out_of_memory"]:
            raise errors.ChildOutOfMemory(task, limits.memory_bytes, output.stage, "\n".join(output.tail)[-2000:])
        if status_report["disk_full"]:
            raise errors.child_disk_full(task, f"the disk has less than {limits.reserve_bytes >> 20} MiB or files left")
        if status_report["too_many_processes"]:
            raise errors.child_too_many_processes(task, limits.processes, output.stage)
    if output.error is not None:
        stage = output.error.stage = output.error.stage or output.stage
        if output.error.reason == errors.ChildOutOfMemory.reason:
            detail = output.error.metadata.get("detail", "")
            raise errors.ChildOutOfMemory(task, limits.memory_bytes, stage, detail)
        if output.error.reason == "CHILD_TOO_MANY_PROCESSES":
            raise errors.child_too_many_processes(task, limits.processes, stage)
        raise output.error
    if output.result is not None and status == 0:
        return Answer(output.result, int(status_report["peak_rss_bytes"]), float(status_report["cpu_s"]))
    log = "\n".join(output.tail)
    if status == -signal.SIGPROF:
        raise errors.LoadingTimedOut(task, output.stage)
    if status == -signal.SIGVTALRM:
        raise errors.ParsingTimedOut(task, output.stage)
    if status == -signal.SIGXCPU:
        raise errors.ChildTimedOut(task, limits.cpu_s, output.stage, clock="CPU")
    if errors.is_out_of_memory(RuntimeError(log)):
        raise errors.ChildOutOfMemory(task, limits.memory_bytes, output.stage, log[-2000:])
    raise errors.ChildDied(task, status, output.stage, log)


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a child its request."""
    # A child whose jail fails answers before it has read its request.
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()


async def open_log(descriptor: int) -> asyncio.StreamReader:
    """Return a reader of a child's log."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader),
        os.fdopen(descriptor, "rb", buffering=0),
    )
    return reader


async def hang_up(writer: asyncio.StreamWriter, ended: asyncio.StreamReader) -> None:
    """Have a child's supervisor kill the child, and wait until it has, at most `_KILL_S`.

    Args:
        writer, ended: the daemon's end of the status socket.
    """
    try:
        writer.write_eof()
        async with asyncio.timeout(_KILL_S):
            await ended.read()
    except OSError:
        return  # ended before. asyncio's timeout is an OSError too; then the daemon stops waiting for the supervisor
    finally:
        writer.close()


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass
class ChildOutput:
    """The output of one child so far."""

    result: bytes | None = None
    """The task's answer; None until it arrives."""
    error: EtfarmError | None = None
    """The error that the task raised."""
    stage: str = ""
    """The stage that started last."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=50))
    """The last lines that the child printed."""


async def read_frames(
    reader: asyncio.StreamReader, output: ChildOutput, on_event: Callable[[bytes], None], on_stage: Callable[[], None]
) -> None:
    """Read a child's frames into `output` until the child ends.

    Raises:
        BadAnswer: a frame is malformed, or there are too many.
    """
    count = 0
    while (frame := await frames.read(reader)) is not None:
        kind, data = frame
        # Buffered frames are read without a wait; other tasks get their turn during a flood of frames.
        await asyncio.sleep(0)
        if (count := count + 1) > _MAX_FRAMES:
            raise errors.BadAnswer(f"A child sent more than {_MAX_FRAMES} events.")
        if len(data) > (limit := _MAX_FRAME_BYTES.get(kind, len(data))):
            raise errors.BadAnswer(f"A child sent an event or an error of {len(data)} bytes, above {limit}.")
        if kind == frames.EVENT:
            if (stage_event := stage_of(data)) is not None:
                stage, phase = stage_event
                output.stage = stage if phase == "START" else output.stage
                on_stage()
            on_event(data)
        elif kind == frames.RESULT:
            output.result = data
        elif kind == frames.ERROR:
            output.error = await asyncio.to_thread(errors.from_json, data)
        else:
            raise errors.BadAnswer(f"A child sent a frame of kind {kind!r}.")


def stage_of(event: bytes) -> tuple[str, str] | None:
    """Return a stage's name and START or END; None for other events."""
    try:
        message = json.loads(event)
        stage, phase = str(message["stage"])[:100], message["phase"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (stage, phase) if phase in ("START", "END") else None


async def read_log(reader: asyncio.StreamReader, output: ChildOutput, on_log: Callable[[str], None]) -> None:
    """Pass on the lines that a child prints until no process holds the other end."""
    bytes_left, lines_left, rest = _LOG_BYTES, _LOG_LINES, b""
    while chunk := await reader.read(1 << 16):
        bytes_left -= len(chunk)
        if bytes_left < 0 or lines_left < 0:
            continue  # keep reading, or the child would block on a full pipe
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        lines_left -= len(lines)
        for index, line in enumerate(lines):
            if index % _LINES_A_TURN == _LINES_A_TURN - 1:
                await asyncio.sleep(0)
            _add_line(line, output, on_log)
    if rest:
        _add_line(rest, output, on_log)
    if bytes_left < 0:
        _add_line(b"(the log was cut here: %d more bytes)" % -bytes_left, output, on_log)
    elif lines_left < 0:
        _add_line(b"(the log was cut here: it has too many lines)", output, on_log)


def _add_line(line: bytes, output: ChildOutput, on_log: Callable[[str], None]) -> None:
    text = line.decode(errors="replace").rstrip("\r")
    output.tail.append(text[:500])
    on_log(text)
