"""The lease of a farm in PostgreSQL, as a server takes it and gives it up; each from a thread, with an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psycopg

from etfarm.server.cluster import lease
from etfarm.server.cluster.lease import Session
from etfarm.server.state.database_url import DatabaseUrl

T = TypeVar("T")


def begin_to_lead(url: DatabaseUrl) -> int:
    """Take the lease at farm-a:7433, and return its token."""

    async def begin(session: Session) -> int:
        await lease.create_tables(session)
        taken = await lease.take(session, "a", "farm-a:7433", "1", "")
        assert taken is not None
        return taken.token

    return _with_session(url, begin)


def try_to_lead(url: DatabaseUrl) -> bool:
    """Take the lease at farm-b:7433 if that is possible."""

    async def begin(session: Session) -> bool:
        await lease.create_tables(session)
        return await lease.take(session, "b", "farm-b:7433", "1", "") is not None

    return _with_session(url, begin)


def end_in_order(url: DatabaseUrl, token: int) -> None:
    """Give the lease up."""
    _with_session(url, lambda session: lease.release(session, token))


def wait_to_lead(url: DatabaseUrl) -> None:
    """Be a server at farm-c:7433 that does not lead."""
    _with_session(url, lambda session: lease.announce(session, "c", "farm-c:7433", "1"))


def claim(url: DatabaseUrl, blobs: str) -> str:
    """Return where the farm's blobs are, for a server that has its own at `blobs`."""
    return _with_session(url, lambda session: lease.claim_blobs(session, blobs))


def _with_session(url: DatabaseUrl, do: Callable[[Session], Awaitable[T]]) -> T:
    async def run() -> T:
        async with await psycopg.AsyncConnection.connect(url.text, autocommit=True) as session:
            return await do(session)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(run())).result()
