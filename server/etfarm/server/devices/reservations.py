"""Reservations: devices that only the runs and sessions which name the reservation may use, until it ends.

A reservation ends when its holder releases it or does not renew it in time, by the server's clock, also if the server was down in
the meantime.

The current ones are in the database, and for some days those that have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import Connection, delete, select, update

from etfarm.server.access.ownership import require_owner
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.errors import (
    ReservationEnded,
    ReservationNotFound,
    request_id_used,
)
from etfarm.server.devices.reservation_choice import choose, list_briefly
from etfarm.server.devices.scheduling.waiting import open_to
from etfarm.server.devices.selection import select_devices
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Device, Reservation
from etfarm.wire import selectors
from etfarm.wire.errors import EtfarmError, error_for

log = structlog.get_logger()

MIN_DURATION_S: Final = 1.0
MAX_DURATION_S: Final = 86_400.0
"""Default maximum of the time until a reservation ends without a renewal."""

MAX_COUNT: Final = 1_000
"""Maximum number of devices of a reservation."""

MAX_OF_OWNER: Final = 100
"""Maximum number of current reservations of one owner."""

_LONGEST_SLEEP_S: Final = 5.0
"""Maximum time after which the next expiry is compared with the clock again, which may have been set."""

AnswerT = TypeVar("AnswerT")
KEPT: Final = timedelta(days=7)
"""Time for which a reservation that has ended is known, so that a late renewal gets an error that says so."""

MAX_KEPT: Final = 10_000
"""Maximum number of reservations that have ended and are known."""


@dataclass(frozen=True)
class Request:
    """A request to reserve devices."""

    selector: str
    duration_s: float
    owner: str
    project: str
    count: int = 1
    reason: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class Holder:
    """A caller who renews or releases a reservation."""

    name: str
    is_admin: bool = False
    scope: Scope = EVERYTHING


class Reservations:
    """The current reservations, in memory and in the database. Listeners get the ids of devices whose reservation changed.

    Args:
        now: returns the current time in UTC. Reservations last as long as agreed only if nobody sets its clock.
        new_id: returns a unique id.
        max_duration_s: maximum time until a reservation ends without a renewal.
    """

    def __init__(
        self,
        database: Database,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        max_duration_s: float = MAX_DURATION_S,
    ) -> None:
        self._records = ReservationRecords(database)
        self._now = now
        self._new_id = new_id
        self._max_duration_s = max_duration_s
        self._current: dict[str, Reservation] = {}
        self._briefs: dict[str, Reservation] = {}
        """The current reservations without their devices, by id: each device has a copy whenever it is described."""
        self._of_device: dict[str, str] = {}
        """Ids of reservations by device id."""
        self._ends: dict[str, asyncio.Future[ReservationEnded]] = {}
        """Futures that are awaited until a reservation ends, by its id."""
        self._listeners: list[Callable[[Collection[str]], None]] = []
        self._requesting = asyncio.Lock()
        self._changed = asyncio.Event()

    def on_change(self, listener: Callable[[Collection[str]], None]) -> None:
        """Register a function to call with the ids of devices whose reservation changed."""
        self._listeners.append(listener)

    async def load(self) -> None:
        """Load the reservations from the database, and end those that have expired in the meantime."""
        at = self._now()
        for reservation in await self._records.load():
            latest = at + timedelta(seconds=reservation.duration_s)
            if reservation.expire_time.ToNanoseconds() > latest.timestamp() * 1e9:
                # The clock was ahead when it was written.
                reservation.expire_time.FromDatetime(latest)
            self._hold(reservation)
        await self.expire()

    def of_device(self, device_id: str) -> Reservation | None:
        """Return the reservation that holds a device, without its devices; None if no current one does."""
        reservation = self._briefs.get(self._of_device.get(device_id, ""))
        return None if reservation is None or self._is_due(reservation) else reservation

    def current(self, scope: Scope) -> Sequence[Reservation]:
        """Return the current reservations of a scope's projects, the next to expire first."""
        visible = [each for each in self._current.values() if scope.allows(each.project) and not self._is_due(each)]
        return sorted(visible, key=lambda each: (each.expire_time.ToNanoseconds(), each.id))

    async def reserve(self, request: Request, devices: Callable[[], Sequence[Device]]) -> Reservation:
        """Reserve the requested number of devices, all or none.

        Args:
            devices: returns the devices of the farm as the caller sees them, with the reservations that they have.

        Raises:
            BAD_RESERVATION: the duration or the number is out of range.
            NO_SUCH_DEVICE: no known device matches.
            DEVICES_UNAVAILABLE: fewer devices can be reserved now.
            QUOTA_EXCEEDED: the owner has the maximum number.
            REQUEST_ID_USED: the owner has sent the request_id with something else before.
        """
        self._require_duration(request.duration_s)
        if not 1 <= request.count <= MAX_COUNT:
            raise error_for("BAD_RESERVATION", f"`count` must be 1 to {MAX_COUNT:,}, got {request.count}.", limit=MAX_COUNT)
        selector = selectors.parse(request.selector)
        async with self._requesting:
            if request.request_id and (known := await self._records.requested(request.owner, request.request_id)) is not None:
                return await self._repeated(known, request)
            held = sum(each.owner == request.owner for each in self._current.values())
            if held >= MAX_OF_OWNER:
                raise error_for(
                    "QUOTA_EXCEEDED",
                    f"The user {request.owner} may have at most {MAX_OF_OWNER} reservations.",
                    "Release some: `etfarm devices reservations` lists them.", limit=MAX_OF_OWNER,
                )  # fmt: skip
            visible = open_to(request.project, devices())
            matching = select_devices(selector, request.selector, visible)
            chosen = choose(matching, request.count, request.selector)
            reservation = Reservation(
                id=self._new_id(), device_id=chosen[0].id, device_ids=[device.id for device in chosen], owner=request.owner,
                project=request.project, selector=request.selector, reason=request.reason, duration_s=request.duration_s,
            )  # fmt: skip
            at = self._now()
            reservation.create_time.FromDatetime(at)
            reservation.expire_time.FromDatetime(at + timedelta(seconds=request.duration_s))
            # Before the write, so that no run is placed there in the meantime.
            self._hold(reservation)
            self._announce(reservation)
            try:
                await self._records.insert(reservation, request.request_id)
            except BaseException:
                self._drop(reservation.id)
                self._announce(reservation)
                raise
        return reservation

    async def _repeated(self, reservation_id: str, request: Request) -> Reservation:
        """Return the current reservation that a request has created before; see `reserve`."""
        known = await self._known(reservation_id, EVERYTHING)
        is_renewed = known.expire_time.ToDatetime() != known.create_time.ToDatetime() + timedelta(seconds=known.duration_s)
        wanted = (request.project, request.selector, request.count, request.reason)
        # A renewal may have changed the duration.
        if wanted != (known.project, known.selector, len(known.device_ids), known.reason) or not (
            is_renewed or request.duration_s == known.duration_s
        ):
            raise request_id_used(request.request_id, reservation_id)
        return await self.require(reservation_id, request.project)

    async def renew(self, reservation_id: str, duration_s: float | None, holder: Holder) -> Reservation:
        """Let a reservation end `duration_s` from now; the duration that it has when None.

        Raises:
            BAD_RESERVATION: the duration is out of range.
            ReservationNotFound, ReservationEnded: the holder sees no such reservation, or it has ended.
            NotYours: it belongs to another owner.
        """
        reservation = await self._find(reservation_id, holder.scope)
        require_owner(
            reservation.owner, f"The reservation {reservation.id}", holder.name, is_admin=holder.is_admin,
            remedy="Ask the owner or an admin.",
        )  # fmt: skip
        renewed = Reservation()
        renewed.CopyFrom(reservation)
        renewed.duration_s = reservation.duration_s if duration_s is None else duration_s
        self._require_duration(renewed.duration_s)
        renewed.expire_time.FromDatetime(self._now() + timedelta(seconds=renewed.duration_s))
        await self._records.renew(renewed)
        if renewed.id not in self._current:  # it ended in the meantime
            return await self._find(reservation_id, holder.scope)
        self._hold(renewed)
        self._announce(renewed)
        return renewed

    async def release(self, reservation_id: str, holder: Holder) -> None:
        """End a reservation. Does nothing for one that has ended.

        Raises:
            ReservationNotFound: the holder sees no such reservation.
            NotYours: it belongs to another owner.
        """
        known = await self._known(reservation_id, holder.scope)
        require_owner(known.owner, f"The reservation {known.id}", holder.name, is_admin=holder.is_admin)
        if known.id in self._current:
            await self._end([known.id], f"was released by {holder.name}")

    async def require(self, reservation_id: str, project: str) -> Reservation:
        """Return the current reservation with an id.

        Raises:
            ReservationNotFound: the project has no such reservation.
            ReservationEnded: it has ended.
        """
        return await self._find(reservation_id, Scope(frozenset({project})))

    async def require_device(
        self, reservation_id: str, project: str, selectors_: Collection[str], devices: Sequence[Device]
    ) -> list[Device]:
        """Return those of the devices that a reservation has, for a job or session that names it.

        Args:
            selectors_: the selectors of the job or session, each of which must match one of these devices.

        Raises:
            ReservationNotFound, ReservationEnded: as `require`.
            DEVICE_NOT_RESERVED: a selector matches no device of the reservation.
        """
        held = set((await self.require(reservation_id, project)).device_ids)
        reserved = [device for device in devices if device.id in held]
        for text in selectors_:
            if not any(map(selectors.parse(text).matches, reserved)):
                names = list_briefly([device.name for device in reserved]) or "none that is still known"
                raise error_for(
                    "DEVICE_NOT_RESERVED",
                    f"No device of the reservation {reservation_id} matches {text!r}.", f"It has {names}.",
                    reservation=reservation_id, selector=text,
                )  # fmt: skip
        return reserved

    async def while_current(self, reservation_id: str, project: str, work: Awaitable[AnswerT]) -> AnswerT:
        """Return the result of `work`, which waits for a device of a reservation; cancel it when the reservation ends.

        Raises:
            ReservationNotFound, ReservationEnded: there is no such reservation, or it ended first.
        """
        working = asyncio.ensure_future(work)
        try:
            await self.require(reservation_id, project)
            end = self._ends.get(reservation_id)
            if end is None:
                end = self._ends[reservation_id] = asyncio.get_running_loop().create_future()
            futures: set[asyncio.Future[Any]] = {working, end}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise end.result()
            return working.result()
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait({working})

    async def expire(self) -> None:
        """End the reservations whose time is over. A full disk delays none: a later server finds them expired again."""
        due = [each.id for each in self._current.values() if self._is_due(each)]
        if not due:
            return
        try:
            await self._end(due, "has expired, since it was not renewed in time")
        except EtfarmError as error:
            log.warning("the end of reservations could not be written", reservations=due, error=error.message)

    async def tend(self) -> None:
        """Expire reservations in time, until cancelled."""
        while True:
            self._changed.clear()
            await self.expire()
            now = self._now().timestamp()
            left_s = min((each.expire_time.ToNanoseconds() / 1e9 - now for each in self._current.values()), default=None)
            try:
                async with asyncio.timeout(None if left_s is None else min(max(left_s, 0.0), _LONGEST_SLEEP_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _known(self, reservation_id: str, scope: Scope) -> Reservation:
        """Return a reservation that the scope sees, current or ended."""
        current = self._current.get(reservation_id)
        known = (current, "") if current is not None else await self._records.find(reservation_id)
        if known is None or not scope.allows(known[0].project):
            raise ReservationNotFound(reservation_id)
        return known[0]

    async def _find(self, reservation_id: str, scope: Scope) -> Reservation:
        """Return a current reservation that the scope sees."""
        known = await self._known(reservation_id, scope)
        if (current := self._current.get(known.id)) is not None and not self._is_due(current):
            return current
        record = await self._records.find(reservation_id)
        how = record[1] if record is not None and record[1] else "has expired, since it was not renewed in time"
        raise ReservationEnded(reservation_id, how)

    async def _end(self, ids: Sequence[str], how: str) -> None:
        ended = [reservation for each in ids if (reservation := self._drop(each)) is not None]
        for reservation in ended:
            if (end := self._ends.pop(reservation.id, None)) is not None and not end.done():
                end.set_result(ReservationEnded(reservation.id, how))
        try:
            await self._records.end([reservation.id for reservation in ended], self._now(), how)
        finally:
            for reservation in ended:
                self._announce(reservation)

    def _hold(self, reservation: Reservation) -> None:
        self._current[reservation.id] = reservation
        brief_ = Reservation()
        brief_.CopyFrom(reservation)
        brief_.ClearField("device_ids")
        self._briefs[reservation.id] = brief_
        self._of_device |= dict.fromkeys(reservation.device_ids, reservation.id)

    def _drop(self, reservation_id: str) -> Reservation | None:
        reservation = self._current.pop(reservation_id, None)
        self._briefs.pop(reservation_id, None)
        for device_id in reservation.device_ids if reservation is not None else ():
            if self._of_device.get(device_id) == reservation_id:
                del self._of_device[device_id]
        return reservation

    def _announce(self, reservation: Reservation) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener(reservation.device_ids)

    def _is_due(self, reservation: Reservation) -> bool:
        return reservation.expire_time.ToNanoseconds() <= round(self._now().timestamp() * 1e6) * 1_000

    def _require_duration(self, duration_s: float) -> None:
        if not MIN_DURATION_S <= duration_s <= self._max_duration_s:
            raise error_for(
                "BAD_RESERVATION",
                f"A reservation must be for {MIN_DURATION_S:g} s to {self._max_duration_s:,.0f} s, got {duration_s:g} s.",
                "Its holder can renew it.", limit=self._max_duration_s, got=duration_s,
            )  # fmt: skip


class ReservationRecords:
    """The table of reservations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> Sequence[Reservation]:
        """Return the reservations that have not ended, oldest first. Those that are damaged in the database hold no device."""
        table = schema.reservations
        query = select(table.c.id, table.c.body).where(table.c.ended_at.is_(None)).order_by(table.c.created_at)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [each for row in rows if (each := _read(row.id, row.body)) is not None]

    async def insert(self, reservation: Reservation, request_id: str) -> None:
        """Write a new reservation, and delete those that ended long ago."""
        row = {
            "id": reservation.id,
            "owner": reservation.owner,
            "project": reservation.project,
            "request_id": request_id or None,
            "body": seal(reservation),
            "created_at": reservation.create_time.ToDatetime(UTC),
        }
        ended = schema.reservations.c.ended_at

        def write(connection: Connection) -> None:
            newest = select(ended).where(ended.is_not(None)).order_by(ended.desc()).offset(MAX_KEPT).limit(1)
            oldest = row["created_at"] - KEPT  # type: ignore[operator]
            if (last := connection.execute(newest).scalar()) is not None:
                oldest = max(oldest, last)
            connection.execute(delete(schema.reservations).where(ended.is_not(None), ended <= oldest))
            connection.execute(schema.reservations.insert(), row)

        await self._database.write(write, durable=True)

    async def renew(self, reservation: Reservation) -> None:
        """Write a new expiry."""
        table = schema.reservations
        change = update(table).where(table.c.id == reservation.id).values(body=seal(reservation))
        await self._database.write(lambda connection: connection.execute(change) and None, durable=True)

    async def end(self, ids: Sequence[str], at: datetime, how: str) -> None:
        """Record the end of reservations, with a phrase such as "was released by ann"."""
        table = schema.reservations
        change = update(table).where(table.c.id.in_(ids)).values(ended_at=at, how=how)
        await self._database.write(lambda connection: connection.execute(change) and None, durable=True)

    async def find(self, reservation_id: str) -> tuple[Reservation, str] | None:
        """Return a reservation with the phrase that says how it ended; None if it is unknown, or damaged in the database."""
        table = schema.reservations
        query = select(table.c.id, table.c.body, table.c.how).where(table.c.id == reservation_id)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        reservation = None if row is None else _read(reservation_id, row.body)
        return None if row is None or reservation is None else (reservation, row.how or "")

    async def requested(self, owner: str, request_id: str) -> str | None:
        """Return the id of the reservation that the owner requested with this id; None if there is none."""
        table = schema.reservations
        query = select(table.c.id).where(table.c.owner == owner, table.c.request_id == request_id)
        reservation_id: str | None = await self._database.read(lambda connection: connection.execute(query).scalar())
        return reservation_id


def _read(reservation_id: str, body: bytes) -> Reservation | None:
    return unseal_or_none(Reservation, body, f"the reservation {reservation_id}")
