"""The farm's web page as a process of its own, beside a command that keeps the farm running."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LISTEN: Final = "127.0.0.1:0"
STOP_S: Final = 10.0
"""Seconds that the page may take to end with its stdin."""


@asynccontextmanager
async def running(server: str, listen: str) -> AsyncIterator[None]:
    """Run the page of a farm until the block ends; it prints its address and a link that signs in once.

    A page that cannot start says why, and the block runs all the same.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "etfarm.wire.command", "web", "--server", server, "--listen", listen),
        *("--link", "--exit-with-stdin"),
        stdin=asyncio.subprocess.PIPE,
    )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
