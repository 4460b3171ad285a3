"""Detection that the parent process has gone, by the end of stdin. Stdlib only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Final

_STDIN: Final = 0
_MAX_LINE_BYTES: Final = 1024


def line_of_stdin() -> str:
    """Return the first line of stdin, byte by byte, so that nothing after it is consumed; cut if it is too long."""
    line = b""
    while len(line) < _MAX_LINE_BYTES and not line.endswith(b"\n") and (byte := os.read(_STDIN, 1)):
        line += byte
    return line.decode(errors="replace").strip()


def at_end_of_stdin(end: Callable[[], object]) -> None:
    """Call `end` in the running event loop once stdin ends; discard its content.

    A thread waits, since asyncio supports only pipes and stdin may also be a file, a terminal, /dev/null or closed. The thread
    does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    # The descriptor of a closed stdin may belong to another file by now.
    is_open = sys.stdin is not None

    def wait() -> None:
        if is_open:
            _drain()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def _drain() -> None:
    while True:
        try:
            if not os.read(_STDIN, 4096):
                return
        except BlockingIOError:  # another process set the shared descriptor to non-blocking
            select.select([_STDIN], [], [])
        except OSError:  # a terminal that hung up
            return
