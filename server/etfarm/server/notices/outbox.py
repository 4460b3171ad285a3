"""The stored outbox: webhooks, and one row for each notice to each receiver, which a restart of the server does not lose."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Row, and_, bindparam, delete, exists, func, insert, or_, select, update

from etfarm.server.access.scope import DEFAULT_PROJECT, EVERYTHING, Scope
from etfarm.server.notices import events
from etfarm.server.notices.errors import webhook_not_found
from etfarm.server.notices.events import Notice
from etfarm.server.notices.posting import Outcome
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert as insert_or_ignore
from etfarm.v1.job_pb2 import Job
from etfarm.wire.errors import error_for

log = structlog.get_logger()

MAX_WEBHOOKS: Final = 50
MAX_WAITING: Final = 1_000
"""Maximum number of notices that wait for one webhook, or for all addresses of one owner's jobs."""
MAX_GATES: Final = 20
"""Maximum number of different gate reports of a job."""
KEPT: Final = 5_000
"""Number of ended deliveries that the log keeps."""
KEPT_FOR: Final = timedelta(days=30)

PAUSES: Final = tuple(timedelta(seconds=s) for s in (10, 30, 120, 600, 1_800, 3_600, 7_200, 14_400))
"""Pauses before the second and each further try: the last one is about 8 hours after the event."""

HELD, PENDING, DELIVERED, FAILED = "HELD", "PENDING", "DELIVERED", "FAILED"
_LIVE: Final = (HELD, PENDING)


@dataclass(frozen=True)
class Due:
    """One notice that is to be sent now."""

    number: int
    event_id: str
    event: str
    url: str
    body: str
    secret: str
    attempts: int
    receiver: str
    """The webhook's id, or "owner:NAME" for an address of a job: notices of one receiver do not delay those of others."""


_HAS_RECEIVER: Final = select(
    or_(
        exists(select(schema.webhooks.c.id)),
        exists().where(schema.deliveries.c.job_id == bindparam("job"), schema.deliveries.c.state == HELD),
    )
)


class Outbox:
    """The webhooks and notices in the database.

    Args:
        now: returns the current time in UTC.
    """

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now
        self.has_news = asyncio.Event()
        """Set once there may be something to send."""
        self._released: set[str] = set()
        """The jobs whose notices `job_ended` has released, and which `announce_released` has not announced yet."""

    # Webhooks.

    async def add(self, webhook_id: str, url: str, on: Sequence[str], by: str) -> str:
        """Store a webhook and return its new secret.

        Raises:
            TOO_MANY_WEBHOOKS: the farm has the maximum number.
        """
        secret = secrets.token_urlsafe(32)

        def write(connection: Connection) -> None:
            if connection.execute(select(func.count()).select_from(schema.webhooks)).scalar_one() >= MAX_WEBHOOKS:
                raise error_for(
                    "TOO_MANY_WEBHOOKS",
                    f"A farm has at most {MAX_WEBHOOKS} webhooks.",
                    "Remove one: `etfarm webhooks remove ID`.",
                    limit=MAX_WEBHOOKS,
                )
            values = {"id": webhook_id, "url": url, "events": ",".join(on), "secret": secret, "created_by": by}
            connection.execute(insert(schema.webhooks).values(**values, created_at=self._now(), configured=False, dropped=0))

        await self._database.write(write, durable=True)
        return secret

    async def configure(self, hooks: Sequence[tuple[str, str]]) -> None:
        """Replace the webhooks of the server's options by these addresses with their secrets, each for all events."""

        def write(connection: Connection) -> None:
            ids = {f"option-{events.event_id(url)[:12]}": (url, secret) for url, secret in hooks}
            gone = select(schema.webhooks.c.id).where(schema.webhooks.c.configured, schema.webhooks.c.id.not_in(list(ids)))
            for webhook_id in connection.execute(gone).scalars().all():
                _delete(connection, webhook_id)
            for webhook_id, (url, secret) in ids.items():
                values = {"url": url, "events": ",".join(events.EVENTS), "secret": secret, "created_by": ""}
                row = insert_or_ignore(schema.webhooks).values(
                    id=webhook_id, **values, created_at=self._now(), configured=True, dropped=0
                )
                connection.execute(row.on_conflict_do_update(index_elements=["id"], set_=values))

        await self._database.write(write)

    async def webhooks(self) -> list[tuple[Row[Any], int]]:
        """Return all webhooks, oldest first, each with the number of its waiting notices."""

        def read(connection: Connection) -> list[tuple[Row[Any], int]]:
            table, deliveries = schema.webhooks, schema.deliveries.c
            counted = (
                select(deliveries.webhook_id, func.count()).where(deliveries.state == PENDING).group_by(deliveries.webhook_id)
            )  # fmt: skip
            waiting: dict[str, int] = {row[0]: row[1] for row in connection.execute(counted)}
            rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id)).all()
            return [(row, waiting.get(row.id, 0)) for row in rows]

        return await self._database.read(read)

    async def remove(self, webhook_id: str) -> Row[Any]:
        """Remove a webhook and what waits for it; return what it was.

        Raises:
            WEBHOOK_NOT_FOUND: no webhook has the id.
            WEBHOOK_CONFIGURED: it comes from the server's options.
        """

        def write(connection: Connection) -> Row[Any]:
            row = _webhook(connection, webhook_id)
            if row.configured:
                raise error_for(
                    "WEBHOOK_CONFIGURED",
                    f"Webhook {webhook_id} comes from the server's options.",
                    "Start the server without this --webhook to remove it.",
                    id=webhook_id,
                )
            _delete(connection, webhook_id)
            return row

        return await self._database.write(write, durable=True)

    # Notices.

    def hold(self, connection: Connection, job: Job) -> None:
        """Store the notices of a new job's end for its own addresses, which `job_ended` releases.

        Call it in the transaction that writes the job.
        """
        for url in dict.fromkeys(job.spec.notify_urls):
            values = {"url": url, "job_id": job.id, "owner": job.owner, "body": "", "state": HELD}
            values["project"] = job.project or DEFAULT_PROJECT
            self._insert(connection, "", events.JOB_ENDED, events.event_id(events.JOB_ENDED, job.id), values)

    def awaits_end(self, connection: Connection, job_id: str) -> bool:
        """Return whether anybody may want the notice of a job's end."""
        return bool(connection.execute(_HAS_RECEIVER, {"job": job_id}).scalar())

    def announce_released(self, job_id: str) -> None:
        """Set `has_news` if the end of a job has released notices. Call it after the transaction."""
        if job_id in self._released:
            self._released.discard(job_id)
            self.has_news.set()

    def job_ended(self, connection: Connection, job: Job) -> None:
        """Release the notices of a job's end. Call it in the transaction that ends the job."""
        self._released.add(job.id)
        notice = events.job_ended(job, self._now())
        held = and_(schema.deliveries.c.job_id == job.id, schema.deliveries.c.state == HELD)
        due = {"state": PENDING, "body": notice.body, "due_at": self._now()}
        connection.execute(update(schema.deliveries).where(held).values(due))
        self._to_webhooks(connection, notice)

    async def publish(self, notice: Notice, urls: Sequence[str] = ()) -> None:
        """Store a notice for the webhooks of its event, and for these addresses of its job. A notice is stored once."""

        def write(connection: Connection) -> None:
            self._to_webhooks(connection, notice)
            for url in dict.fromkeys(urls):
                self._to_receiver(connection, notice, "", url)

        await self._database.write(write, durable=True)
        self.has_news.set()

    async def publish_gate(self, notice: Notice, urls: Sequence[str]) -> None:
        """Store the notice of a failed gate like `publish`.

        Raises:
            TOO_MANY_NOTICES: the job has the maximum number of different reports.
        """

        def read(connection: Connection) -> set[str]:
            row = schema.deliveries.c
            query = select(row.event_id).where(row.job_id == notice.job_id, row.event == events.GATE_FAILED).distinct()
            return set(connection.execute(query).scalars())

        known = await self._database.read(read)
        if notice.id not in known and len(known) >= MAX_GATES:
            what = f"Job {notice.job_id} has {MAX_GATES} different reports of gates."
            raise error_for("TOO_MANY_NOTICES", what, "Report each gate once.", job=notice.job_id, limit=MAX_GATES)
        await self.publish(notice, urls)

    async def enqueue_test(self, webhook_id: str) -> int:
        """Store a notice of `webhook.test` and return its number.

        Raises:
            WEBHOOK_NOT_FOUND: no webhook has the id.
            TOO_MANY_NOTICES: too many notices wait for the webhook.
        """

        def write(connection: Connection) -> int:
            row = _webhook(connection, webhook_id)
            number = self._to_receiver(connection, events.test_notice(webhook_id, self._now()), webhook_id, row.url)
            if number is None:
                what = f"{MAX_WAITING:,} notices wait for webhook {webhook_id}."
                raise error_for(
                    "TOO_MANY_NOTICES", what, "`etfarm webhooks deliveries` shows why.", id=webhook_id, limit=MAX_WAITING
                )
            return number

        number = await self._database.write(write)
        self.has_news.set()
        return number

    async def due(self, most: int, busy: Collection[int], full: Collection[str]) -> tuple[list[Due], datetime | None]:
        """Return notices that are to be sent now, oldest first, and when the next one is due.

        Args:
            most: maximum number of notices.
            busy: numbers of notices that are being sent.
            full: receivers that get no further notice now.
        """
        now = self._now()

        def read(connection: Connection) -> tuple[list[Due], datetime | None]:
            row = schema.deliveries.c
            # A time beyond the longest pause was stored before the clock was set back.
            is_due = or_(row.due_at <= now, row.due_at > now + 2 * PAUSES[-1])
            pending = [row.state == PENDING, row.number.not_in(list(busy))]
            owners = [receiver.removeprefix("owner:") for receiver in full if receiver.startswith("owner:")]
            pending.append(or_(row.webhook_id != "", row.owner.not_in(owners)))
            pending.append(or_(row.webhook_id == "", row.webhook_id.not_in([each for each in full if ":" not in each])))
            query = (
                select(schema.deliveries, schema.webhooks.c.secret)
                .join(schema.webhooks, schema.webhooks.c.id == row.webhook_id, isouter=True)
                .where(*pending, is_due)
                .order_by(row.due_at, row.number)
                .limit(most)
            )
            due = [_due(connection, each) for each in connection.execute(query)]
            after = select(func.min(row.due_at)).where(*pending, row.due_at > now)
            return due, connection.execute(after).scalar()

        return await self._database.read(read)

    async def ended(self, number: int, outcome: Outcome) -> bool:
        """Store what came of one try; return whether it was the last one."""
        now = self._now()

        def write(connection: Connection) -> bool:
            row = schema.deliveries.c
            attempts = connection.execute(select(row.attempts).where(row.number == number)).scalar()
            if attempts is None:
                return True  # its webhook was removed meanwhile
            state = DELIVERED if not outcome.error else PENDING
            if outcome.error and (outcome.is_final or attempts >= len(PAUSES)):
                state = FAILED
            values = {
                "state": state, "attempts": attempts + 1, "status": outcome.status, "error": outcome.error[:500],
                "answer": outcome.answer, "due_at": now + PAUSES[attempts] if state == PENDING else None,
                "ended_at": None if state == PENDING else now,
            }  # fmt: skip
            connection.execute(update(schema.deliveries).where(row.number == number).values(values))
            return state != PENDING

        return await self._database.write(write)

    async def trim(self) -> None:
        """Delete ended deliveries that are old, or beyond the number that is kept."""
        before = self._now() - KEPT_FOR

        def write(connection: Connection) -> None:
            row = schema.deliveries.c
            is_ended = row.state.in_([DELIVERED, FAILED])
            newest = select(row.number).where(is_ended).order_by(row.number.desc()).offset(KEPT).limit(1)
            last = connection.execute(newest).scalar()
            old = or_(row.ended_at < before, row.number <= (last if last is not None else -1))
            connection.execute(delete(schema.deliveries).where(is_ended, old))

        await self._database.write(write)

    async def delivery(self, number: int) -> Row[Any] | None:
        """Return one row of the log; None if it was deleted."""
        query = select(schema.deliveries).where(schema.deliveries.c.number == number)
        return await self._database.read(lambda connection: connection.execute(query).one_or_none())

    async def deliveries(
        self, size: int, before: int | None, *, webhook_id: str = "", job_id: str = "", scope: Scope = EVERYTHING
    ) -> list[Row[Any]]:
        """Return rows of the log with numbers below `before`, newest first.

        Args:
            scope: a scope that is not everything shows notices to the addresses of its projects' jobs only.
        """
        row = schema.deliveries.c
        query = select(schema.deliveries).order_by(row.number.desc()).limit(size)
        if before is not None:
            query = query.where(row.number < before)
        if webhook_id:
            query = query.where(row.webhook_id == webhook_id)
        if job_id:
            query = query.where(row.job_id == job_id)
        if scope.projects is not None:
            query = query.where(row.webhook_id == "", row.project.in_(sorted(scope.projects)))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return list(rows)

    async def secret_of(self, project: str) -> str:
        """Return the secret that signs the notices to a project's own addresses."""
        return await self._database.write(lambda connection: _secret_of(connection, project, self._now()), durable=True)

    def _to_webhooks(self, connection: Connection, notice: Notice) -> None:
        for row in connection.execute(select(schema.webhooks.c.id, schema.webhooks.c.url, schema.webhooks.c.events)).all():
            if notice.event in row.events.split(","):
                self._to_receiver(connection, notice, row.id, row.url)

    def _to_receiver(self, connection: Connection, notice: Notice, webhook_id: str, url: str) -> int | None:
        """Store a notice for one receiver and return its number; None if it was stored before, or too many wait."""
        row = schema.deliveries.c
        own = row.webhook_id == webhook_id
        waits = and_(own, row.state == PENDING) if webhook_id else and_(own, row.state == PENDING, row.owner == notice.owner)
        if connection.execute(select(func.count()).where(waits)).scalar_one() >= MAX_WAITING:
            log.warning("a notice is dropped: too many wait for its receiver", event_name=notice.event, webhook=webhook_id)
            count = schema.webhooks.c.dropped + 1
            connection.execute(update(schema.webhooks).where(schema.webhooks.c.id == webhook_id).values(dropped=count))
            return None
        values = {
            "url": url, "job_id": notice.job_id, "project": notice.project, "owner": notice.owner, "body": notice.body,
            "state": PENDING, "due_at": self._now(),
        }  # fmt: skip
        return self._insert(connection, webhook_id, notice.event, notice.id, values)

    def _insert(self, connection: Connection, webhook_id: str, event: str, identity: str, values: dict[str, Any]) -> int | None:
        if not webhook_id:
            _secret_of(connection, values["project"], self._now())
        row = insert_or_ignore(schema.deliveries).values(
            webhook_id=webhook_id,
            event=event,
            event_id=identity,
            created_at=self._now(),
            attempts=0,
            error="",
            answer="",
            **values,
        )
        statement = row.on_conflict_do_nothing().returning(schema.deliveries.c.number)
        return connection.execute(statement).scalar()


def _due(connection: Connection, row: Row[Any]) -> Due:
    secret = row.secret if row.webhook_id else _known_secret(connection, row.project)
    receiver = row.webhook_id or f"owner:{row.owner}"
    return Due(row.number, row.event_id, row.event, row.url, row.body, secret or "", row.attempts, receiver)


def _known_secret(connection: Connection, project: str) -> str | None:
    query = select(schema.notify_secrets.c.secret).where(schema.notify_secrets.c.project == project)
    return connection.execute(query).scalar()


def _secret_of(connection: Connection, project: str, now: datetime) -> str:
    row = insert_or_ignore(schema.notify_secrets).values(project=project, secret=secrets.token_urlsafe(32), created_at=now)
    connection.execute(row.on_conflict_do_nothing())
    return _known_secret(connection, project) or ""


def _webhook(connection: Connection, webhook_id: str) -> Row[Any]:
    row = connection.execute(select(schema.webhooks).where(schema.webhooks.c.id == webhook_id)).one_or_none()
    if row is None:
        raise webhook_not_found(webhook_id)
    return row


def _delete(connection: Connection, webhook_id: str) -> None:
    waits = and_(schema.deliveries.c.webhook_id == webhook_id, schema.deliveries.c.state.in_(_LIVE))
    connection.execute(delete(schema.deliveries).where(waits))
    connection.execute(delete(schema.webhooks).where(schema.webhooks.c.id == webhook_id))
