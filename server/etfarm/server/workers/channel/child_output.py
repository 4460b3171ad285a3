"""The output of a child: its answer, its stages, and the lines that it prints."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.wire.errors import EtfarmError

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
