"""When artifacts and cached results were last used, so that nothing is deleted that a request may be about to name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final

from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import greatest, insert

ARTIFACT: Final = "artifact"
"""Kind of the uses of artifacts. Other kinds are those of cached results."""

LEASE_S: Final = 3600.0
"""Time for which an artifact is kept after its last use: a client that was told that it is stored may submit a job until then."""

GRANULARITY_S: Final = 600.0
"""Time within which repeated uses are not written again."""


class Uses:
    """The `uses` table. `mark` never waits; marks count at once in this process, and in a later one once they are written.

    Marks that the table has are kept in memory for minutes only: a farm stores several artifacts a second.

    Args:
        clock: returns seconds since the epoch.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock
        self._marked: dict[tuple[str, str], float] = {}
        self._written: dict[tuple[str, str], float] = {}

    def mark(self, key: str, kind: str = ARTIFACT) -> None:
        """Record that an artifact, or a cached result of another kind, is used now."""
        self._marked[kind, key] = self.clock()

    def marked_at_s(self, digest: str) -> float:
        """Return when this process recorded the last use of an artifact, in seconds since the epoch; 0 if the table has it."""
        return self._marked.get((ARTIFACT, digest), 0.0)

    def is_marked_since(self, digest: str, at_s: float) -> bool:
        """Return whether this process has recorded a use of the artifact at or after a time, which the table may not have."""
        return self.marked_at_s(digest) >= at_s

    async def write(self, digests: Iterable[str] | None = None) -> None:
        """Write the marks of some artifacts, or all marks, that are not written yet."""
        keys = list(self._marked) if digests is None else [key for each in digests if (key := (ARTIFACT, each)) in self._marked]
        marks = {key: self._marked[key] for key in keys}
        new = {key: at_s for key, at_s in marks.items() if at_s - self._written.get(key, 0.0) > GRANULARITY_S}
        if digests is None:
            # Repeated uses soon after a write are written when they are the last: otherwise they would be kept for hours.
            last_s = self.clock() - GRANULARITY_S
            new |= {key: at_s for key, at_s in marks.items() if at_s < last_s and at_s > self._written.get(key, 0.0)}
        if new:
            rows = [{"kind": kind, "id": key, "used_at": datetime.fromtimestamp(at_s, UTC)} for (kind, key), at_s in new.items()]
            statement = insert(schema.uses)
            # The clock of a server that started with a wrong time stays behind: what it uses must not look long unused later.
            latest = greatest(schema.uses.c.used_at, statement.excluded.used_at)
            upsert = statement.on_conflict_do_update(index_elements=["kind", "id"], set_={"used_at": latest})
            await self._database.write(lambda connection: connection.execute(upsert, rows))
            self._written.update(new)
        if digests is None:
            self._forget(self.clock())

    def _forget(self, now_s: float) -> None:
        """Forget marks that have expired, or that the table has and whoever read it before has acted on."""
        for key, at_s in [*self._marked.items()]:
            age_s = now_s - at_s
            if age_s > 2 * LEASE_S or (age_s > GRANULARITY_S and self._written.get(key) == at_s):
                del self._marked[key]
        for key in [key for key, at_s in self._written.items() if now_s - at_s > 2 * GRANULARITY_S and key not in self._marked]:
            del self._written[key]
