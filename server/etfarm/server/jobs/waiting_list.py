"""The queue as callers see it: what waits for a device in their projects, and how much waits in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from etfarm.server.access.scope import Scope
from etfarm.server.jobs.cells.placement import Placement
from etfarm.v1.job_pb2 import ListQueueResponse, QueuedRun

KEPT_S: Final = 1.0
"""Time for which a list is valid, at least: callers may ask often."""

_PAUSE: Final = 20
"""Time for which a list is valid, as a multiple of the time that it took: with thousands of waiting runs some tenths of a second,
in which the server does nothing else."""


class WaitingList:
    """Pages of the queue.

    Args:
        clock: returns seconds on a monotonic clock.
    """

    def __init__(self, placement: Placement, clock: Callable[[], float]) -> None:
        self._placement = placement
        self._clock = clock
        self._entries: Sequence[QueuedRun] = ()
        self._valid_until_s: float | None = None

    def page(self, start: int, size: int, scope: Scope) -> ListQueueResponse:
        """Return a page of the runs of a scope.

        Args:
            start: the rank after which the page begins.
            size: maximum number of runs.
            scope: the caller's projects.
        """
        own = [entry for entry in self._all() if scope.allows(entry.project)]
        after = [entry for entry in own if entry.rank > start]
        following = str(after[size - 1].rank) if len(after) > size else ""
        return ListQueueResponse(runs=after[:size], next_page_token=following, other_runs=len(self._entries) - len(own))

    def _all(self) -> Sequence[QueuedRun]:
        now_s = self._clock()
        if self._valid_until_s is None or now_s >= self._valid_until_s:
            self._entries = self._placement.entries()
            ended_s = self._clock()
            self._valid_until_s = ended_s + max(KEPT_S, _PAUSE * (ended_s - now_s))
        return self._entries
