"""`etfarm devices`: the devices that the farm can measure on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection, Server
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.views.devices import (
    build_table,
    describe,
    describe_drain,
    describe_reservation,
    describe_retirement,
    facts,
    list_labels,
)
from etfarm.client.cli.workflows import reserving, telemetry, watching
from etfarm.client.fleet.runners import describe_runner
from etfarm.wire.errors import EtfarmError, error_for

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import Device, HealthEvent, RetiredDevice


def main(argv: list[str]) -> int:
    """Run `etfarm devices`."""
    commands: dict[str, Command] = {
        "list": list_, "show": show, "health": health, "check": check, "clear": clear, "telemetry": telemetry.telemetry,
        "reserve": reserving.reserve, "renew": reserving.renew, "release": reserving.release,
        "reservations": reserving.reservations, "label": label, "drain": drain, "undrain": undrain, "restrict": restrict,
        "forget": forget, "retire": retire,
    }  # fmt: skip
    about = "List, watch, check, reserve, label, drain, restrict and retire the devices of the farm."
    return execute(commands, argv, "devices", about)


def list_(
    outcome: Outcome,
    connection: Connection,
    device: Annotated[str, typer.Option("--device", metavar="SELECTOR", help="Only those that match.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show changes until Ctrl-C: a live table, or lines in a pipe.")] = False,
    json: options.ListJson = None,
) -> None:
    """List all known devices, offline ones included."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.cli.views import device_health

    if watch:
        if json is not None:
            raise error_for("USAGE", "--watch cannot be combined with --json.", "Leave one of them out.")
        run_async(lambda: watching.watch_devices(device, connection, build_table=build_table, describe=describe))
        return
    listing = JsonListing(outcome, json, "devices")

    devices = listing.record(connection.call(lambda farm: farm.devices(device)))
    if listing.is_on_stdout:
        return
    if not devices:
        tell(f"No device matches {device!r}." if device else "There is no device: run `etfarm agent` on one.")
        return
    output.show(build_table(output.open_console(), devices))
    now = datetime.now(UTC)
    for item in devices:
        if item.reservation is not None:
            output.show(output.line(f"{item.name}: {describe_reservation(item.reservation, now)}", style="yellow"))
        if item.problem is not None:
            output.show(output.line(f"{item.name}: {item.problem}", style="red"))
        elif item.drain is not None:
            output.show(output.line(f"{item.name}: {describe_drain(item.drain, now)}", style="yellow"))
        elif item.runner == "python":
            output.show(output.line(f"{item.name}: its runner is {describe_runner(item)}", style="yellow"))
        if item.health.reason:
            text = f"{item.name}: {item.health.state.value.lower()}, {item.health.reason}"
            output.show(output.line(text, style=device_health.style_of(item.health.state)))


def show(listing: Annotated[JsonListing, Key("device", is_list=False)], connection: Connection, device: options.DeviceId) -> None:
    """Show all that is known of a device, and what last happened to its health."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.cli.views import device_health

    async def fetch(farm: AsyncFarm) -> tuple[Device, list[HealthEvent]]:
        known = await farm.device(device)
        try:
            return known, [] if listing.is_on_stdout else await farm.device_health(known.id, limit=_SHOWN_EVENTS)
        except EtfarmError as error:
            if error.reason != "UNIMPLEMENTED":  # a server of etfarm 0.2
                raise
            return known, []

    known, events = connection.call(fetch)
    listing.record(known)
    if not listing.is_on_stdout:
        output.show(output.facts(facts(known, datetime.now(UTC))))
        if events:
            tell("")
        device_health.show_events(events)


def health(
    listing: Annotated[JsonListing, Key("health_events")],
    connection: Connection,
    device: options.DeviceId,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000, help="Only the newest N.")] = 50,
) -> None:
    """List a device's faults and health runs, newest first, and what was done about them."""
    from etfarm.client.cli.views import device_health

    events = listing.record(connection.call(lambda farm: farm.device_health(device, limit=limit)))
    if listing.is_on_stdout:
        return
    device_health.show_events(events)
    if not events:
        tell(f"Nothing has happened to the health of {device}.")


def check(
    listing: Annotated[JsonListing, Key("health_event", is_list=False)], connection: Connection, device: options.DeviceId
) -> None:
    """Run the farm's health program on a device, after what it runs now. Fails if the device returns wrong outputs."""
    from etfarm.client.cli.views import device_health
    from etfarm.wire.errors import Fault, error_of

    event = listing.record(connection.call(lambda farm: farm.check_device(device)))
    if not listing.is_on_stdout:
        device_health.show_events([event])
    if event.run is not None and not event.run.passed:
        raise error_of(Fault.DEVICE, event.reason, event.message, f"See `etfarm devices health {device}`.")


def clear(connection: Connection, devices: options.DeviceIds) -> None:
    """Forget the faults of devices, and let them be used again; a failing health run quarantines them anew. Admins only."""

    async def change(farm: AsyncFarm) -> None:
        for device in devices:
            changed = await farm.clear_device(device)
            tell(f"The health of {changed.name} ({changed.id}) is {changed.health.state.value}.")

    connection.call(change)


def label(
    connection: Connection,
    device: options.DeviceId,
    labels: Annotated[list[str] | None, typer.Argument(metavar="K=V", help="Labels to set.", show_default=False)] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="K", help="A label to remove; repeatable.")] = None,
) -> None:
    """Set and remove a device's labels. They take precedence over its agent's, and stay when it reconnects. Admins only."""
    pairs: dict[str, str] = {}
    for key, value in map(_pair, labels or ()):
        if key in pairs:
            raise error_for("USAGE", f"Label {key} is set twice, to {pairs[key]!r} and to {value!r}.", "Give one.")
        pairs[key] = value
    if not pairs and not remove:
        raise error_for("USAGE", "Give at least one K=V or --remove.", "For example `etfarm devices label board-7 rack=3`.")

    changed = connection.call(lambda farm: farm.label_device(device, pairs, remove=remove or ()))
    tell(f"{changed.name} has the labels {list_labels(changed)}." if changed.labels else f"{changed.name} has no labels.")


def drain(
    connection: Connection,
    devices: options.DeviceIds,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for people who wait for the device.")] = "",
) -> None:
    """Place nothing new on devices until `undrain`; what they run continues. Admins only."""

    async def change(farm: AsyncFarm) -> None:
        for device in devices:
            changed = await farm.drain_device(device, reason)
            running = "; what it runs now continues" if changed.attempt_id else ""
            tell(f"{changed.name} ({changed.id}) takes nothing new{running}.")

    connection.call(change)


def undrain(connection: Connection, devices: options.DeviceIds) -> None:
    """Place runs on drained devices again. Admins only."""

    async def change(farm: AsyncFarm) -> None:
        for device in devices:
            changed = await farm.undrain_device(device)
            tell(f"{changed.name} ({changed.id}) is {changed.state.value.lower()}.")

    connection.call(change)


def forget(connection: Connection, device: options.DeviceId) -> None:
    """Remove an offline device from the farm. Its reports stay; it comes back when an agent announces it: `retire` keeps it away.

    Admins only.
    """

    async def remove(farm: AsyncFarm) -> Device:
        known = await farm.device(device)
        await farm.forget_device(known.id)
        return known

    removed = connection.call(remove)
    tell(f"Device {removed.name} ({removed.id}) is forgotten.")


def retire(
    connection: Connection,
    device: options.DeviceId,
    now: Annotated[bool, typer.Option("--now", help="End what it runs; other devices take its runs over.")] = False,
    drain: Annotated[
        float,
        typer.Option(
            "--drain-timeout", metavar="S", min=0, max=86_400, callback=options.finite, help="How long what it runs may take."
        ),
    ] = 3600.0,
) -> None:
    """Remove a device for good, offline or not: drain it, let what it runs end, revoke its agent's token, forget it. Admins only.

    Its reports and its place in histories stay. If its agent has other devices, the agent keeps its token.
    """

    async def remove(farm: AsyncFarm) -> RetiredDevice:
        known = await farm.device(device)
        if running := 0 if now else len(known.attempt_ids):
            what = f"{running} run{'s' if running > 1 else ''}"
            tell(f"{known.name} takes nothing new, and still has {what}. Ctrl-C leaves it drained; --now ends the rest.")
        return await farm.retire_device(known.id, now=now, drain_s=drain)

    for line in describe_retirement(connection.call(remove)):
        tell(line)


def restrict(
    connection: Server,
    device: options.DeviceId,
    project: Annotated[
        list[str] | None, typer.Option("--project", metavar="P", help="A project that may use the device; repeatable.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Let every project use the device.")] = False,
) -> None:
    """Let only some projects use a device; others do not see it. What runs on it now continues. Admins only."""
    if bool(project) == all_:
        raise error_for(
            "USAGE", "Give either --project or --all.", "For example `etfarm devices restrict board-7 --project vision`."
        )

    changed = connection.call(lambda farm: farm.restrict_device(device, project or ()))
    tell(f"{changed.name} runs jobs of {', '.join(changed.projects) or 'every project'}.")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise error_for("USAGE", f"A label must be K=V, got {text!r}.", "To remove one, give its key with --remove.")
    return key, value


_SHOWN_EVENTS = 8
