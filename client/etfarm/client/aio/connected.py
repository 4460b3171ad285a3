"""`AsyncConnected`, the base of the parts of `AsyncFarm`: the connection that they call the farm through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from etfarm.client.transport.connection import Connection
from etfarm.client.transport.paging import iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.wire.errors import EtfarmError


class AsyncConnected:
    """A connection to a farm."""

    _connection: Connection

    @property
    def _open(self) -> Stubs:
        return self._connection.stubs

    def _rows(
        self, rpc: Callable[[Any], Awaitable[Any]], request: Any, field: str, limit: int | None = None
    ) -> AsyncIterator[Any]:
        """Return the rows of a list; see `iterate_rows`."""
        return iterate_rows(rpc, request, field, server=self._open.server, limit=limit)

    def _not_open(self) -> EtfarmError:
        return self._connection.not_open()
