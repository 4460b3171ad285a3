"""Failed authentications by network address, and how many are answered. Frequent failures lead to a retry delay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

from etfarm.wire.authority import network_of

FREE: Final = 100
"""Number of failures of an address without consequences: a client with an old token calls a few rpcs and retries."""

FLOOD: Final = 1000
"""Number of failures of an address after which further failing connections are closed."""

FORGET_S: Final = 300.0
"""Time without a failure after which the count of an address restarts."""

MAX_WAIT_S: Final = 60.0

MAX_ADDRESSES: Final = 4096
"""Maximum number of recorded addresses; the one whose last failure is oldest is dropped first."""


def address_of(peer: str) -> str:
    """Return the network address of a gRPC peer such as `ipv4:10.0.0.7:4711`, without its port; "unix" for a unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


class Failures:
    """Counts of failed authentications by address, or by IPv6 network.

    Failures never cause a valid token from the same address to be refused.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def note(self, address: str) -> float:
        """Count a failure. Return the seconds to wait before the next attempt, which double with each failure."""
        now, address = self._clock(), network_of(address)
        count, last = self._failed.pop(address, (0, now))
        count = 1 if now - last > FORGET_S else count + 1
        self._failed[address] = (count, now)
        if len(self._failed) > MAX_ADDRESSES:
            self._failed.popitem(last=False)
        return 0.0 if count <= FREE else min(MAX_WAIT_S, 2.0 ** min(count - FREE - 1, 10))

    def is_flood(self, address: str) -> bool:
        """Return whether an address has failed so often that connections which fail again are closed."""
        return self._failed.get(network_of(address), (0, 0.0))[0] > FLOOD


class Allowance:
    """A number of events that may happen at once, and the rate of further ones."""

    def __init__(self, at_once: int, a_second: float, clock: Callable[[], float]) -> None:
        self._at_once = at_once
        self._a_second = a_second
        self._clock = clock
        self._left, self._at_s = float(at_once), clock()

    def take(self) -> bool:
        """Return whether one more event may happen now, and count it if so."""
        now = self._clock()
        self._left = min(self._left + (now - self._at_s) * self._a_second, self._at_once)
        self._at_s = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
