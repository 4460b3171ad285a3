"""Whether a PostgreSQL server is alive while it works on a statement that may take long, such as a migration."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import psycopg
import structlog

from etfarm.server.state.postgres.bounded import BoundedConnection

log = structlog.get_logger()

_ASK_S: Final = 15.0
"""Time without an answer after which the server is asked whether it is alive, and interval of further questions."""
_ANSWER_S: Final = 5


class WhileAlive:
    """The time limit of answers on a connection: none while the server answers on another one, else zero.

    A server that stands still with all its processes keeps its connections open, and its machine answers for it.

    Args:
        driver: the connection that waits.
        parameters: those by which it was opened.
        ask_s: time after which the server is asked.
    """

    def __init__(self, driver: BoundedConnection, parameters: dict[str, Any], ask_s: float = _ASK_S) -> None:
        # Of several hosts, another one could answer for a server that stands still.
        place = {"host": driver.info.host, "hostaddr": driver.info.hostaddr or None, "port": driver.info.port}
        self._parameters = {**parameters, **place, "connect_timeout": _ANSWER_S, "target_session_attrs": "any"}
        self._ask_s = ask_s
        self._began_s = self._asked_s = time.monotonic()

    def __call__(self) -> float:
        """Return the longest silence, in seconds; called while an answer is due."""
        if time.monotonic() - self._asked_s < self._ask_s:
            return math.inf
        is_alive = self._is_alive()
        self._asked_s = time.monotonic()
        if is_alive:
            log.info("the database is alive, and has not answered yet", waited_s=round(self._asked_s - self._began_s))
        return math.inf if is_alive else 0.0

    def _is_alive(self) -> bool:
        try:
            connection = BoundedConnection.connect(**self._parameters, autocommit=True)
        except psycopg.errors.ConnectionTimeout:
            return False
        except psycopg.Error:
            # One that refuses the connection answers. Where it is gone, the connection that waits breaks by itself.
            return True
        with connection:
            connection.limit = lambda: _ANSWER_S
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:
                return not connection.closed  # closed by its limit: a pooler may log in for a server that stands still
        return True
