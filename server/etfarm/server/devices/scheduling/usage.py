"""The use of devices: what runs on them now, what they were sent, and how long parties used them lately."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from etfarm.server.devices.scheduling.waiting import Party

HALF_LIFE_S: Final = 4 * 3600.0
"""Time after which device time that a party used counts half."""

CHARGE_S: Final = 60.0
"""Device time that a run counts from its start, and more once it has taken longer. Otherwise one party could take all idle
devices before its first run counts."""

MAX_PARTIES: Final = 10_000
"""Maximum number of parties whose use is remembered; beyond it, those with the least use are forgotten."""

MAX_SENT: Final = 64
"""Maximum number of programs per device that are remembered as sent."""

_NEGLIGIBLE_S: Final = 1.0


@dataclass(frozen=True)
class Usage:
    """How devices are used now and were used lately."""

    lately: Mapping[Party, float] = field(default_factory=dict)
    """Decayed device time in seconds by party; parties without an entry used none."""
    running: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    """For each run on a device, by device id: whether it is exclusive."""
    sent: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Digests of the programs that a device received, by device id."""


NO_USAGE: Final = Usage()
"""Idle devices that nobody has used."""


@dataclass
class _Use:
    """Device time of one party: seconds as of a time, which halve every HALF_LIFE_S."""

    used_s: float
    at_s: float

    def at(self, now_s: float) -> float:
        """Return the decayed seconds. A clock that was set back does not increase them."""
        return self.used_s * math.exp2(-max(0.0, now_s - self.at_s) / HALF_LIFE_S)


class Ledger:
    """Device time by party. All times are seconds since the epoch."""

    def __init__(self) -> None:
        self._uses: dict[Party, _Use] = {}
        self._open: dict[str, tuple[Party, float]] = {}
        """Runs that have not ended: their party and start."""

    def begin(self, attempt_id: str, party: Party, started_s: float) -> None:
        """Count a run from its start on."""
        self._open[attempt_id] = party, started_s

    def end(self, attempt_id: str, ended_s: float) -> None:
        """Count a run with its actual duration. Has no effect for an unknown run."""
        if (known := self._open.pop(attempt_id, None)) is not None:
            party, started_s = known
            self.add(party, max(0.0, ended_s - started_s), ended_s)

    def add(self, party: Party, used_s: float, ended_s: float) -> None:
        """Count device time that was used until `ended_s`."""
        former = self._uses.get(party)
        at_s = max(ended_s, former.at_s) if former is not None else ended_s
        added_s = _Use(used_s, ended_s).at(at_s)
        self._uses[party] = _Use(added_s + (former.at(at_s) if former is not None else 0.0), at_s)
        if len(self._uses) > MAX_PARTIES:
            least = min(self._uses, key=lambda each: self._uses[each].at(at_s))
            del self._uses[least]

    def lately(self, now_s: float) -> dict[Party, float]:
        """Return the decayed device time in seconds by party, including runs that have not ended."""
        used: dict[Party, float] = {}
        for party, use in list(self._uses.items()):
            used_s = use.at(now_s)
            if used_s < _NEGLIGIBLE_S:
                del self._uses[party]
            else:
                used[party] = used_s
        for party, started_s in self._open.values():
            used[party] = used.get(party, 0.0) + max(CHARGE_S, now_s - started_s)
        return used


class SentPrograms:
    """The programs that were sent to each device, most recent last."""

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[str, None]] = {}

    def add(self, device_id: str, digests: Collection[str]) -> None:
        """Note that programs were sent to a device."""
        known = self._sent.setdefault(device_id, OrderedDict())
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > MAX_SENT:
            known.popitem(last=False)

    def of(self, device_id: str) -> frozenset[str]:
        """Return the digests of the programs that a device received."""
        return frozenset(self._sent.get(device_id, ()))

    def forget(self, device_id: str) -> None:
        """Forget a device."""
        self._sent.pop(device_id, None)
