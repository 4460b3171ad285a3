"""Which server leads the farm, as its other servers see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
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
    """The current leader, whether it can be relied upon, and an event for each change."""

    def __init__(self, leader: Leader | None = None) -> None:
        self._leader = leader
        self._is_read = self._is_reached = True
        self._changed = asyncio.Event()

    @property
    def leader(self) -> Leader | None:
        """The server that leads; None while there is none."""
        return self._leader

    @property
    def can_forward(self) -> bool:
        """Whether there is a leader that the database has named lately and that was not out of reach at the last call."""
        return self._leader is not None and self._is_read and self._is_reached

    def set(self, leader: Leader | None) -> None:
        """Announce the leader that the database names."""
        is_other = leader is None or self._leader is None or leader.token != self._leader.token
        self._update(leader, is_read=True, is_reached=is_other or self._is_reached)

    def doubt(self) -> None:
        """Announce that the database cannot be read, so that another server may lead."""
        self._update(self._leader, is_read=False, is_reached=self._is_reached)

    def reach(self, *, is_reached: bool) -> None:
        """Announce whether the leader can be reached."""
        self._update(self._leader, is_read=self._is_read, is_reached=is_reached)

    def _update(self, leader: Leader | None, *, is_read: bool, is_reached: bool) -> None:
        if (leader, is_read, is_reached) != (self._leader, self._is_read, self._is_reached):
            self._leader, self._is_read, self._is_reached = leader, is_read, is_reached
            self._changed.set()
            self._changed = asyncio.Event()

    def changed(self) -> Awaitable[object]:
        """Wait for the next change after this call."""
        return self._changed.wait()
