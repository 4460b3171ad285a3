"""Threads that read files of users and agents, separate from those that transfer bytes, so that neither waits for the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

T = TypeVar("T")

THREADS: Final = 2


class Readers:
    """A small pool of threads; calls wait while all threads are busy."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reader")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` in one of the threads and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """End the threads; calls that have not begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
