"""What refers to an artifact: jobs with their reports, and cached results, by the digests in their stored messages.

The digests are read from the serialized messages, whatever their fields, so that a new field cannot be forgotten. Reading them
takes long, so they are kept in a table, whose rows triggers of the database outdate when a message changes.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, Table, delete, exists, func, select, update

from etfarm.server.retention.occupancy import JOB, LINE_BYTES, database_bytes
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert

CACHES: Final[dict[str, Table]] = {
    "compilation": schema.compilations,
    "stages": schema.stage_results,
    "analysis": schema.analyses,
}
"""Tables of cached results by the kind of referrer."""

_DIGEST: Final = re.compile(rb"@([0-9a-f]{64})")
"""A text of 64 characters in a serialized message, which "@" precedes as its length."""

_ROWS: Final = 100
"""Number of referrers, or of rows of one, that are read at a time."""

_PAGE_BYTES: Final = 8 << 20
"""Size of the messages of a referrer after which others may read the database."""

Gate = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context in which a short piece of background work may run."""


@dataclass
class _Contents:
    """What the messages of a referrer contain."""

    digests: set[str] = field(default_factory=set)
    size_bytes: int = 0
    """Of the messages that were read; then what a job occupies."""
    log_bytes: int = 0


def digests_in(body: bytes) -> Iterator[str]:
    """Yield the sha256 digests among the texts of a serialized message; other digests than those of artifacts included."""
    for match in _DIGEST.finditer(body):
        yield match[1].decode()


class References:
    """The tables `referrers` and `artifact_references`.

    Args:
        gate: see `Gate`.
    """

    def __init__(self, database: Database, gate: Gate) -> None:
        self._database = database
        self.gate = gate
        self._turn = asyncio.Lock()

    async def update(self) -> None:
        """Read all referrers whose references are missing or out of date.

        A referrer that changes in the meantime may be out of date again. Its former references count until it is read again; the
        artifacts that it newly refers to were used less than a lease ago.
        """
        async with self._turn:
            outdated = await self._database.read(_outdated)
            for start in range(0, len(outdated), _ROWS):
                await self._read(outdated[start : start + _ROWS])

    async def _read(self, batch: Sequence[tuple[str, str]]) -> None:
        claims = [{"kind": kind, "id": key, "size_bytes": None, "log_bytes": None} for kind, key in batch]
        contents = {each: _Contents() for each in batch}
        work: deque[_Work] = deque()
        async with self.gate():
            claim = insert(schema.referrers).on_conflict_do_nothing()
            await self._database.write(lambda connection: connection.execute(claim, claims))
        for kind in dict.fromkeys(kind for kind, _ in batch):
            of_kind = {key: each for (other, key), each in contents.items() if other == kind}
            async with self.gate():
                is_read = await self._database.read(partial(_read_small, kind=kind, contents=of_kind))
                if not is_read:
                    work.extend(_Work(each, page) for key, each in of_kind.items() for page in _pages(kind, key))
        while work:
            async with self.gate():
                await self._database.read(lambda connection: _read_some(connection, work))
        if jobs := {key: each for (kind, key), each in contents.items() if kind == JOB}:
            async with self.gate():
                counts = {key: len(each.digests) for key, each in jobs.items()}
                sizes = await self._database.read(partial(database_bytes, references=counts))
            for key, each in jobs.items():
                each.size_bytes = sizes[key]
        async with self.gate():
            await self._database.write(lambda connection: _record_all(connection, contents))

    async def of(self, digest: str, limit: int) -> list[tuple[str, str]]:
        """Return (kind, id) of what refers to an artifact, at most `limit`."""
        table = schema.artifact_references.c
        query = select(table.kind, table.id).where(table.digest == digest).order_by(table.kind.desc(), table.id).limit(limit)
        return [(row.kind, row.id) for row in await self._database.read(lambda c: c.execute(query).all())]


def is_referred_to(digest: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the SQL condition that something refers to the artifact."""
    return exists().where(schema.artifact_references.c.digest == digest)


def is_needed_by(project: ColumnElement[str], digest: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the SQL condition that a job of a project, or a compilation that it requested, refers to the artifact."""
    refers, jobs, requested = schema.artifact_references.c, schema.jobs.c, schema.project_compilations.c
    by_job = exists().where(refers.digest == digest, refers.kind == JOB, jobs.id == refers.id, jobs.project == project)
    by_compilation = exists().where(
        refers.digest == digest, refers.kind == "compilation", requested.key == refers.id, requested.project == project
    )
    return by_job | by_compilation


def _outdated(connection: Connection) -> list[tuple[str, str]]:
    known = schema.referrers.c
    outdated: list[tuple[str, str]] = []
    for kind, key in ((JOB, schema.jobs.c.id), *((kind, table.c.key) for kind, table in CACHES.items())):
        is_read = exists().where(known.kind == kind, known.id == key, known.size_bytes.is_not(None))
        outdated += [(kind, each) for each in connection.execute(select(key).where(~is_read)).scalars()]
    return outdated


Page = Callable[[Connection, Any, _Contents], Any]
"""Adds the next messages after a position to the contents; returns the position after them, None at the end."""


@dataclass
class _Work:
    """One kind of messages of a referrer, which are to be added to its contents."""

    contents: _Contents
    page: Page
    position: Any = None


def _read_some(connection: Connection, work: deque[_Work]) -> None:
    """Do the first parts of the work, up to a limit of bytes."""
    left = _PAGE_BYTES
    while work and left > 0:
        part = work[0]
        before = part.contents.size_bytes
        part.position = part.page(connection, part.position, part.contents)
        left -= part.contents.size_bytes - before
        if part.position is None:
            work.popleft()


def _read_small(connection: Connection, kind: str, contents: Mapping[str, _Contents]) -> bool:
    """Read referrers with few queries if their messages are small together; return whether they are."""
    keys = list(contents)
    sources = _sources(kind)
    sizes = [
        select(func.coalesce(func.sum(func.length(body)), 0)).select_from(table).where(key.in_(keys))
        for table, key, body in sources
    ]
    if sum(connection.execute(size).scalar_one() for size in sizes) > _PAGE_BYTES:
        return False
    for table, key, body in sources:
        for row in connection.execute(select(key.label("key"), body.label("body")).select_from(table).where(key.in_(keys))):
            contents[row.key].digests.update(digests_in(row.body or b""))
            contents[row.key].size_bytes += len(row.body or b"")
    if kind == JOB:
        lines = schema.log_lines.c
        of_jobs = select(lines.job_id, func.sum(_line_size()).label("size")).where(lines.job_id.in_(keys))
        for row in connection.execute(of_jobs.group_by(lines.job_id)):
            contents[row.job_id].log_bytes = row.size
    return True


def _sources(kind: str) -> list[tuple[FromClause, ColumnElement[str], ColumnElement[Any]]]:
    """Return the tables with the messages of a kind of referrers, and their columns of the referrer's id and the message."""
    if kind != JOB:
        table = CACHES[kind]
        return [(table, table.c.key, table.c.body)]
    jobs, cells, attempts, reports = schema.jobs, schema.cells, schema.attempts, schema.reports
    return [
        (jobs, jobs.c.id, jobs.c.spec),
        (cells, cells.c.job_id, cells.c.body),
        (reports, reports.c.job_id, reports.c.body),
        (attempts.join(cells, cells.c.id == attempts.c.cell_id), cells.c.job_id, attempts.c.result),
    ]


def _pages(kind: str, key: str) -> Iterator[Page]:
    if kind != JOB:
        table = CACHES[kind]
        yield _paged(table.c.key, table.c.body, table.c.key == key)
        return
    jobs, cells, attempts, reports = schema.jobs.c, schema.cells.c, schema.attempts.c, schema.reports.c
    yield _paged(jobs.id, jobs.spec, jobs.id == key)
    yield _paged(cells.id, cells.body, cells.job_id == key)
    yield _paged(reports.id, reports.body, reports.job_id == key)
    of_job = attempts.cell_id.in_(select(cells.id).where(cells.job_id == key))
    yield _paged(attempts.id + attempts.cell_id, attempts.result, of_job)
    yield _log_size(key)


def _line_size() -> ColumnElement[int]:
    return func.length(schema.log_lines.c.text) + LINE_BYTES


def _log_size(job_id: str) -> Page:
    total = select(func.coalesce(func.sum(_line_size()), 0)).where(schema.log_lines.c.job_id == job_id)

    def page(connection: Connection, after: Any, contents: _Contents) -> None:
        contents.log_bytes = int(connection.execute(total).scalar_one())

    return page


def _paged(key: ColumnElement[str], body: ColumnElement[Any], condition: ColumnElement[bool]) -> Page:
    def page(connection: Connection, after: Any, contents: _Contents) -> Any:
        query = select(key.label("position"), body.label("body")).where(condition).order_by(key).limit(_ROWS)
        if after is not None:
            query = query.where(key > after)
        left = _PAGE_BYTES
        for count, row in enumerate(connection.execute(query), 1):
            contents.digests.update(digests_in(row.body or b""))
            contents.size_bytes += len(row.body or b"")
            left -= len(row.body or b"")
            if left < 0 or count == _ROWS:
                return row.position
        return None

    return page


def _record_all(connection: Connection, contents: Mapping[tuple[str, str], _Contents]) -> None:
    rows: list[dict[str, str]] = []
    for (kind, key), each in contents.items():
        if _record(connection, kind, key, each):
            rows += [{"digest": digest, "kind": kind, "id": key} for digest in sorted(each.digests)]
    if rows:
        connection.execute(insert(schema.artifact_references).on_conflict_do_nothing(), rows)


def _record(connection: Connection, kind: str, key: str, contents: _Contents) -> bool:
    """Record that a referrer is read, if it is unchanged since. Return False if it was deleted in the meantime."""
    referrers, refers = schema.referrers, schema.artifact_references
    values = {"size_bytes": contents.size_bytes, "log_bytes": contents.log_bytes}
    read = update(referrers).where(referrers.c.kind == kind, referrers.c.id == key).values(values)
    if connection.execute(read).rowcount:
        connection.execute(delete(refers).where(refers.c.kind == kind, refers.c.id == key))
        return True
    table = CACHES.get(kind, schema.jobs)
    exists_still = select(1).where((table.c.id if kind == JOB else table.c.key) == key)
    return connection.execute(exists_still).scalar() is not None
