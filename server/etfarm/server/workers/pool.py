"""The pool of jailed children of this host, which assigns their users and restarts the forkserver.

Loads neither torch nor numpy. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from functools import cache
from pathlib import Path

from etfarm.server.workers import output_files
from etfarm.server.workers.child_pool import URGENT, ChildPool, Finished, delete
from etfarm.server.workers.errors import WorkersDown
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.isolation import Jail, JailOptions
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.ordered_process import Ends, OrderedProcess
from etfarm.wire.sandbox import cgroups, namespaces

__all__ = ["Finished", "Workers"]

_POINT = "view"
"""Name of the folder that each child's root is mounted on, in the child's mount namespace."""


class Workers(ChildPool):
    """A forkserver and its children, at most `concurrency` at a time and one more for urgent tasks.

    A second forkserver, for light tasks, is started when needed.

    Args:
        preload: `module` to import or `module:function` to call in the forkserver before it serves.
        light_preload: as `preload`, for the forkserver of light tasks that run while the other one is not warm. It should be
            warm within a second. None to run light tasks as all others.
        prewarm: whether `start` starts the forkserver of `preload`; otherwise the first `run` or `ready` does.
        limits: limits of each child.
        folder: existing or new folder for the children's folders; `start` deletes its contents.
        concurrency: maximum number of children at a time, without urgent ones; further callers of `run` wait for their turn.
        gate: context manager that is entered for each child's lifetime, and while `run` waits for the forkserver's warm-up.
        options: options of the children's jail. The children's folders are always hidden from each other.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str],
        limits: Limits,
        folder: Path,
        concurrency: int,
        light_preload: Sequence[str] | None = None,
        prewarm: bool = True,
        gate: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
        options: JailOptions = JailOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._preload = tuple(preload)
        self._light_preload = self._preload if light_preload is None else tuple(light_preload)
        children = concurrency + URGENT
        super().__init__(limits=limits, folder=folder, slots=FairSlots(children, reserved=URGENT), gate=gate)
        self._prewarm = prewarm
        self._servers: dict[tuple[str, ...], ForkserverProcess] = {}
        self._network = namespaces.network_inode()
        self._options = options
        first = options.first_user
        if first is None or os.geteuid() != 0:
            first = isolation.choose_users(self._folder, children)
        self._users = [None if first is None else first + number for number in range(children)]
        self._family = f"etfarm-{hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:12]}"

    def start(self) -> None:
        """Prepare the folder and start the forkserver, which warms up by itself; return within milliseconds.

        Call it in the event loop.
        """
        if (place := find_cgroup_place()) is not None:
            cgroups.remove_family(place, self._family)  # left by a server that was killed
        output_files.delete(self._folder)
        self._folder.mkdir(parents=True, mode=0o700)
        (self._folder / _POINT).mkdir(mode=0o700)
        self._is_started = True
        if self._prewarm:
            self._current(self._preload)

    @property
    def forkserver_pid(self) -> int | None:
        """The process id of the forkserver of `preload`; None before its start and after `stop`."""
        server = self._servers.get(self._preload)
        return None if server is None else server.process.pid

    async def ready(self) -> None:
        """Wait until the forkserver of `preload` is warm; start it if there is none.

        Raises:
            WorkersDown: it ended instead (ForkserverEnded), or an entry of `preload` failed; the message says which and why.
        """
        await self._ready(self._preload)

    async def _ready(self, preload: tuple[str, ...]) -> None:
        failed = await asyncio.shield(self._current(preload).warm)
        if failed:
            entry, why = next(iter(failed.items()))
            raise WorkersDown(
                f"The compile workers could not load {entry}: {why}.",
                "Install etfarm[server] completely.",
                entry=entry,
                why=why,
            )

    async def stop(self) -> None:
        """End the children, then the forkservers, and delete the folder."""
        await self._stop_running()
        while self._servers:
            _, server = self._servers.popitem()
            server.close()
            await asyncio.to_thread(server.process.wait)
        await delete(self._folder)

    @contextlib.contextmanager
    def place(self, task: str, folder: Path, *, light: bool = False) -> Iterator[Ends]:
        """Order a child of the forkserver; see `ChildPool.place`."""
        user = self._users.pop()
        try:
            yield self._current(self._choose_preload(light)).order(task, folder, self._limits, self._jail(user))
        finally:
            self._users.append(user)

    def _jail(self, user: int | None) -> Jail:
        return Jail(
            daemon_network=self._network, point=str(self._folder / _POINT), user=user, place=find_cgroup_place(),
            cgroup=self._family, required=self._options.required,
        )  # fmt: skip

    async def _warm_up(self, light: bool) -> None:
        """Wait until a task's forkserver is warm, within the gate if it still has to warm up, which takes seconds of CPU time."""
        preload = self._choose_preload(light)
        if self._is_warm(preload):
            await self._ready(preload)
            return
        async with self._gate():
            await self._ready(preload)

    def _choose_preload(self, light: bool) -> tuple[str, ...]:
        return self._light_preload if light and not self._is_warm(self._preload) else self._preload

    def _is_warm(self, preload: tuple[str, ...]) -> bool:
        server = self._servers.get(preload)
        return server is not None and not server.has_ended and server.warm.done()

    def _current(self, preload: tuple[str, ...]) -> ForkserverProcess:
        if not self._is_started:
            raise WorkersDown("The compile workers are not running.", "Call start() first.")
        server = self._servers.get(preload)
        if server is not None and server.has_ended:
            server.close()
            server = None
        if server is None:
            server = self._servers[preload] = ForkserverProcess(self._folder, preload, self._options)
        return server


class ForkserverProcess(OrderedProcess):
    """A running forkserver process.

    Args:
        folder: existing folder that contains the children's folders; children only see their own.
        preload: `module` to import or `module:function` to call before the forkserver serves.
        options: options of the children's jail.
    """

    def __init__(self, folder: Path, preload: Sequence[str], options: JailOptions) -> None:
        home = folder / "home"
        hidden = [str(path) for path in (folder, *options.hidden)]
        visibility = json.dumps({"hidden": hidden, "readable": [str(path) for path in options.readable]})
        super().__init__(
            "forkserver",
            "etfarm.server.workers.child.forkserver",
            [visibility, *preload],
            home,
            isolation.clean_environment(home),
        )

    def order(self, task: str, folder: Path, limits: Limits, jail: Jail) -> Ends:
        """Order a child, as `send_order`."""
        return self.send_order({"task": task, "folder": str(folder), "limits": asdict(limits), "jail": asdict(jail)})


@cache
def find_cgroup_place() -> cgroups.Place | None:
    """Return the cgroup in which this process can limit its children's trees, or None; cached for the process's lifetime."""
    place = cgroups.find_place()
    if place is not None:
        atexit.register(cgroups.leave, place)
    return place
