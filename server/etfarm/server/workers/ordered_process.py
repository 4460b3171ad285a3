"""A process of the daemon that starts children by order: its start, its orders, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from etfarm.server.workers.errors import ForkserverEnded, WorkersDown

Ends: TypeAlias = tuple[socket.socket, int, socket.socket]
"""The daemon's ends of a child's channel, of its log and of its supervisor's status."""

_MAX_MESSAGE_BYTES = 1 << 16


class OrderedProcess:
    """A running process that takes orders. It starts within milliseconds and warms up by itself; create it in the event loop.

    Args:
        name: for errors, such as "forkserver".
        module: run as `python -m module CONTROL ALIVE ARGUMENTS...`. CONTROL and ALIVE are inherited file descriptors: a
            SEQPACKET socket, and a pipe whose other end only the daemon holds, so that its end means the daemon's death.
        arguments: further arguments.
        home: new or existing folder to run in.
        environment: all environment variables.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], home: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._control, control_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alive_child, self._alive = os.pipe()
        home.mkdir(exist_ok=True)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(control_child.fileno()), str(alive_child), *arguments],
                stdin=subprocess.DEVNULL, pass_fds=(control_child.fileno(), alive_child), cwd=home, env=dict(environment),
                start_new_session=True,
            )  # fmt: skip
        finally:
            control_child.close()
            os.close(alive_child)
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self.warm: asyncio.Future[dict[str, str]] = loop.create_future()
        """What failed, with the reasons, once the process takes orders."""
        # Marks the exception as retrieved. Callers that wait for the pool receive it, but there may be no callers.
        self.warm.add_done_callback(lambda warm: warm.cancelled() or warm.exception())
        loop.add_reader(self._control, self._on_control)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or has closed its control socket, which a killed process does first."""
        return self._is_closed or self.process.poll() is not None

    def send_order(self, order: Mapping[str, Any]) -> Ends:
        """Order a child, and return this side's ends of its channel, its log and its supervisor's status.

        Raises:
            ForkserverEnded: the process has ended.
        """
        channel, channel_child = socket.socketpair()
        status, status_child = socket.socketpair()
        log, log_child = os.pipe()
        try:
            # Never blocks: orders are small, and at most one for each concurrent child is in transit.
            children = [channel_child.fileno(), log_child, status_child.fileno()]
            socket.send_fds(self._control, [json.dumps(order).encode()], children)
        except OSError as error:
            self._is_closed = True
            channel.close()
            status.close()
            os.close(log)
            raise ForkserverEnded(f"The {self._name} does not accept requests: {error.strerror}.") from error
        finally:
            channel_child.close()
            status_child.close()
            os.close(log_child)
        return channel, log, status

    def close(self) -> None:
        """Make the process and all of its children end, without waiting for them."""
        self._close_control()
        os.close(self._alive)  # closing the pipe ends the process
        if not self.warm.done():
            self.warm.set_exception(WorkersDown("The compile workers were stopped."))

    def _close_control(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()

    def _on_control(self) -> None:
        try:
            message = self._control.recv(_MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if message:
            self._on_message(json.loads(message))
            return
        self._is_closed = True
        asyncio.get_running_loop().remove_reader(self._control)
        if not self.warm.done():
            self.warm.set_exception(ForkserverEnded(f"The {self._name} ended while it was starting."))
        self._on_end()

    def _on_end(self) -> None:
        """Handle the end of a process that ended by itself."""

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if not self.warm.done():
            self.warm.set_result(message["failed"])
