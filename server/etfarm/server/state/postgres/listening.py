"""Notifications between the servers of a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql
from sqlalchemy import Connection, text

from etfarm.server.state.engine import Notification
from etfarm.server.state.postgres.bounded import BoundedAsyncConnection
from etfarm.server.state.postgres.connections import Connections, pauses
from etfarm.server.state.postgres.failures import one_line

log = structlog.get_logger()

_MAX_BYTES: Final = 7_000
"""Maximum size of a payload. PostgreSQL's own limit is 8,000 bytes."""

_PROBE_S: Final = 10.0
"""Interval at which a quiet connection is tried."""

_NOTIFY: Final = text("SELECT pg_notify(:channel, :payload)")


def notify(connection: Connection, sender: str, channel: str, payload: str) -> None:
    """Notify the listeners of other processes when the transaction is committed."""
    if len(payload.encode()) > _MAX_BYTES:
        raise ValueError(f"a payload may have {_MAX_BYTES} bytes, got {len(payload.encode())}")
    connection.execute(_NOTIFY, {"channel": channel, "payload": f"{sender} {payload}"})


def _answer_s() -> float:
    """Return the time after which an answer is overdue."""
    return _PROBE_S


@asynccontextmanager
async def listening(connections: Connections, sender: str, channels: Sequence[str]) -> AsyncIterator[AsyncIterator[Notification]]:
    """Listen on a connection of its own, which is opened again when it breaks."""
    async with aclosing(_notifications(connections, sender, channels)) as notifications:
        yield notifications


async def _notifications(connections: Connections, sender: str, channels: Sequence[str]) -> Any:
    retry = pauses()
    while True:
        try:
            async with await BoundedAsyncConnection.connect(**connections.parameters, autocommit=True) as connection:
                connection.limit = _answer_s
                for channel in channels:
                    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                retry = pauses()
                for channel in channels:
                    yield Notification(channel)
                while True:
                    async for notice in connection.notifies(timeout=_PROBE_S):
                        origin, _, payload = notice.payload.partition(" ")
                        if origin != sender:
                            yield Notification(notice.channel, payload)
                    await connection.execute("SELECT 1")
        except (psycopg.Error, OSError) as error:
            log.warning("the listener has lost its connection to the database", error=one_line(error))
        await asyncio.sleep(next(retry))
