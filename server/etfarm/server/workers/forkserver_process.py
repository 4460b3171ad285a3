"""The forkserver as a process of the daemon: its start, its orders, and its end."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from etfarm.server.workers.errors import ForkserverEnded, WorkersDown
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.isolation import Jail, JailOptions
from etfarm.server.workers.limits import Limits
from etfarm.wire.sandbox import cgroups


class ForkserverProcess:
    """A running forkserver process. It starts within milliseconds and warms up by itself; create it in the event loop.

    Args:
        folder: existing folder that contains the children's folders; children only see their own.
        preload: `module` to import or `module:function` to call before the forkserver serves.
        options: options of the children's jail.
    """

    def __init__(self, folder: Path, preload: Sequence[str], options: JailOptions) -> None:
        self._control, control_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alive_child, self._alive = os.pipe()
        home = folder / "home"
        home.mkdir(exist_ok=True)
        hidden = [str(path) for path in (folder, *options.hidden)]
        visibility = json.dumps({"hidden": hidden, "readable": [str(path) for path in options.readable]})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "etfarm.server.workers.child.forkserver", str(control_child.fileno()),
                 str(alive_child), visibility, *preload],
                stdin=subprocess.DEVNULL, pass_fds=(control_child.fileno(), alive_child), cwd=home,
                env=isolation.clean_environment(home), start_new_session=True,
            )  # fmt: skip
        finally:
            control_child.close()
            os.close(alive_child)
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self.warm: asyncio.Future[dict[str, str]] = loop.create_future()
        """Failed preload entries with their reasons, once the forkserver is warm."""
        # Marks the exception as retrieved. Callers that wait in `Workers.ready` receive it, but there may be no callers.
        self.warm.add_done_callback(lambda warm: warm.cancelled() or warm.exception())
        loop.add_reader(self._control, self._on_control)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or has closed its control socket, which a killed process does first."""
        return self._is_closed or self.process.poll() is not None

    def order(self, task: str, folder: Path, limits: Limits, jail: Jail) -> tuple[socket.socket, int, socket.socket]:
        """Order a child, and return this side's ends of its channel, its log and its supervisor's status.

        Raises:
            ForkserverEnded: the forkserver has ended.
        """
        channel, channel_child = socket.socketpair()
        status, status_child = socket.socketpair()
        log, log_child = os.pipe()
        order = {"task": task, "folder": str(folder), "limits": asdict(limits), "jail": asdict(jail)}
        try:
            # Never blocks: orders are small, and at most one for each concurrent child is in transit.
            children = [channel_child.fileno(), log_child, status_child.fileno()]
            socket.send_fds(self._control, [json.dumps(order).encode()], children)
        except OSError as error:
            self._is_closed = True
            channel.close()
            status.close()
            os.close(log)
            raise ForkserverEnded(f"The forkserver does not accept requests: {error.strerror}.") from error
        finally:
            channel_child.close()
            status_child.close()
            os.close(log_child)
        return channel, log, status

    def close(self) -> None:
        """Make the forkserver and all of its children end, without waiting for them."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        os.close(self._alive)  # closing the pipe ends the forkserver
        if not self.warm.done():
            self.warm.set_exception(WorkersDown("The compile workers were stopped."))

    def _on_control(self) -> None:
        try:
            message = self._control.recv(1 << 16)
        except OSError:
            message = b""
        if not message:
            self._is_closed = True
            asyncio.get_running_loop().remove_reader(self._control)
        if self.warm.done():
            return
        if message:
            self.warm.set_result(json.loads(message)["failed"])
        else:
            self.warm.set_exception(ForkserverEnded("The forkserver ended while it was warming up."))


@cache
def find_cgroup_place() -> cgroups.Place | None:
    """Return the cgroup in which this process can limit its children's trees, or None; cached for the process's lifetime."""
    place = cgroups.find_place()
    if place is not None:
        atexit.register(cgroups.leave, place)
    return place
