"""Whole commands in a phone's shell: from their input to their outputs and exit code."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from etfarm.device_agents.adb.errors import phone_answer_too_long
from etfarm.device_agents.adb.shell import ShellProcess

READ_BYTES: Final = 1 << 16
"""Number of bytes that are read or written at a time."""


@dataclass(frozen=True)
class Completed:
    """A command that has ended."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    """The exit code; see `ShellProcess.returncode`."""


async def complete(process: ShellProcess, input: bytes, during: str, max_bytes: int) -> Completed:
    """Give a started command its input, and return its outputs once it has ended.

    Args:
        during: what is being done, for the error's message.
        max_bytes: limit for stdout and stderr together.

    Raises:
        PHONE_ANSWER_TOO_LONG: it wrote more than `max_bytes`.
    """
    left = max_bytes

    async def read(stream: asyncio.StreamReader) -> bytes:
        nonlocal left
        parts = []
        while part := await stream.read(READ_BYTES):
            left -= len(part)
            if left < 0:
                raise phone_answer_too_long(process.serial, during, max_bytes)
            parts.append(part)
        return b"".join(parts)

    async def write() -> None:
        try:
            for start in range(0, len(input), READ_BYTES):
                process.stdin.write(input[start : start + READ_BYTES])
                await process.stdin.drain()
        except ConnectionError:
            return  # a command need not read its input to the end; its exit code shows the outcome
        if input:
            process.stdin.close()

    outputs = [asyncio.create_task(read(stream)) for stream in (process.stdout, process.stderr)]
    writing = asyncio.create_task(write())
    try:
        stdout, stderr = await asyncio.gather(*outputs)
    finally:
        for task in (*outputs, writing):
            task.cancel()
        await asyncio.wait({*outputs, writing})
    code = await process.wait()
    assert code is not None  # only `kill` leaves it None
    return Completed(stdout, stderr, code)
