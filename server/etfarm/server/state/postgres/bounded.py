"""Connections that wait for each answer only for a bounded time: a server that hangs keeps its connections open."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen

RV = TypeVar("RV")


def no_limit() -> float:
    """Return the time limit of statements that may take as long as they do."""
    return math.inf


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that closes itself when the server is silent for too long while an answer is due."""

    limit: Callable[[], float] = staticmethod(no_limit)
    """Returns the longest silence, in seconds."""
    on_wait: Callable[[], None] = staticmethod(lambda: None)
    """Called when an answer has to be waited for."""

    def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """Run one of the driver's generators to its end."""
        return super().wait(_while_answered(gen, self.pgconn, self.limit, self.on_wait), *arguments, **options)


class BoundedAsyncConnection(psycopg.AsyncConnection[Any]):
    """`BoundedConnection` for asyncio."""

    limit: Callable[[], float] = staticmethod(no_limit)
    on_wait: Callable[[], None] = staticmethod(lambda: None)

    async def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """Run one of the driver's generators to its end."""
        return await super().wait(_while_answered(gen, self.pgconn, self.limit, self.on_wait), *arguments, **options)


def _while_answered(
    gen: PQGen[RV], connection: pq.abc.PGconn, limit: Callable[[], float], on_wait: Callable[[], None]
) -> PQGen[RV]:
    """Delegate to a generator, which the driver resumes at least every tenth of a second, with 0 if nothing has come.

    Raises:
        psycopg.OperationalError: an answer is overdue. The connection is closed.
    """
    since_s = time.monotonic()
    try:
        state = next(gen)
        on_wait()
        while True:
            ready = yield state
            if ready:
                since_s = time.monotonic()
            elif connection.transaction_status == pq.TransactionStatus.ACTIVE and time.monotonic() - since_s > limit():
                connection.finish()
                raise psycopg.OperationalError("the database server does not answer")
            state = gen.send(ready)
    except StopIteration as end:
        result: RV = end.value
        return result
