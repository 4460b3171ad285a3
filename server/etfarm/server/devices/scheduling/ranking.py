"""The order of waiting cells: priority, age, deadline and fair share, all in seconds of waiting.

A cell's time of seniority is its submission, earlier by AGEING_S for each level of priority, and no later than LEAD_S before its
deadline. What its party used lately makes it later, by at most 2 * SHARE_S. The cell with the earliest time goes first. Since
neither part depends on the present, the order of two cells of one party never changes while they wait; and since all
parts are bounded, every cell goes first after a bounded time, whatever is submitted meanwhile (`LONGEST_OVERTAKEN_S`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from etfarm.server.devices.scheduling.usage import CHARGE_S
from etfarm.server.devices.scheduling.waiting import MAX_PRIORITY, MIN_PRIORITY, Party, Waiting

AGEING_S: Final = 600.0
"""Waiting time that equals one level of priority."""

LEAD_S: Final = 12 * 3600.0
"""A cell counts as waiting at least since this long before its deadline, at equal priority."""

SHARE_S: Final = 6 * 3600.0
"""How much later a cell goes if its project has used all of the device time lately; and again, if its owner has used all of the
project's."""

NEGLIGIBLE_USE_S: Final = 600.0
"""Device time that hardly counts: added to the total, so that a party that alone ran one short run has used a small share."""

LONGEST_OVERTAKEN_S: Final = (MAX_PRIORITY - MIN_PRIORITY) * AGEING_S + LEAD_S + 2 * SHARE_S
"""Waiting time after which no cell that is submitted from then on goes before a cell, whatever their priorities are."""


def seniority_s(cell: Waiting) -> float:
    """Return the time in seconds since the epoch that orders the cells of one party; the earliest goes first."""
    since_s = cell.order[0] / 1e9
    if cell.deadline_s is not None:
        since_s = min(since_s, cell.deadline_s - LEAD_S)
    return since_s - AGEING_S * min(max(cell.priority, MIN_PRIORITY), MAX_PRIORITY)


def aged_priority(cell: Waiting, now_s: float) -> float:
    """Return the priority with what waiting and a deadline add to it, which orders the cells of one party."""
    return (now_s - seniority_s(cell)) / AGEING_S


class Shares:
    """The shares of device time that parties have used lately, and those of the runs that one round of scheduling adds.

    The totals stay as they were at the start of the round, so that a run makes its own party's cells later and no others earlier.
    """

    def __init__(self, lately: Mapping[Party, float]) -> None:
        self._by_party = dict(lately)
        self._by_project: dict[str, float] = {}
        # Sorted, since the sum of floats depends on their order.
        for (project, _), used_s in sorted(lately.items()):
            self._by_project[project] = self._by_project.get(project, 0.0) + used_s
        self._total_s = sum(used_s for _, used_s in sorted(self._by_project.items())) + NEGLIGIBLE_USE_S
        self._totals_s = {project: used_s + NEGLIGIBLE_USE_S for project, used_s in self._by_project.items()}

    def charge(self, party: Party) -> None:
        """Count a run that starts now."""
        project = party[0]
        self._by_party[party] = self._by_party.get(party, 0.0) + CHARGE_S
        self._by_project[project] = self._by_project.get(project, 0.0) + CHARGE_S

    def delay_s(self, party: Party) -> float:
        """Return how many seconds later the party's cells go because of what its project and its owner have used.

        At most 2 * SHARE_S, apart from the runs of this round.
        """
        project = party[0]
        of_project = self._by_project.get(project, 0.0) / self._total_s
        of_owner = self._by_party.get(party, 0.0) / self._totals_s.get(project, NEGLIGIBLE_USE_S)
        return SHARE_S * (of_project + of_owner)
