"""Reservations: those of the visitor's projects, and to reserve, renew and release devices."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.models import ReservationInfo
from etfarm.client.web.form_fields import Field, integer_of, number_of, text_of
from etfarm.client.web.forms import Fields
from etfarm.client.web.pages._actions import Action, perform
from etfarm.client.web.templating import render, templates_of
from etfarm.client.web.visitors import farm
from etfarm.wire.errors import Fault, Kind, error_for, error_of

DEFAULT_MINUTES = 30


async def reservations(request: Request) -> Response:
    """Show the current reservations of the visitor's projects, the next to end first."""
    client = await farm(request)
    listed, devices = await asyncio.gather(client.reservations(), client.devices())
    return render(
        request, "reservations.html", title="Reservations", command="etfarm devices reservations", reservations=listed,
        names={device.id: device.name for device in devices},
    )  # fmt: skip


async def reserve(request: Request) -> Response:
    """Ask what to reserve, or reserve it, all or none."""
    client = await farm(request)
    selector = request.query_params.get("selector", "")
    hint = "Which devices, for example `arch=aarch64,memory>=2GiB`; empty for any. Idle ones are preferred."
    action = Action(
        title="Reserve devices",
        about="Until it ends, only runs and sessions that name the reservation are placed on these devices. A busy device is "
        "yours as soon as its current run ends.",
        button="Reserve", command=("etfarm", "devices", "reserve"), back=_address(request),
        fields=(
            Field("selector", "Selector", value=selector, is_required=True, hint=hint),
            Field("count", "Devices", value="1", default="1", flag="--count", kind="number", minimum=1, maximum=1_000),
            _minutes_field(str(DEFAULT_MINUTES), default=str(DEFAULT_MINUTES)),
            Field("reason", "Reason", flag="--reason", hint="People who wait for the devices read it."),
        ),
    )  # fmt: skip

    async def change(fields: Fields) -> ReservationInfo:
        count = integer_of(fields, "count", "Devices")
        if count == 0:  # the farm reads 0 as not given
            raise error_for("BAD_OPTION", "Devices must be at least 1, got 0.", "Correct it.", option="count")
        minutes = _minutes_of(fields) or DEFAULT_MINUTES
        return await client.reserve_devices(
            text_of(fields, "selector"), count=1 if count is None else count, minutes=minutes, reason=text_of(fields, "reason")
        )

    return await perform(request, action, change)


async def renew(request: Request) -> Response:
    """Ask for how long, or let a reservation end later."""
    client = await farm(request)
    known = await _find(client, request.path_params["reservation_id"])
    minutes = str(round(known.duration_s / 60)) if known.duration_s >= 60 else str(DEFAULT_MINUTES)
    action = Action(
        title="Renew the reservation",
        about=f"It ends that many minutes from now, not at {known.expires_at:%Y-%m-%d %H:%M} UTC.",
        button="Renew", command=("etfarm", "devices", "renew", known.id), back=_address(request),
        fields=(_minutes_field(minutes),),
    )  # fmt: skip
    return await perform(request, action, lambda fields: client.renew_reservation(known.id, minutes=_minutes_of(fields)))


async def release(request: Request) -> Response:
    """Ask, or end a reservation."""
    client = await farm(request)
    known = await _find(client, request.path_params["reservation_id"])
    why = f" It was made by {known.owner}{f': {known.reason}' if known.reason else '.'}"
    action = Action(
        title="Release the reservation?",
        about=f"What runs on its devices continues; what waits for them fails.{why}",
        button="Release", command=("etfarm", "devices", "release", known.id), back=_address(request), is_dangerous=True,
    )  # fmt: skip
    return await perform(request, action, lambda _: client.release_reservation(known.id))


async def _find(client: AsyncFarm, reservation_id: str) -> ReservationInfo:
    """Return a current reservation of the visitor's projects."""
    for known in await client.reservations():
        if known.id == reservation_id:
            return known
    raise error_of(
        Fault.USER, "RESERVATION_NOT_FOUND", f"There is no reservation {reservation_id[:80]!r}.",
        "It has ended, or it is another project's; reserve again.", kind=Kind.NOT_FOUND, metadata={"reservation": reservation_id},
    )  # fmt: skip


def _minutes_field(value: str, default: str = "") -> Field:
    return Field("minutes", "Minutes", value=value, default=default, flag="--for", unit="m", kind="number", minimum=1)


def _minutes_of(fields: Fields) -> float | None:
    minutes = number_of(fields, "minutes", "Minutes")
    if minutes is not None and minutes <= 0:
        raise error_for("BAD_OPTION", f"Minutes must be greater than 0, got {minutes:g}.", "Correct it.", option="minutes")
    return minutes


def _address(request: Request) -> str:
    return templates_of(request).url_for("reservations")


ROUTES = (
    Route("/reservations", reservations, name="reservations", methods=["GET"]),
    Route("/reserve", reserve, name="reserve", methods=["GET", "POST"]),
    Route("/reservations/{reservation_id}/renew", renew, name="renew_reservation", methods=["GET", "POST"]),
    Route("/reservations/{reservation_id}/release", release, name="release_reservation", methods=["GET", "POST"]),
)
