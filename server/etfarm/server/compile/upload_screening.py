"""Screening of uploads in separate threads, so that a hostile file delays neither transfers nor other callers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from etfarm.server.compile.screening import screen
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.workers.fair_slots import FairSlots

THREADS: Final = 2
"""Files that are screened at a time. Each may take a hundred megabytes; see `screen.UPLOAD_PARSED_BYTES`."""
MAX_KEPT: Final = 100_000
"""Maximum number of digests that are remembered as passed; the oldest are dropped and screened again."""


def screen_before_loading(model: Path, operators: Operators) -> None:
    """Screen a whole .pt2 with every reader that will see it; for children that load one outside of a compilation.

    Raises:
        NotAPt2, UnsafeModel, UnknownOperator: as `screen.screen_pt2`.
    """
    from etfarm.server.compile.program import loading  # needs torch, which the daemon has not

    loading.screen_whole(model, operators)


class Screening:
    """Screening of stored files, once each.

    Args:
        path: returns the path of a stored file by its digest.
        operators: operators that programs may use; the committed list when None.
    """

    def __init__(self, path: Callable[[str], Path], operators: Operators | None = None) -> None:
        self._path = path
        self._operators = operators or Operators()
        self._slots = FairSlots(THREADS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="screen")
        self._passed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._running: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def screen_pt2(self, digest: str, project: str = "") -> None:
        """Screen a .pt2, unless it has passed already.

        Args:
            project: the project that waits for it; projects share the threads fairly.

        Raises:
            NotAPt2, UnsafeModel, UnknownOperator: as `screen.screen_pt2`.
        """
        await self._screen_once("pt2", digest, project, partial(screen.screen_upload, allowed=self._operators.targets))

    async def screen_pte(self, digest: str, project: str = "") -> None:
        """Screen a .pte, unless it has passed already.

        Args:
            project: as in `screen_pt2`.

        Raises:
            NotAPte, TruncatedProgram: as `screen.screen_pte`.
        """
        await self._screen_once("pte", digest, project, screen.screen_pte)

    def close(self) -> None:
        """End the threads; calls that wait for one are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _screen_once(self, kind: str, digest: str, project: str, check: Callable[[Path], None]) -> None:
        # The kind belongs to the key: bytes that pass as a .pte are not necessarily a safe .pt2.
        key = (kind, digest)
        if key in self._passed:
            return
        while (running := self._running.get(key)) is None and key not in self._passed:
            async with self._slots.take(project):
                if key in self._running or key in self._passed:
                    continue  # another caller came first
                loop = asyncio.get_running_loop()
                running = self._running[key] = loop.run_in_executor(self._threads, check, self._path(digest))
                running.add_done_callback(partial(self._on_done, key))
                await asyncio.wait({running})
                break
        if running is not None:
            # Shielded, because other callers may wait for it as well, and a thread cannot be stopped.
            await asyncio.shield(running)

    def _on_done(self, key: tuple[str, str], running: asyncio.Future[None]) -> None:
        del self._running[key]
        if not running.cancelled() and running.exception() is None:
            self._passed[key] = None
            if len(self._passed) > MAX_KEPT:
                self._passed.popitem(last=False)
