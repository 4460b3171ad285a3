"""Logs of jobs: the output of their compilers and runners."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final

import structlog
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from etfarm.server.jobs import model
from etfarm.server.jobs.records.rows import job_row
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import LogSource
from etfarm.v1.job_pb2 import JobEvent, LogLine
from etfarm.wire.errors import EtfarmError
from etfarm.wire.words import word_of

log = structlog.get_logger()

_PAGE = 500
_PAGE_CHARACTERS: Final = 128 << 10
"""Maximum number and size of the lines that are in memory for a reader, but for one line: readers may stop reading for ever."""

MAX_LINES: Final = 100_000
MAX_CHARACTERS: Final = 32 << 20
"""Maximum size of one job's log; its last line then states that the log is full."""

_MOST_ENDED: Final = 1_000
_LINE: Final = 8000
"""Maximum number of characters of a line."""

_SOURCES: Final = {word_of(LogSource.DESCRIPTOR, source): source for source in LogSource.values()}
"""Sources by the word that the database has for them."""


class JobLog:
    """The lines that compilers and runners printed, numbered per job and written in batches."""

    def __init__(self, database: Database, announcer: Announcer, now: Callable[[], datetime]) -> None:
        self._database = database
        self._announcer = announcer
        self._now = now
        self._numbers: dict[str, int] = {}
        self._characters: dict[str, int] = {}
        self._ended: deque[str] = deque()
        """Jobs that have ended, whose numbers are known for a while: a line may still be on its way."""
        self._waiting: list[dict[str, object]] = []
        self._flushing: asyncio.Task[None] | None = None
        announcer.on_event(self._note_end)

    def _note_end(self, job_id: str, event: JobEvent) -> None:
        if event.WhichOneof("event") == "job" and model.is_terminal(event.job_state):
            self.end(job_id)

    def end(self, job_id: str) -> None:
        """Forget the numbering of a job, once many others have ended after it."""
        self._ended.append(job_id)
        if len(self._ended) > _MOST_ENDED:
            oldest = self._ended.popleft()
            self._numbers.pop(oldest, None)
            self._characters.pop(oldest, None)

    def add(self, job_id: str, cell_id: str, source: LogSource.ValueType, text: str) -> None:
        """Add a line. Watchers receive it at once; it is written to the database soon."""
        number, characters = self._numbers.get(job_id, 0) + 1, self._characters.get(job_id, 0)
        if number > MAX_LINES or characters > MAX_CHARACTERS:
            return
        self._numbers[job_id] = number
        text = text[:_LINE]
        self._characters[job_id] = characters + len(text)
        if number == MAX_LINES or characters + len(text) > MAX_CHARACTERS:
            cell_id, source, text = "", LogSource.LOG_SOURCE_FARM, "The job's log is full: further lines are dropped."
        at = self._now()
        row = {"job_id": job_id, "number": number, "at": at, "cell_id": cell_id, "text": text}
        self._waiting.append(row | {"source": word_of(LogSource.DESCRIPTOR, source)})
        line = LogLine(number=number, cell_id=cell_id, source=source, text=text)
        line.time.FromDatetime(at)
        self._announcer.announce(job_id, JobEvent(time=line.time, log=line))
        self._begin()

    async def resume(self, job_id: str) -> None:
        """Continue the numbering of an earlier server."""
        table = schema.log_lines.c
        query = select(func.max(table.number), func.sum(func.length(table.text))).where(table.job_id == job_id)
        last, characters = await self._database.read(lambda connection: connection.execute(query).one())
        self._numbers[job_id], self._characters[job_id] = int(last or 0), int(characters or 0)

    async def flush(self) -> None:
        """Write all lines so far. The write continues if the caller is cancelled in the meantime."""
        while self._waiting or (self._flushing is not None and not self._flushing.done()):
            await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._write(), name="log-flush")
        return self._flushing

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._database.write(partial(_insert, rows=batch))
            except (EtfarmError, SQLAlchemyError):
                # Lost log lines must not fail a job.
                log.exception("log lines are lost", lines=len(batch))

    async def tail(self, job_id: str, cell_id: str, *, follow: bool) -> AsyncIterator[LogLine]:
        """Yield the lines of a cell (all cells if `cell_id` is empty); with `follow`, also new ones until the job is terminal."""
        with self._announcer.subscribe(job_id) as subscription:
            await self.flush()
            job = await self._database.read(partial(job_row, job_id=job_id, with_spec=False))
            follow = follow and not model.is_terminal(job.state)
            seen = 0
            while lines := await self._database.read(partial(_lines, job_id=job_id, after=seen)):
                for line in lines:
                    seen = line.number
                    if cell_id in ("", line.cell_id):
                        yield line
            while follow:
                for event in await subscription.take():
                    kind = event.WhichOneof("event")
                    if kind == "log" and event.log.number > seen and cell_id in ("", event.log.cell_id):
                        yield event.log
                    elif kind == "job" and model.is_terminal(event.job_state):
                        return


def _insert(connection: Connection, rows: list[dict[str, object]]) -> None:
    connection.execute(schema.log_lines.insert(), rows)


def _lines(connection: Connection, job_id: str, after: int) -> Sequence[LogLine]:
    table = schema.log_lines
    query = select(table).where(table.c.job_id == job_id, table.c.number > after).order_by(table.c.number).limit(_PAGE)
    lines: list[LogLine] = []
    left = _PAGE_CHARACTERS
    for row in connection.execute(query):
        source = _SOURCES.get(row.source, LogSource.LOG_SOURCE_UNSPECIFIED)
        lines.append(LogLine(number=row.number, cell_id=row.cell_id, source=source, text=row.text, time=row.at))
        left -= len(row.text)
        if left < 0:
            break
    return lines
