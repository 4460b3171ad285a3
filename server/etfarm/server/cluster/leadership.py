"""Which server leads the farm, as its other servers see it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Leader:
    """The server that leads the farm."""

    token: int
    """The number of its lease; a later leader has a higher one."""
    address: str
    """The address at which other servers reach it."""
    version: str
    certificate: str
    """Its TLS certificate chain in PEM; empty without TLS."""
    secret: str
    """The secret by which it recognizes the farm's servers."""


class Leadership:
    """The current leader, and an event for each change."""

    def __init__(self, leader: Leader | None = None) -> None:
        self._leader = leader
        self._changed = asyncio.Event()

    @property
    def leader(self) -> Leader | None:
        """The server that leads; None while there is none."""
        return self._leader

    def set(self, leader: Leader | None) -> None:
        """Announce the leader."""
        if leader != self._leader:
            self._leader = leader
            self._changed.set()
            self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()
