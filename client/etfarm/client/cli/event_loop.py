"""The event loop of a command: Ctrl-C ends it cleanly, and blocking work never delays that."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.errors import Interrupted, OutputUnwritable
from etfarm.wire.errors import Fault, error_of

Answer = TypeVar("Answer")


def run_async(main: Callable[[], Coroutine[Any, Any, Answer]], outcome: Outcome | None = None) -> Answer:
    """Run `main` in an event loop.

    The first Ctrl-C (or SIGTERM) cancels it, so that it can clean up; the second ends the process.

    Args:
        outcome: its `--json` file is written at the first Ctrl-C, since the second one ends the process.

    Raises:
        Interrupted: `main` was cancelled and raised no error of its own.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(main(), name="command")
    caught: list[int] = []

    def interrupt(number: int) -> None:
        if caught:
            if outcome is not None and outcome.json_file == STDOUT:
                _write_cancelled(outcome)
            sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")
            sys.stderr.flush()
            os._exit(128 + number)
        caught.append(number)
        task.cancel()
        if outcome is not None and outcome.json_file != STDOUT:
            _write_cancelled(outcome)

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return loop.run_until_complete(task)
    except (asyncio.CancelledError, Interrupted) as error:
        interrupted = error if isinstance(error, Interrupted) else Interrupted("Interrupted.")
        interrupted.signal_number = caught[0] if caught else signal.SIGINT
        raise interrupted from None
    finally:
        loop.run_until_complete(_end_other_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
        for number in numbers:
            loop.remove_signal_handler(number)
        loop.close()


def _write_cancelled(outcome: Outcome) -> None:
    error = error_of(Fault.USER, "CANCELLED", "Interrupted; the command did not wait until its job was cancelled.")
    try:
        outcome.write(error)
    except OutputUnwritable as unwritable:
        tell(f"etfarm: {unwritable}", to_stderr=True)


async def _end_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
