"""Quotas of the work that one user or project may have in progress. The defaults suffice for a farm of 300 phones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Final

from sqlalchemy import Connection, bindparam, func, literal_column, select, union_all

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.jobs import model
from etfarm.server.state import schema
from etfarm.v1.common_pb2 import CellState
from etfarm.v1.job_pb2 import Job
from etfarm.wire.errors import EtfarmError, error_for

_TERMINAL: Final = [CellState.Name(state).removeprefix("CELL_STATE_") for state in sorted(model.TERMINAL)]
_IS_OF: Final = {"user": schema.jobs.c.owner == bindparam("owner"), "project": schema.jobs.c.project == bindparam("project")}
_IS_LIVE: Final = schema.jobs.c.finished_at.is_(None)
_SPEC_BYTES: Final = func.coalesce(func.sum(func.length(schema.jobs.c.spec)), 0)
_CELLS: Final = schema.cells.join(schema.jobs, schema.jobs.c.id == schema.cells.c.job_id)
# One statement for both holders, since every job that is submitted takes it.
_LIVE: Final = union_all(
    *(
        select(literal_column(f"'{kind}'").label("kind"), func.count().label("jobs"), _SPEC_BYTES.label("spec_bytes"),
               literal_column("0").label("cells")).where(_IS_LIVE, is_of)
        for kind, is_of in _IS_OF.items()
    ),
    *(
        select(literal_column(f"'{kind}'"), literal_column("0"), literal_column("0"), func.count())
        .select_from(_CELLS).where(_IS_LIVE, is_of, schema.cells.c.state.not_in(_TERMINAL))
        for kind, is_of in _IS_OF.items()
    ),
)  # fmt: skip


def quota_exceeded(quota: str, whose: str, what: str, limit: int, got: int, remedy: str) -> EtfarmError:
    """Return the error of a user or project that would exceed a quota."""
    return error_for(
        "QUOTA_EXCEEDED",
        f"{whose} may have at most {limit:,} {what}, and would have {got:,}.",
        remedy,
        quota=quota,
        limit=limit,
        got=got,
    )


@dataclass(frozen=True)
class Quotas:
    """Limits of the work in progress."""

    live_jobs_per_user: int = 1_000
    live_jobs_per_project: int = 5_000
    live_cells_per_user: int = 20_000
    live_cells_per_project: int = 50_000
    live_spec_bytes_per_user: int = 512 << 20
    live_spec_bytes_per_project: int = 900 << 20
    """Total size of live jobs' specs, which are in memory. The spec of a job with 10,000 calibration samples has 700 kB."""
    sessions_per_user: int = 1_000
    """Number of sessions that are open or wait for a device; a data set over all phones uses one for each."""
    streams_per_user: int = 1_000
    """Number of watched jobs and followed logs."""
    health_checks_per_user: int = 8
    """Number of requested health runs that run or wait; they overtake the queue."""

    @classmethod
    def of(cls, settings: list[str]) -> Quotas:
        """Return the default quotas, changed by settings of the form NAME=N.

        Raises:
            UNKNOWN_QUOTA: a setting names no quota, or its number is not in 0 to 999,999,999.
        """
        names = [field.name for field in fields(cls)]
        quotas = cls()
        for setting in settings:
            name, _, number = setting.partition("=")
            if name not in names or not (number.isascii() and number.isdecimal() and 0 < len(number) < 10):
                raise error_for(
                    "UNKNOWN_QUOTA", f"{setting[:80]!r} does not set a quota.", f"Give NAME=N with one of {', '.join(names)}."
                )
            quotas = replace(quotas, **{name: int(number)})
        return quotas

    def check_job(self, connection: Connection, job: Job) -> None:
        """Raise an error if a job would exceed a quota. Call it in the transaction that writes the job.

        Raises:
            QUOTA_EXCEEDED: the owner or the project would exceed a quota.
        """
        holders = {"owner": job.owner, "project": job.project or DEFAULT_PROJECT}
        remedy = "Wait until some are done, or cancel them with `etfarm jobs cancel`."
        added = {"jobs": 1, "cells": len(job.cells), "spec_bytes": job.spec.ByteSize()}
        live: Counter[tuple[str, str]] = Counter()
        for row in connection.execute(_LIVE, holders).mappings():
            live.update({(row["kind"], what): row[what] for what in added})
        for kind, name in zip(_IS_OF, holders.values(), strict=True):
            holder = f"The {kind} {name}"
            for what, number in added.items():
                got = live[kind, what] + number
                quota = f"live_{what}_per_{kind}"
                if got > getattr(self, quota):
                    words = "bytes of live jobs' specs" if what == "spec_bytes" else f"live {what}"
                    raise quota_exceeded(quota, holder, words, getattr(self, quota), got, remedy)


class Counted:
    """Number of open resources by principal, limited by one quota."""

    def __init__(self, quota: str, what: str, limit: int) -> None:
        self._quota = quota
        self._what = what
        self._limit = limit
        self._open: Counter[str] = Counter()

    @contextmanager
    def hold(self, principal: str) -> Iterator[None]:
        """Count one more resource while the context is active.

        Raises:
            QUOTA_EXCEEDED: the principal already holds the maximum number.
        """
        got = self._open[principal] + 1
        if got > self._limit:
            remedy = "Close some of those that are open, or wait until they have ended."
            raise quota_exceeded(self._quota, f"The user {principal}", self._what, self._limit, got, remedy)
        self._open[principal] = got
        try:
            yield
        finally:
            self._open[principal] -= 1
            if not self._open[principal]:
                del self._open[principal]
