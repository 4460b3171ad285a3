"""The time by which retention counts ages: the system's, unless there is reason to doubt it.

A wrong clock must not delete a farm's history. Within a run of the server, ages grow only as fast as time passes, however the
system's time is set. The last time that was trusted is stored; a server that starts before it, or long after it, may have a wrong
clock, so people get a day to notice that.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import Connection, select

from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.server.state.steady_clock import elapsed_s
from etfarm.wire.errors import FarmError, Kind

log = structlog.get_logger()

TOLERANCE: Final = timedelta(hours=1)
"""Difference between two times that nobody has to explain."""
LONG_AWAY: Final = timedelta(days=7)
"""Time between the last trusted time and the server's start from which on the clock is doubted."""
HOLD: Final = timedelta(days=1)
"""Time for which a server whose clock is doubted deletes nothing by age."""
_NAME: Final = "retention"


class ClockImplausible(FarmError):
    """A deletion by age while the server's clock is in doubt."""

    reason = "CLOCK_IMPLAUSIBLE"
    kind = Kind.FAILED_PRECONDITION


class RetentionClock:
    """The time by which ages count.

    Args:
        now: returns the system's time in UTC.
        elapsed: returns seconds that pass steadily, whatever the system's time.
    """

    def __init__(self, now: Callable[[], datetime], elapsed: Callable[[], float] = elapsed_s) -> None:
        self.now = now
        self._elapsed = elapsed
        self._last: datetime | None = None
        """The last time that was trusted: by an earlier server, or when the clock was set right."""
        self._start = now(), elapsed()
        self._is_jump_logged = False

    async def load(self, database: Database) -> None:
        """Read the last time that an earlier server trusted; without any, that of the newest record."""
        self._last = await database.read(_read_last)

    async def save(self, database: Database) -> None:
        """Store the present time for the next server.

        Raises:
            ClockImplausible: the system's time is in doubt.
        """
        statement = insert(schema.trusted_times).values(name=_NAME, at=self.time())
        upsert = statement.on_conflict_do_update(index_elements=["name"], set_={"at": statement.excluded.at})
        await database.write(lambda connection: connection.execute(upsert))

    def time(self, *, dry_run: bool = False) -> datetime:
        """Return the present time for ages: never later than the server's start and the time elapsed since.

        Args:
            dry_run: whether nothing is deleted, so that a time in doubt will do.

        Raises:
            ClockImplausible: the system's time is in doubt.
        """
        now, elapsed_s = self.now(), self._elapsed()
        began, began_s = self._start
        elapsed = timedelta(seconds=elapsed_s - began_s)
        if self._last is not None and not _is_near(began, self._last):
            if _is_near(now, self._last + elapsed):
                # It was set right since the server's start.
                began, elapsed = now, timedelta()
                self._start, self._last = (now, elapsed_s), now
            elif elapsed < HOLD and not dry_run:
                raise self._implausible(began, self._last, HOLD - elapsed)
        ahead = now - (began + elapsed)
        if ahead > TOLERANCE and not self._is_jump_logged:
            self._is_jump_logged = True
            log.warning("the clock was set forward; retention counts ages as before until the server's next start", by=str(ahead))
        return min(now, began + elapsed)

    def _implausible(self, began: datetime, last: datetime, left: timedelta) -> ClockImplausible:
        days = abs(began - last).days
        how_far = f"{days} day{'' if days == 1 else 's'}" if days else "hours"
        when = "after" if began > last else "before"
        return ClockImplausible(
            f"By its clock, the server started at {_text(began)}, {how_far} {when} its last known time, {_text(last)}.",
            f"If the clock is wrong, set it. Else wait: deletion by age begins in {left.total_seconds() / 3600:.0f} hours.",
        )


def _is_near(at: datetime, last: datetime) -> bool:
    """Return whether a time follows the last trusted one without a long absence."""
    return -TOLERANCE <= at - last <= LONG_AWAY


def _read_last(connection: Connection) -> datetime | None:
    """Return the stored time; without any, that of the newest job or entry of the audit log; None without any."""
    times, jobs, audit = schema.trusted_times.c, schema.jobs.c, schema.audit.c
    stored: datetime | None = connection.execute(select(times.at).where(times.name == _NAME)).scalar()
    if stored is not None:
        return stored
    queries = (
        select(jobs.submitted_at).order_by(jobs.submitted_at.desc()).limit(1),
        select(audit.at).order_by(audit.number.desc()).limit(1),
    )
    return max((at for query in queries if (at := connection.execute(query).scalar()) is not None), default=None)


def _text(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
