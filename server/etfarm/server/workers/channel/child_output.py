"""What a child says: its answer, its stages, and what it prints."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.wire.errors import EtfarmError

_MOST_BYTES = {frames.EVENT: 64 << 10, frames.ERROR: 16 << 20}
"""Of what is decoded as it comes."""

_MOST_FRAMES = 10_000
"""Of one child, which tells of some stages and answers once."""

_LINE_BYTES = 64 << 10
"""A longer line of a child's log is told in pieces."""

_LOG_BYTES = 16 << 20
_LOG_LINES = 100_000
"""What is passed on of one child's log; the rest is read and dropped."""

_LINES_A_TURN = 100
"""Lines that are passed on before the event loop serves others: one read may have 65,536."""


@dataclass
class Heard:
    """What a child said so far."""

    result: bytes | None = None
    error: EtfarmError | None = None
    stage: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=50))


async def listen(
    reader: asyncio.StreamReader, heard: Heard, on_event: Callable[[bytes], None], on_stage: Callable[[], None]
) -> None:
    """Takes a child's frames until it ends.

    Raises:
        BadAnswer: one is none, or there are too many.
    """
    count = 0
    while (frame := await frames.read(reader)) is not None:
        kind, data = frame
        # What has arrived is read without a wait, and a flood of frames must hold up nobody else.
        await asyncio.sleep(0)
        if (count := count + 1) > _MOST_FRAMES:
            raise errors.BadAnswer(f"A child sent more than {_MOST_FRAMES} events.")
        if len(data) > (most := _MOST_BYTES.get(kind, len(data))):
            raise errors.BadAnswer(f"A child sent an event or an error of {len(data)} bytes, above {most}.")
        if kind == frames.EVENT:
            if (said := stage_of(data)) is not None:
                stage, phase = said
                heard.stage = stage if phase == "START" else heard.stage
                on_stage()
            on_event(data)
        elif kind == frames.RESULT:
            heard.result = data
        elif kind == frames.ERROR:
            heard.error = await asyncio.to_thread(errors.from_json, data)
        else:
            raise errors.BadAnswer(f"A child sent a frame of kind {kind!r}.")


def stage_of(event: bytes) -> tuple[str, str] | None:
    """A stage's name and START or END; None of other events."""
    try:
        said = json.loads(event)
        stage, phase = str(said["stage"])[:100], said["phase"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (stage, phase) if phase in ("START", "END") else None


async def follow(reader: asyncio.StreamReader, heard: Heard, on_log: Callable[[str], None]) -> None:
    """Takes what a child prints until nobody holds the other end."""
    left, lines_left, rest = _LOG_BYTES, _LOG_LINES, b""
    while chunk := await reader.read(1 << 16):
        left -= len(chunk)
        if left < 0 or lines_left < 0:
            continue  # read on, or the child would block on a full pipe
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_BYTES:
            whole, rest = [*whole, rest], b""
        lines_left -= len(whole)
        for index, line in enumerate(whole):
            if index % _LINES_A_TURN == _LINES_A_TURN - 1:
                await asyncio.sleep(0)
            _tell(line, heard, on_log)
    if rest:
        _tell(rest, heard, on_log)
    if left < 0:
        _tell(b"(the log was cut here: %d more bytes)" % -left, heard, on_log)
    elif lines_left < 0:
        _tell(b"(the log was cut here: it has too many lines)", heard, on_log)


def _tell(line: bytes, heard: Heard, on_log: Callable[[str], None]) -> None:
    text = line.decode(errors="replace").rstrip("\r")
    heard.tail.append(text[:500])
    on_log(text)
