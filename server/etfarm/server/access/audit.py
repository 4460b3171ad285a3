"""The audit log: changes and refusals by caller, written in batches. Refusals are aggregated, so they cannot fill the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import structlog
from sqlalchemy import Connection, func, insert, select

from etfarm.server.state import schema
from etfarm.server.state.engine import Database, DatabaseUnavailable
from etfarm.v1 import audit_pb2, common_pb2

log = structlog.get_logger()

WRITE_AFTER_S: Final = 0.2
"""Time for which entries are collected before they are written."""

MAX_WAITING: Final = 20_000
"""Maximum number of entries that wait to be written; further ones are only counted."""

REFUSALS_AN_HOUR: Final = 600
"""Number of refusals per hour that get an entry each; the others share one entry. The log grows by a few MB a day at most."""

SAME_S: Final = 60.0
"""Time within which equal entries are merged: the first is written, followed by an entry with the number of repetitions."""

_MAX_KINDS: Final = 2000
_MAX_CHARACTERS: Final = 200


@dataclass(frozen=True)
class Entry:
    """One entry of the log; see AuditEntry."""

    action: str
    outcome: str
    principal: str = ""
    role: str = ""
    peer: str = ""
    subject: str = ""
    detail: str = ""


class AuditLog:
    """The audit log of one server. `record` never waits; `flush` writes what was recorded.

    Args:
        now: returns the current time in UTC.
        clock: returns seconds on a monotonic clock.
    """

    def __init__(self, database: Database, now: Callable[[], datetime], clock: Callable[[], float]) -> None:
        self._database = database
        self._now = now
        self._clock = clock
        self._waiting: list[tuple[datetime, Entry]] = []
        self._dropped = 0
        self._has_waiting = asyncio.Event()
        self._writing = asyncio.Lock()
        self._recent: dict[Entry, tuple[float, int]] = {}
        """Time at which each entry of the last minute was recorded, and its number of repetitions."""
        self._omitted_refusals = 0
        self._hour_start_s, self._refusals_left = clock(), REFUSALS_AN_HOUR

    def record(self, entry: Entry) -> None:
        """Record an entry."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        shortened = {name: getattr(entry, name)[:_MAX_CHARACTERS] for name in ("principal", "subject", "detail", "outcome")}
        self._waiting.append((self._now(), replace(entry, **shortened)))
        self._has_waiting.set()

    def change(self, entry: Entry) -> None:
        """Record a change, or count it if an equal one was recorded recently."""
        if not self._is_repeated(entry):
            if len(self._recent) < _MAX_KINDS:
                self._recent[entry] = self._clock(), 0
            self.record(entry)

    def refuse(self, entry: Entry) -> None:
        """Record a refusal, or count it if an equal one was recorded recently."""
        if self._is_repeated(entry):
            return
        if self._refusals_left > 0 and len(self._recent) < _MAX_KINDS:
            self._refusals_left -= 1
            self._recent[entry] = self._clock(), 0
            self.record(entry)
        else:
            self._omitted_refusals += 1

    def _is_repeated(self, entry: Entry) -> bool:
        if entry not in self._recent:
            return False
        since, count = self._recent[entry]
        self._recent[entry] = since, count + 1
        return True

    def summarize(self, *, everything: bool = False) -> None:
        """Record the numbers of repeated entries and of refusals without an entry.

        Args:
            everything: include entries that may still be repeated.
        """
        now = self._clock()
        for entry, (since, count) in list(self._recent.items()):
            if everything or now - since > SAME_S:
                del self._recent[entry]
                if count:
                    self.record(replace(entry, detail=f"{count} more in {max(now - since, 1):.0f} s"))
        if everything or now - self._hour_start_s > 3600:
            self._hour_start_s, self._refusals_left = now, REFUSALS_AN_HOUR
            if self._omitted_refusals:
                self.record(Entry("audit.refusals", "REFUSED", detail=f"{self._omitted_refusals} more from many callers"))
                self._omitted_refusals = 0

    async def write_on(self) -> None:
        """Write entries until the task is cancelled. While the disk is full, entries wait."""
        while True:
            try:
                async with asyncio.timeout(SAME_S / 2):
                    await self._has_waiting.wait()
            except TimeoutError:
                self.summarize()
                continue
            await asyncio.sleep(WRITE_AFTER_S)
            self.summarize()
            try:
                await self.flush()
            except DatabaseUnavailable as error:
                log.warning("the audit log could not be written; it is tried again", error=error.message)
                await asyncio.sleep(SAME_S / 12)
            except Exception:
                log.exception("the audit log could not be written; it is tried again")
                await asyncio.sleep(SAME_S / 12)

    async def flush(self, *, durable: bool = False) -> None:
        """Write all recorded entries."""
        async with self._writing:
            if self._dropped:
                lost, self._dropped = self._dropped, 0
                self._waiting.append((self._now(), Entry("audit.lost", "LOST", detail=f"{lost} entries: the disk was too slow")))
            entries = list(self._waiting)
            self._has_waiting.clear()
            if not entries:
                return
            try:
                await self._database.write(lambda connection: _append(connection, entries), durable=durable)
            except BaseException:
                self._has_waiting.set()
                raise
            del self._waiting[: len(entries)]

    async def close(self) -> None:
        """Write the remaining entries at shutdown; log an error if that fails."""
        self.summarize(everything=True)
        try:
            await self.flush(durable=True)
        except Exception:
            log.exception("the last entries of the audit log are lost", entries=len(self._waiting))

    async def list(self, size: int, before: int | None, principal: str, action: str) -> list[audit_pb2.AuditEntry]:
        """Return entries numbered below `before`, newest first. An empty `principal` or `action` does not filter."""
        table = schema.audit
        query = select(table).order_by(table.c.number.desc()).limit(size)
        if before is not None:
            query = query.where(table.c.number < before)
        if principal:
            query = query.where(table.c.principal == principal)
        if action:
            query = query.where(table.c.action == action)
        await self.flush()
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [
            audit_pb2.AuditEntry(
                number=row.number, time=row.at, principal=row.principal, peer=row.peer, action=row.action, subject=row.subject,
                outcome=row.outcome, detail=row.detail,
                role=common_pb2.Role.Value(f"ROLE_{row.role.upper()}") if row.role else common_pb2.ROLE_UNSPECIFIED,
            )
            for row in rows
        ]  # fmt: skip


def _append(connection: Connection, entries: list[tuple[datetime, Entry]]) -> None:
    last = connection.execute(select(func.coalesce(func.max(schema.audit.c.number), 0))).scalar_one()
    connection.execute(
        insert(schema.audit), [{"number": last + index, "at": at, **vars(entry)} for index, (at, entry) in enumerate(entries, 1)]
    )
