"""`etfarm devices reserve`, `renew`, `release` and `reservations`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.wire.errors import error_for
from etfarm.wire.names import RESERVATION_VARIABLE, SERVER_VARIABLE

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import ReservationInfo
    from etfarm.wire.errors import EtfarmError

CANNOT_START = 127
"""Exit code if COMMAND does not exist, as of a shell."""

Duration = Annotated[str, typer.Option("--for", metavar="TIME", help="Time until it ends without a renewal, as 90s, 30m or 2h.")]
ReservationId = Annotated[str, typer.Argument(metavar="ID", help="The reservation's id.")]


def reserve(
    outcome: Outcome,
    connection: Connection,
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help="Selects the devices, as arch=aarch64; '' for any.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Hold the reservation while this runs, then release it.", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=1_000, help="Number of devices.")] = 1,
    duration: Duration = "30m",
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for people who wait for the devices.")] = "",
    json: options.ListJson = None,
) -> int:
    """Reserve devices, all or none: only runs and sessions with --reservation ID are placed on them until it ends.

    COMMAND finds the id in ETFARM_RESERVATION, which `etfarm` commands use by themselves. Busy devices are reserved at once and
    become yours as soon as their current run ends.
    """
    from etfarm.client.embedded.lease import is_lasting

    minutes = options.seconds_of("--for", duration) / 60
    listing = JsonListing(outcome, json, "reservation", is_list=False)
    if command:
        if listing.is_on_stdout:
            raise error_for("USAGE", "--json - cannot be combined with COMMAND, which writes to stdout.", "Name a file.")
        return run_async(lambda: _hold(command, selector, count, minutes, reason, connection, listing))

    async def create() -> ReservationInfo:
        if not (connection.server or os.environ.get(SERVER_VARIABLE)) and not await is_lasting():
            raise error_for(
                "NEEDS_LASTING_FARM",
                "A reservation without a command needs a farm that stays: the embedded farm ends with this command.",
                "Give a command after --, run `etfarm up` in another terminal first, or name a server.",
            )
        async with connection.farm() as farm:
            return await farm.reserve_devices(selector, count=count, minutes=minutes, reason=reason)

    reserved = listing.record(run_async(create))
    if not listing.is_on_stdout:
        tell(reserved.id)
        tell(f"{_described(reserved)} Renew it with `etfarm devices renew {reserved.id}`.", to_stderr=True)
    return 0


def renew(
    outcome: Outcome,
    connection: Connection,
    reservation: ReservationId,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="Time from now, as 30m. [as reserved]")] = "",
    json: options.ListJson = None,
) -> None:
    """Let a reservation end later."""
    minutes = options.seconds_of("--for", duration) / 60 if duration else None
    listing = JsonListing(outcome, json, "reservation", is_list=False)

    renewed = listing.record(connection.call(lambda farm: farm.renew_reservation(reservation, minutes=minutes)))
    if not listing.is_on_stdout:
        tell(_described(renewed))


def release(
    connection: Connection,
    reservations: Annotated[list[str], typer.Argument(metavar="ID", help="Ids of reservations.")],
) -> None:
    """End reservations: yours; an admin, any. What runs on the devices continues, and what waits for them fails."""

    async def end(farm: AsyncFarm) -> None:
        for reservation in reservations:
            await farm.release_reservation(reservation)
            tell(f"The reservation {reservation} is released.")

    connection.call(end)


def reservations(listing: Annotated[JsonListing, Key("reservations")], connection: Connection) -> None:
    """List the current reservations of your projects, the next to expire first."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    async def fetch(farm: AsyncFarm) -> tuple[list[ReservationInfo], dict[str, str]]:
        return await farm.reservations(), {device.id: device.name for device in await farm.devices()}

    listed, names = connection.call(fetch)
    listing.record(listed)
    if listing.is_on_stdout:
        return
    if not listed:
        tell("There are no reservations.")
        return
    now = datetime.now(UTC)
    rows = [
        (
            item.id, ", ".join(names.get(device, device[:12]) for device in item.device_ids), item.owner, item.project,
            f"{item.expires_at.astimezone():%Y-%m-%d %H:%M:%S}", units.clock(max(0.0, (item.expires_at - now).total_seconds())),
            item.reason,
        )
        for item in listed
    ]  # fmt: skip
    heads = ("ID", "DEVICES", "OWNER", "PROJECT", "UNTIL", "LEFT", "REASON")
    output.show_table(heads, rows, right=("LEFT",), shrink=("DEVICES", "REASON"))


async def _hold(
    command: Sequence[str],
    selector: str,
    count: int,
    minutes: float,
    reason: str,
    connection: Connection,
    listing: JsonListing,
) -> int:
    """Run a command while devices are reserved; return its exit code."""

    def warn(error: EtfarmError) -> None:
        tell(f"etfarm: {error} The command continues without it.", to_stderr=True)

    async with (
        connection.farm() as farm,
        farm.reserve(selector, count=count, minutes=minutes, reason=reason, on_end=warn) as reservation,
    ):
        listing.record(reservation.info)
        tell(_described(reservation.info), to_stderr=True)
        environment = os.environ | {RESERVATION_VARIABLE: reservation.id}
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, env=environment))
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:  # by a signal that met a command which had just begun
            with suppress(OSError):
                child = await starting
                child.terminate()
                await child.wait()
            raise
        except OSError as error:
            tell(f"etfarm: {command[0]} cannot be started: {error.strerror}.", to_stderr=True)
            return CANNOT_START
        return await _exit_code(child)


async def _exit_code(child: asyncio.subprocess.Process) -> int:
    """Wait for a child; return its exit code as a shell does. Signals are passed on to the child, which may ignore them."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def forward(number: int) -> None:
        # A terminal sends Ctrl-C to the child itself.
        if number != signal.SIGINT or not sys.stdin.isatty():
            with suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, forward, number)
    try:
        code = await child.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
    return code if code >= 0 else 128 - code


def _described(reservation: ReservationInfo) -> str:
    from etfarm.client.formats import units

    devices = units.count(len(reservation.device_ids), "device")
    until = f"{reservation.expires_at.astimezone():%Y-%m-%d %H:%M:%S}"
    return f"Reserved {devices} until {until}: {', '.join(reservation.device_ids)}."
