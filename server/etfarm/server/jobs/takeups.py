"""Jobs that may crash the server: they are counted, handled one at a time, and set aside after the third crash.

While a server handles a job, and the job does not only wait, a file in its data folder has the job's name (`Hands`). If the
server dies and leaves evidence that it was not ended from outside (`etfarm.server.operation.death`), its successor in that folder
counts the jobs of these files. Without evidence, nothing is counted. All jobs are resumed at once, but a job with a count is a
suspect: a server handles one suspect at a time. After that it decrements the suspect's count, so that only the job that causes
the crashes keeps one. A server that survives for a while clears all counts.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, Update, select, update

from etfarm.server.state import schema
from etfarm.server.state.engine import Database, retry_until_written
from etfarm.wire.errors import EtfarmError, error_for

log = structlog.get_logger()

MOST: Final = 3
"""Number of crashes after which a job is set aside. The last one counts only for a job that excluded the other suspects."""

CARE_S: Final = 10.0
"""Maximum time for which a suspect excludes the others, in seconds. One that would be set aside next excludes them to its end."""

STABLE_S: Final = 600.0
"""Time after which a surviving server clears the counts, in seconds."""

IN_HAND: Final = "in-hand"
"""Folder in the data folder that has a file for each job that the server handles."""

_UNCOUNTED: Final = "server.uncounted"
"""File in the data folder that has, as JSON, the jobs that a death is yet to be counted for, with their limits."""

_ALONE: Final = ".alone"
"""Suffix of the file of a suspect that excludes all others."""


def set_aside(job_id: str) -> EtfarmError:
    """Return the error of a job during whose handling the server crashed three times."""
    return error_for(
        "SET_ASIDE",
        f"The server died {MOST} times while it was handling job {job_id}, which is now set aside so that other "
        "jobs can continue.",
        "Tell the farm's admin, who finds the cause in the server's log. Submit the job again once the cause is fixed.",
        job=job_id, times=MOST,
    )  # fmt: skip


def find_left_in_hand(data: Path) -> dict[str, int]:
    """Return the jobs that the former server of a data folder was handling when it ended.

    Returns:
        The count, by job id, beyond which the death of that server does not raise the job's count.
    """
    folder = data / IN_HAND
    folder.mkdir(exist_ok=True, mode=0o700)
    return {file.name.removesuffix(_ALONE): MOST if file.name.endswith(_ALONE) else MOST - 1 for file in sorted(folder.iterdir())}


def take_left_in_hand(data: Path) -> dict[str, int]:
    """Return as `find_left_in_hand`, and forget the jobs."""
    left = find_left_in_hand(data)
    for file in (data / IN_HAND).iterdir():
        file.unlink()
    return left


def keep_uncounted(data: Path, suspects: Mapping[str, int]) -> dict[str, int]:
    """Record jobs that a death is to be counted for, until `forget_uncounted`; return them with those of earlier deaths.

    A server may end before it reaches the database, and its successor finds no other trace of them.
    """
    file = data / _UNCOUNTED
    try:
        kept = {str(job): int(limit) for job, limit in json.loads(file.read_text()).items()} | dict(suspects)
    except (OSError, ValueError, AttributeError, TypeError):  # there is none, or it is damaged
        kept = dict(suspects)
    if suspects:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(kept))
        part.replace(file)
    return kept


def forget_uncounted(data: Path) -> None:
    """Forget the jobs of `keep_uncounted`, once the database has their counts."""
    (data / _UNCOUNTED).unlink(missing_ok=True)


class Takeups:
    """Counts of the crashes of servers by live jobs, in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def counts(self) -> dict[str, int]:
        """Return the counts of the live jobs that have one, by job id."""
        jobs = schema.jobs.c
        query = select(jobs.id, jobs.takeups).where(jobs.finished_at.is_(None), jobs.takeups > 0)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.id: row.takeups for row in rows}

    async def count(self, suspects: Mapping[str, int]) -> None:
        """Increment the counts of live jobs durably, each up to a limit.

        Args:
            suspects: limits by job id, as of `take_left_in_hand`.
        """
        jobs = schema.jobs.c
        changes = [
            update(schema.jobs)
            .where(jobs.id == job_id, jobs.finished_at.is_(None), jobs.takeups < limit)
            .values(takeups=jobs.takeups + 1)
            for job_id, limit in suspects.items()
        ]
        await self._write(*changes, durable=True)

    async def uncount(self, job_id: str) -> None:
        """Decrement a job's count, after it was handled."""
        jobs = schema.jobs.c
        await self._write(update(schema.jobs).where(jobs.id == job_id, jobs.takeups > 0).values(takeups=jobs.takeups - 1))

    async def clear(self) -> None:
        """Reset the counts of all live jobs."""
        jobs = schema.jobs.c
        await self._write(update(schema.jobs).where(jobs.finished_at.is_(None), jobs.takeups > 0).values(takeups=0))

    async def _write(self, *changes: Update, durable: bool = False) -> None:
        def work(connection: Connection) -> None:
            for change in changes:
                connection.execute(change)

        if changes:
            await self._database.write(work, durable=durable)


class Hands:
    """The jobs that the server handles: it compiles them, or checks or analyzes their results.

    A job's file outlives the process, but need not outlive the machine: files are not synced.

    Args:
        data: the data folder.
    """

    def __init__(self, takeups: Takeups, data: Path) -> None:
        self._takeups = takeups
        self._data, self._folder = data, data / IN_HAND
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._counts: dict[str, int] = {}
        """Counts of the suspects by job id."""
        self._files: dict[str, Path] = {}
        """Files of the jobs that go on; their names do not change with the counts."""
        self._held: Counter[str] = Counter()
        """Number of blocks of `hold` by job id."""
        self._going_on: Counter[str] = Counter()
        """Number of those that do not wait."""
        self._waiting: Counter[str] = Counter()
        self._first: str | None = None
        """The suspect that excludes the others."""
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    async def begin(self, suspects: Mapping[str, int]) -> None:
        """Read the counts, before any job is resumed.

        Args:
            suspects: the jobs that the death of the former server counts for, as of `take_left_in_hand`.
        """
        await self._takeups.count(suspects)
        forget_uncounted(self._data)
        self._counts = await self._takeups.counts()

    def is_over(self, job_id: str) -> bool:
        """Return whether a job is to be set aside."""
        return self._counts.get(job_id, 0) >= MOST

    def is_waiting(self, job_id: str) -> bool:
        """Return whether a job waits until the server has handled another suspect."""
        return self._waiting[job_id] > 0

    @asynccontextmanager
    async def hold(self, job_id: str) -> AsyncIterator[Callable[[bool], None]]:
        """Handle a job until the end of the block. A suspect waits for its turn first.

        Yield a function to be called with False when the job begins to wait for something within the block, and with True when
        it goes on: a server that dies meanwhile does not die of this job.
        """
        self._waiting[job_id] += 1
        try:
            while not self._may_begin(job_id):
                await self._changed.wait()
        finally:
            self._waiting[job_id] -= 1
            if not self._waiting[job_id]:
                del self._waiting[job_id]
        goes_on = False

        def turn(has_turn: bool) -> None:
            nonlocal goes_on
            if has_turn != goes_on:
                goes_on = has_turn
                (self._record if has_turn else self._erase)(job_id)

        self._take(job_id)
        turn(True)
        try:
            yield turn
        finally:
            turn(False)
            self._lay_down(job_id)
        if job_id in self._counts and job_id not in self._held:
            await self._uncount(job_id)

    async def forgive(self) -> None:
        """Clear the counts whenever the server has survived for a while and no suspect is or waits to be handled."""
        while True:
            await asyncio.sleep(STABLE_S)
            if self._counts.keys() & (self._held.keys() | self._waiting.keys()):
                continue
            await retry_until_written(self._takeups.clear)
            self._counts.clear()

    def _is_last_time(self, job_id: str) -> bool:
        return self._counts.get(job_id, 0) >= MOST - 1

    def _may_begin(self, job_id: str) -> bool:
        if job_id not in self._counts or job_id in self._held:
            return True
        if self._is_last_time(job_id):
            return not self._counts.keys() & self._held.keys()
        return self._first is None

    def _take(self, job_id: str) -> None:
        self._held[job_id] += 1
        if self._held[job_id] > 1:
            return
        if job_id in self._counts:
            log.info("handling a job that a server died with", job=job_id, times=self._counts[job_id])
            self._first = job_id
            if not self._is_last_time(job_id):
                self._timer = asyncio.get_running_loop().call_later(CARE_S, self._admit_others)

    def _lay_down(self, job_id: str) -> None:
        self._held[job_id] -= 1
        if self._held[job_id]:
            return
        del self._held[job_id]
        if self._first == job_id:
            self._admit_others()
        elif job_id in self._counts:
            self._wake()

    def _record(self, job_id: str) -> None:
        self._going_on[job_id] += 1
        if self._going_on[job_id] > 1:
            return
        file = self._files[job_id] = self._folder / f"{job_id}{_ALONE if self._is_last_time(job_id) else ''}"
        try:
            file.touch(mode=0o600)
        except OSError as error:
            log.warning("a job that is being handled cannot be recorded", job=job_id, why=str(error))

    def _erase(self, job_id: str) -> None:
        self._going_on[job_id] -= 1
        if self._going_on[job_id]:
            return
        del self._going_on[job_id]
        try:
            self._files.pop(job_id).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a job that is no longer being handled cannot be removed from the record", job=job_id, why=str(error))

    def _admit_others(self) -> None:
        self._first = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _uncount(self, job_id: str) -> None:
        self._counts[job_id] -= 1
        if not self._counts[job_id]:
            del self._counts[job_id]
        await retry_until_written(partial(self._takeups.uncount, job_id))
