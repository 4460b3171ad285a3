"""`etfarm devices`: the devices that the farm can measure on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.usage import Usage

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from etfarm.client.models import Cluster, Device, Drain


def main(argv: list[str]) -> int:
    """Run `etfarm devices`."""
    later = ("reserve", "release")
    commands: dict[str, Command] = {
        "list": list_, "show": show, "label": label, "drain": drain, "undrain": undrain, "restrict": restrict, "forget": forget
    }  # fmt: skip
    return execute(
        commands, argv, "devices", "Lists, shows, labels, drains, restricts and forgets the devices of the farm.", later
    )


def list_(
    context: typer.Context,
    device: Annotated[str, typer.Option("--device", metavar="SELECTOR", help="Only those that match.")] = "",
    json: options.ListJson = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """All known devices, offline ones included."""
    from rich.text import Text

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    listing = JsonListing(context.obj, json, "devices")

    async def fetch() -> list[Device]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.devices(device)

    devices = listing.record(run_async(fetch))
    if listing.is_on_stdout:
        return
    if not devices:
        tell(f"No device matches {device!r}." if device else "No device has connected yet: run `etfarm agent` on one.")
        return
    now = datetime.now(UTC)
    rows = [
        (
            item.name,
            item.id[:12],
            f"{item.arch}{' (emulated)' if item.emulated else ''}",
            item.soc or "-",
            str(item.cores),
            units.size(item.memory_bytes),
            Text(item.state.value, style=_STYLES[item.state.value]),
            units.ago(item.last_seen_at, now),
        )
        for item in devices
    ]
    heads = ("NAME", "ID", "ARCH", "SOC", "CORES", "MEMORY", "STATE", "LAST SEEN")
    output.show_table(heads, rows, right=("CORES", "MEMORY"), shrink=("NAME", "SOC"))
    for item in devices:
        if item.problem is not None:
            output.show(output.line(f"{item.name}: {item.problem}", style="red"))
        elif item.drain is not None:
            output.show(output.line(f"{item.name}: {_drained(item.drain, now)}", style="yellow"))
        elif item.runner == "python":
            output.show(output.line(f"{item.name}: its runner is {_runner(item.runner, item.own_runners)}", style="yellow"))


_STYLES = {"IDLE": "green", "BUSY": "bold", "OFFLINE": "dim", "DRAINING": "yellow", "UNUSABLE": "red"}


def show(
    context: typer.Context,
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id, its first characters, or its name.")],
    json: options.ListJson = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """One device with all that is known of it."""
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal import output

    listing = JsonListing(context.obj, json, "device", is_list=False)

    async def fetch() -> Device:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.device(device)

    known = listing.record(run_async(fetch))
    if not listing.is_on_stdout:
        output.show(output.facts(facts(known, datetime.now(UTC))))


def label(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id, its first characters, or its name.")],
    labels: Annotated[list[str] | None, typer.Argument(metavar="K=V", help="Labels to set.", show_default=False)] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="K", help="A label to remove; repeatable.")] = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """Set and remove a device's labels. They take precedence over its agent's, and stay when it reconnects. Admins only."""
    from etfarm.client.aio import AsyncFarm

    pairs: dict[str, str] = {}
    for key, value in map(_pair, labels or ()):
        if key in pairs:
            raise Usage(f"Label {key} is set twice, to {pairs[key]!r} and to {value!r}.", "Give one.")
        pairs[key] = value
    if not pairs and not remove:
        raise Usage("Give at least one K=V or --remove.", "For example `etfarm devices label board-7 rack=3`.")

    async def change() -> Device:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.label_device(device, pairs, remove=remove or ())

    changed = run_async(change)
    tell(f"{changed.name} has the labels {_labels(changed)}." if changed.labels else f"{changed.name} has no labels.")


def drain(
    devices: Annotated[list[str], typer.Argument(metavar="DEVICE", help="Ids, their first characters, or names.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for people who wait for the device.")] = "",
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """Place nothing new on devices until `undrain`; what they run continues. Admins only."""
    from etfarm.client.aio import AsyncFarm

    async def change() -> None:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            for device in devices:
                changed = await farm.drain_device(device, reason)
                running = "; what it runs now continues" if changed.attempt_id else ""
                tell(f"{changed.name} ({changed.id}) takes nothing new{running}.")

    run_async(change)


def undrain(
    devices: Annotated[list[str], typer.Argument(metavar="DEVICE", help="Ids, their first characters, or names.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """Place runs on drained devices again. Admins only."""
    from etfarm.client.aio import AsyncFarm

    async def change() -> None:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            for device in devices:
                changed = await farm.undrain_device(device)
                tell(f"{changed.name} ({changed.id}) is {changed.state.value.lower()}.")

    run_async(change)


def forget(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id, its first characters, or its name.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """Remove an offline device from the farm. Its reports stay; it comes back when an agent announces it. Admins only."""
    from etfarm.client.aio import AsyncFarm

    async def remove() -> Device:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            known = await farm.device(device)
            await farm.forget_device(known.id)
            return known

    removed = run_async(remove)
    tell(f"Device {removed.name} ({removed.id}) is forgotten.")


def restrict(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id, its first characters, or its name.")],
    project: Annotated[
        list[str] | None, typer.Option("--project", metavar="P", help="A project that may use the device; repeatable.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Let every project use the device.")] = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Let only some projects use a device; others do not see it. What runs on it now continues. Admins only."""
    from etfarm.client.aio import AsyncFarm

    if bool(project) == all_:
        raise Usage("Give either --project or --all.", "For example `etfarm devices restrict board-7 --project vision`.")

    async def change() -> Device:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.restrict_device(device, project or ())

    changed = run_async(change)
    tell(f"{changed.name} runs jobs of {', '.join(changed.projects) or 'every project'}.")


def facts(device: Device, now: datetime) -> Iterator[tuple[str, RenderableType]]:
    """Yield all known facts of a device as names and values, without missing ones."""
    from rich.text import Text

    from etfarm.client.formats import units

    reported = _HOST_TELEMETRY if device.emulated else _TELEMETRY.keys()
    telemetry = {key: _TELEMETRY[key](value) for key, value in device.telemetry.items() if key in reported}
    shared = [cluster for cluster in device.clusters if set(cluster.features) != set(device.features)]
    pairs: list[tuple[str, RenderableType]] = [
        ("name", device.name),
        ("id", device.id),
        ("state", Text(f"{device.state.value}, last seen {units.ago(device.last_seen_at, now)}", _STYLES[device.state.value])),
        ("problem", Text(str(device.problem), "red") if device.problem else ""),
        ("drained", Text(_drained(device.drain, now), "yellow") if device.drain else ""),
        ("attempt", device.attempt_id),
        ("projects", ", ".join(device.projects)),
        ("model", device.model),
        ("soc", device.soc),
        ("os", device.os),
        ("arch", device.arch),
        ("emulated", "its outputs equal a real one's; its times mean nothing" if device.emulated else ""),
        ("cores", _all({"": str(device.cores), **telemetry}, "", "cpu_share", "load_1m", "frequency_hz")),
        *[("", _clusters(device.clusters))][: len(device.clusters)],
        ("features", " ".join(device.features)),
        *[("", f"{cluster.part} has {_besides(cluster, device)} as well") for cluster in shared],
        (
            "memory",
            _all(
                {"total": units.size(device.memory_bytes) if device.memory_bytes else "", **telemetry},
                "total",
                "memory_available_bytes",
            ),
        ),
        ("pages", f"{device.page_size_bytes >> 10} KiB each" if device.page_size_bytes else ""),
        ("disk", telemetry.get("disk_free_bytes", "")),
        ("sensors", _sensors(device, telemetry.get("temperature_c", ""))),
        ("battery", _battery(device.has_battery, telemetry)),
        # An unusable device has not reported what it would need.
        ("runner", _runner(device.runner, device.own_runners) if device.runner or device.problem is None else ""),
        ("backends", ", ".join(device.backends)),
        ("operators", str(device.operator_count or "")),
        ("labels", _labels(device)),
        ("agent", f"{device.agent_id}{', ' if 'agent_rss_bytes' in telemetry else ''}{telemetry.get('agent_rss_bytes', '')}"),
    ]
    return ((name, value) for name, value in pairs if value)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise Usage(f"A label must be K=V, got {text!r}.", "To remove one, give its key with --remove.")
    return key, value


def _labels(device: Device) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(device.labels.items()))


def _drained(drain: Drain, now: datetime) -> str:
    """Return who drained a device, when and why."""
    from etfarm.client.formats import units

    why = f": {drain.reason}" if drain.reason else ""
    return f"drained by {drain.principal} {units.ago(drain.started_at, now)}{why}"


def _all(values: Mapping[str, str], *keys: str) -> str:
    return ", ".join(values[key] for key in keys if values.get(key))


def _clusters(clusters: Sequence[Cluster]) -> Table:
    """Return a row per cluster, fastest first."""
    from rich.table import Table

    from etfarm.client.formats import units

    table = Table.grid(padding=(0, 2, 0, 0))
    for column in ("part", "cpus", "clock", "governor"):
        table.add_column(overflow="fold", justify="right" if column == "clock" else "left")
    for cluster in clusters:
        cpus = f"cpu{'' if len(cluster.cpus) == 1 else 's'} {_ranges(cluster.cpus)}"
        sharing = cluster.physical_cores != len(cluster.cpus)
        table.add_row(
            cluster.part or "unknown",
            f"{cpus} ({units.count(cluster.physical_cores, 'core')})" if sharing else cpus,
            f"up to {cluster.max_frequency_hz / 1e9:.2f} GHz" if cluster.max_frequency_hz else "",
            cluster.governor,
        )
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """Return ranges such as `0-3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _besides(cluster: Cluster, device: Device) -> str:
    return " ".join(feature for feature in cluster.features if feature not in device.features)


def _sensors(device: Device, hottest: str) -> str:
    """Return the hottest sensor, and the sensors' names; phones have a hundred."""
    names = ", ".join(device.thermal_zones[:_MOST_SENSORS])
    if (more := len(device.thermal_zones) - _MOST_SENSORS) > 0:
        names = f"{names} and {more} more"
    return ": ".join(part for part in (hottest, names) if part)


def _battery(has_one: bool | None, telemetry: Mapping[str, str]) -> str:
    if has_one is False:
        return "none"
    return _all(telemetry, "battery_share", "charging") or ("yes" if has_one else "")


def _runner(used: str, own: Collection[str]) -> str:
    """Return the runner of a device's programs, and its other runners."""
    if not used:
        return "none: `etfarm bundle build` builds one, `etfarm bundle add` adds it"
    if used == "python":
        return f"{used}, its own, as the farm has no bundle for it: `etfarm bundle build` builds one, `etfarm bundle add` adds it"
    if used in own:
        return f"{used}, its own"
    return f"{used}, the farm's bundle" + (f"; {', '.join(own)} of its own" if own else "")


def _size(value: float) -> str:
    from etfarm.client.formats import units

    return units.size(int(value))


_TELEMETRY: dict[str, Callable[[float], str]] = {
    "cpu_share": lambda value: f"{value * 100:.0f} % busy",
    "load_1m": lambda value: f"load {value:.2f} over a minute",
    "memory_available_bytes": lambda value: f"{_size(value)} free",
    "disk_free_bytes": lambda value: f"{_size(value)} free",
    "temperature_c": lambda value: f"hottest {value:.1f} °C",
    "frequency_hz": lambda value: f"clock {value / 1e9:.2f} GHz",
    "battery_share": lambda value: f"{value * 100:.0f} %",
    "charging": lambda value: "charging" if value else "not charging",
    "agent_rss_bytes": lambda value: f"{_size(value)} of memory",
}
"""Formatters of a heartbeat's values, by key."""

_HOST_TELEMETRY = ("memory_available_bytes", "disk_free_bytes", "agent_rss_bytes")
"""Values that an emulated device reports of its host because they also apply to its programs; the host's load, clock,
temperature and battery do not.
"""

_MOST_SENSORS = 12
