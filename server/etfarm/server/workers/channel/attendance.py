"""The daemon's side of one child: its request, its output, its deadlines, and the result of its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.server.workers.channel.child_output import ChildOutput, read_frames, read_log
from etfarm.server.workers.limits import Limits

_KILL_S = 5.0
"""Seconds to wait for the end of a killed tree before the daemon continues."""


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
