"""Screening and description of uploads by jailed children of their own, which no compilation keeps waiting."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from etfarm.server.compile.request import UploadRequest
from etfarm.server.compile.screening import screen
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.workers import answers
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.errors import ChildOutOfMemory, ChildTimedOut
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.limits import Limits
from etfarm.v1 import compile_pb2
from etfarm.v1.compile_pb2 import Inspection
from etfarm.wire.errors import EtfarmError, Fault

log = structlog.get_logger()

PRELOAD: Final = ("etfarm.server.compile.inspect.uploads",)
CHILDREN: Final = 2
"""Uploads that are described at a time; one more is screened for a submission."""
LIMITS: Final = Limits(memory_bytes=2 << 30, cpu_s=30, file_bytes=1 << 20, threads=1, processes=16)
"""Limits of each child. The description of a large language model, ten megabytes of JSON, takes a tenth of the memory."""
DEADLINE_S: Final = 60.0
MAX_KEPT: Final = 100_000
"""Maximum number of digests that are remembered as passed; the oldest are dropped and screened again."""

_TASKS: Final = "etfarm.server.compile.inspect.uploads"
_INSPECTED: Final = ("format", "input_names", "output_names", "quantized", "transformed", "facts")
_LEFT_TO_COMPILATION: Final = (ChildOutOfMemory.reason, ChildTimedOut.reason)


def screen_before_loading(model: Path, operators: Operators) -> None:
    """Screen a whole .pt2 with every reader that will see it; for children that load one outside of a compilation.

    Raises:
        NotAPt2, UnsafeModel, UNKNOWN_OPERATOR: as `screen.screen_pt2`.
    """
    from etfarm.server.compile.program import loading  # needs torch, which the daemon has not

    loading.screen_whole(model, operators)


class Screening:
    """Screening of stored files, once each, and their description.

    Args:
        pool: its children read the files; nothing of a .pt2 is parsed in this process.
        path: returns the path of a stored file by its digest.
        operators: operators that programs may use; the committed list when None.
    """

    def __init__(self, pool: ChildPool, path: Callable[[str], Path], operators: Operators | None = None) -> None:
        self._pool = pool
        self._path = path
        self._operators = operators or Operators()
        self._passed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._running: dict[tuple[str, str, str], asyncio.Task[Any]] = {}
        self._inspecting: defaultdict[str, FairSlots] = defaultdict(lambda: FairSlots(CHILDREN - 1))
        """Children that describe uploads of a project: one is always free for another project's."""

    async def screen_pt2(self, digest: str, project: str) -> None:
        """Screen a .pt2 for a submission, unless it has passed already.

        The compilation screens it again before it loads it. So a file that no child can screen for now, because the host lacks
        memory or a jail, passes here.

        Args:
            project: project of the caller; projects take turns for children.

        Raises:
            NotAPt2, UnsafeModel, UNKNOWN_OPERATOR: as `screen.screen_pt2`.
        """
        if ("pt2", digest) not in self._passed:
            await self._once("pt2", digest, project, partial(self._screen_pt2, digest, project))

    async def screen_pte(self, digest: str) -> None:
        """Screen a .pte, unless it has passed already: compare the file's size with its header, which has a fixed size.

        Raises:
            NOT_A_PTE, TruncatedProgram: as `screen.screen_pte`.
        """
        if ("pte", digest) not in self._passed:
            await self._once("pte", digest, "", partial(asyncio.to_thread, screen.screen_pte, self._path(digest)))

    async def inspect(self, digest: str, project: str, *, is_program: bool | None = None) -> Inspection:
        """Describe a .pt2 or a .pte.

        Args:
            project: as in `screen_pt2`.
            is_program: whether it must be a .pte rather than a .pt2; None to decide by its first bytes.

        Raises:
            UserError: it is neither, its loading could execute code, or reading it takes too much memory or time.
            FarmError: the host allows no jailed child.
        """
        kind = f"inspection {is_program}"
        inspection: Inspection = await self._once(kind, digest, project, partial(self._inspect, digest, project, is_program))
        return inspection

    async def _screen_pt2(self, digest: str, project: str) -> None:
        try:
            await self._run("screen_upload", UploadRequest(self._path(digest), False, self._operators), project, urgent=True)
        except EtfarmError as error:
            if error.fault is Fault.USER and error.reason not in _LEFT_TO_COMPILATION:
                raise
            log.warning("an upload was not screened; its compilation screens it", digest=digest, reason=error.reason)

    async def _inspect(self, digest: str, project: str, is_program: bool | None) -> Inspection:
        request = UploadRequest(self._path(digest), is_program, self._operators)
        async with self._inspecting[project].take(project):
            data = await self._run("inspect_upload", request, project, urgent=False)
        return await asyncio.to_thread(answers.decode, data, compile_pb2.Inspection, _INSPECTED)

    async def _run(self, task: str, request: UploadRequest, project: str, *, urgent: bool) -> bytes:
        finished = await self._pool.run(
            f"{_TASKS}:{task}", request, deadline_s=DEADLINE_S, light=True, urgent=urgent, whose=project
        )
        async with finished:
            return finished.result

    async def _once(self, kind: str, digest: str, project: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        # The kind belongs to the key: bytes that pass as a .pte are not necessarily a safe .pt2. So does the project, which must
        # not wait for the turn of another.
        key = (kind, digest, project)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(work(), name=f"screen {kind} {digest[:12]}")
            running.add_done_callback(partial(self._on_done, key))
        # Shielded, because other callers may wait for it as well. The child's limits end it.
        return await asyncio.shield(running)

    def _on_done(self, key: tuple[str, str, str], running: asyncio.Task[Any]) -> None:
        del self._running[key]
        if not running.cancelled() and running.exception() is None and running.result() is None:
            self._passed[key[:2]] = None
            if len(self._passed) > MAX_KEPT:
                self._passed.popitem(last=False)
