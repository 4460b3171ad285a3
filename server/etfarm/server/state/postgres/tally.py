"""Counts of the connections to a PostgreSQL server, from all threads that use them."""

from __future__ import annotations

import time
from threading import Lock

from etfarm.server.state.engine import ConnectionCounts


class Tally:
    """The counts of all connections of a database."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open = self._opened = self._lost = self._round_trips = 0
        self._unavailable_s = 0.0
        self._unavailable_since_s: float | None = None

    def add_round_trip(self) -> None:
        """Count a message to the server that is answered."""
        with self._lock:
            self._round_trips += 1

    def on_opened(self) -> None:
        """Count a connection, with which the server is back."""
        with self._lock:
            self._open += 1
            self._opened += 1
            self._unavailable_s = self._measure_unavailable_s()
            self._unavailable_since_s = None

    def on_refused(self) -> None:
        """Count the time from now on until a connection opens."""
        with self._lock:
            if self._unavailable_since_s is None:
                self._unavailable_since_s = time.monotonic()

    def on_closed(self, *, is_lost: bool) -> None:
        """Count the end of a connection."""
        with self._lock:
            self._open -= 1
            self._lost += is_lost

    def counts(self) -> ConnectionCounts:
        """Return the counts until now."""
        with self._lock:
            return ConnectionCounts(self._open, self._opened, self._lost, self._round_trips, self._measure_unavailable_s())

    def _measure_unavailable_s(self) -> float:
        return self._unavailable_s + (0.0 if self._unavailable_since_s is None else time.monotonic() - self._unavailable_since_s)
