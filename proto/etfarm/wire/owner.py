"""The process that started this one, as far as this one sees it: its end of our stdin. Stdlib only."""

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


def at_end_of_stdin(end: Callable[[], object]) -> None:
    """Calls `end` in the running event loop once stdin ends; what comes before is dropped.

    A thread waits, since asyncio waits for pipes only, and stdin may be a file, a terminal, /dev/null or closed. It does not
    keep the process alive.
    """
    loop = asyncio.get_running_loop()
    # A closed stdin's number is another file's by now.
    is_open = sys.stdin is not None

    def wait() -> None:
        if is_open:
            _drain()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(end)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def _drain() -> None:
    while True:
        try:
            if not os.read(_STDIN, 4096):
                return
        except BlockingIOError:  # whoever else has it made it non-blocking
            select.select([_STDIN], [], [])
        except OSError:  # a terminal that hung up
            return
