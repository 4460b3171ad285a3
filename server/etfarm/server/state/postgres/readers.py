"""Connections that read: a few, in threads of their own."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from sqlalchemy import Connection

from etfarm.server.state.postgres.connections import Connections, driver_of, execute, is_lost, pauses
from etfarm.server.state.postgres.failures import DRIVER_ERRORS, is_repeatable, translated

T = TypeVar("T")

_COUNT: Final = 4
"""Maximum number of connections that read at the same time."""

_BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class Readers:
    """Threads that run functions on snapshots."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._threads = ThreadPoolExecutor(_COUNT, thread_name_prefix="db-reader")
        self._idle: deque[Connection] = deque()

    async def run(self, do: Callable[[Connection], T], *, is_single: bool) -> T:
        """Run `do` on a snapshot, and return its result. If the connection breaks, it runs again on another one.

        Args:
            is_single: whether it executes one statement, which needs no transaction.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, do, is_single, time.monotonic())

    def _run(self, do: Callable[[Connection], T], is_single: bool, since_s: float) -> T:
        until_s = since_s + self._connections.limit_s
        for pause_s in pauses():
            connection = self._take(until_s)
            try:
                if not is_single:
                    execute(driver_of(connection), _BEGIN)
                result = do(connection)
                connection.commit()  # after a rollback, the driver would prepare its statements anew
            except StopIteration as error:
                self._give_back(connection, error)
                raise RuntimeError("the function raised StopIteration") from None  # which a future refuses
            except DRIVER_ERRORS as error:
                is_broken = is_lost(connection, error)
                self._give_back(connection, error)
                if not is_broken and not is_repeatable(error):
                    raise translated(self._connections.url, error) from error.__cause__
                if is_broken:
                    self._discard_idle()  # they are broken too, most likely
                self._connections.wait(pause_s, until_s, error)
            except BaseException as error:
                self._give_back(connection, error)
                raise
            else:
                self._idle.append(connection)
                return result
        raise AssertionError

    def _take(self, until_s: float) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connections.connect(until_s)

    def _give_back(self, connection: Connection, error: BaseException) -> None:
        """Keep a connection after a failure, if it still works."""
        if is_lost(connection, error):
            self._connections.discard(connection, is_lost=True)
            return
        driver_of(connection).rollback()
        connection.rollback()
        self._idle.append(connection)

    def close(self) -> None:
        """End the threads after their queued work."""
        self._threads.shutdown()
        self._discard_idle()

    def _discard_idle(self) -> None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            self._connections.discard(connection)
