"""Blocking work in threads that the process need not wait for: torch does not reliably survive the interpreter's shutdown."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar

Answer = TypeVar("Answer")

_THREAD_NAME: Final = "etfarm work"


async def in_thread(work: Callable[[], Answer]) -> Answer:
    """Run blocking work in a thread that the process need not wait for: Ctrl-C does not wait for torch."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def settle(answer: Answer | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)  # type: ignore[arg-type]

    def target() -> None:
        answer, failed = None, None
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, answer, failed)

    start(target)
    return await future


def start(work: Callable[[], None]) -> None:
    """Start work that is not awaited, in the context of the caller."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=_THREAD_NAME, daemon=True).start()


def leave_busy_threads(code: int) -> None:
    """Exit now if a thread still runs blocking work."""
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
