"""`AsyncConnected`, the base of the parts of `AsyncFarm`: the connection that they call the farm through."""

from __future__ import annotations

from typing import Final

from etfarm.client.transport.connection import Connection
from etfarm.client.transport.stubs import Stubs
from etfarm.wire.errors import EtfarmError

PAGE_SIZE: Final = 500
"""Requested number of entries on a page of a list: the most that a server returns."""


class AsyncConnected:
    """A connection to a farm."""

    _connection: Connection

    @property
    def _open(self) -> Stubs:
        return self._connection.stubs

    def _not_open(self) -> EtfarmError:
        return self._connection.not_open()
