"""Screens uploads in threads of its own, so that a hostile file holds up neither transfers nor whoever sends the same."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from etfarm.server.compile import screen
from etfarm.server.compile.operators import Operators

THREADS: Final = 2
"""Files that are screened at a time. Each may take a hundred megabytes; see `screen.UPLOAD_PARSED_BYTES`."""
MAX_KEPT: Final = 100_000
"""Digests of which it is remembered that they passed; the oldest are screened again."""


def screen_before_loading(model: Path, operators: Operators) -> None:
    """For children that load a .pt2 outside of a compilation: screens it whole, with every reader that will see it.

    Raises:
        NotAPt2, UnsafeModel, UnknownOperator: as `screen.screen_pt2`.
    """
    from etfarm.server.compile import loading  # needs torch, which the daemon has not

    loading.screen_whole(model, operators)


class Screening:
    """Screens stored files once each.

    Args:
        path: gives a stored file by its digest.
        operators: that programs may use; the committed list's when None.
    """

    def __init__(self, path: Callable[[str], Path], operators: Operators | None = None) -> None:
        self._path = path
        self._operators = operators or Operators()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="screen")
        self._passed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._running: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def screen_pt2(self, digest: str) -> None:
        """Returns once the file has passed.

        Raises:
            NotAPt2, UnsafeModel, UnknownOperator: as `screen.screen_pt2`.
        """
        await self._once("pt2", digest, partial(screen.screen_upload, allowed=self._operators.targets))

    async def screen_pte(self, digest: str) -> None:
        """Returns once the file has passed.

        Raises:
            NotAPte, TruncatedProgram: as `screen.screen_pte`.
        """
        await self._once("pte", digest, screen.screen_pte)

    def close(self) -> None:
        """Ends the threads; what waits for one is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _once(self, kind: str, digest: str, look: Callable[[Path], None]) -> None:
        # By what was looked for as well: bytes that pass for a .pte are not therefore a safe .pt2.
        key = (kind, digest)
        if key in self._passed:
            return
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = self._running[key] = loop.run_in_executor(self._threads, look, self._path(digest))
            running.add_done_callback(partial(self._on_done, key))
        # Shielded: others may wait for it as well, and a thread cannot be stopped anyway.
        await asyncio.shield(running)

    def _on_done(self, key: tuple[str, str], running: asyncio.Future[None]) -> None:
        del self._running[key]
        if not running.cancelled() and running.exception() is None:
            self._passed[key] = None
            if len(self._passed) > MAX_KEPT:
                self._passed.popitem(last=False)
