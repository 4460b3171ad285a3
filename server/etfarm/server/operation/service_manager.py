"""Messages to the service manager (sd_notify): ready, stopping, status, and signs of life for its watchdog. Stdlib only.

Source: sd_notify(3).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Final

import structlog

log = structlog.get_logger()

_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = "WATCHDOG_USEC"
_WATCHDOG_PID: Final = "WATCHDOG_PID"


class ServiceManager:
    """The service manager that started this process; without one, messages go nowhere.

    Args:
        environment: the process's environment.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get(_SOCKET, "")
        self._is_deaf = False
        self._address = "\0" + path[1:] if path.startswith("@") else path
        usec, pid = environment.get(_WATCHDOG, ""), environment.get(_WATCHDOG_PID, "")
        is_ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdecimal() and is_ours and self._address else 0.0
        """Time without a sign of life after which the service manager restarts the server; 0 without a watchdog."""

    def notify(self, **assignments: str | int) -> None:
        """Send assignments such as READY=1. A manager that does not listen any more is no reason to fail."""
        if not self._address:
            return
        text = "\n".join(f"{name}={str(value).replace(chr(10), ' ')}" for name, value in assignments.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(1.0)
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            if not self._is_deaf:
                log.warning("the service manager cannot be notified", why=str(error))
            self._is_deaf = True
        else:
            self._is_deaf = False

    async def keep_alive(self) -> None:
        """Send signs of life from the event loop, twice in the watchdog's time, until the task is cancelled."""
        while self.watchdog_s:
            self.notify(WATCHDOG=1)
            await asyncio.sleep(self.watchdog_s / 2)
