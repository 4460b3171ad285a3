"""What is shown of devices: rows of a table, lines of changes, and all facts of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from etfarm.client.fleet.runners import describe_runner

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from etfarm.client.models import Cluster, Device, Drain, RemovedAgent, ReservationInfo, RetiredDevice


def build_table(console: Console, devices: Sequence[Device]) -> Table:
    """Return a row for each device."""
    from rich.text import Text

    from etfarm.client.cli.terminal import output
    from etfarm.client.cli.views import device_health
    from etfarm.client.formats import units
    from etfarm.client.models import HealthState

    now = datetime.now(UTC)
    is_any_reserved = any(item.reservation for item in devices)
    # A farm without health runs knows nothing of its devices' health.
    is_health_known = any(item.health.state is not HealthState.UNKNOWN for item in devices)
    rows: list[tuple[str | Text, ...]] = [
        (
            item.name,
            item.id[:12],
            f"{item.arch}{' (emulated)' if item.emulated else ''}",
            item.soc or "-",
            str(item.cores),
            units.size(item.memory_bytes),
            Text(item.state.value, style=_STYLES[item.state.value]),
            *((device_health.state_text(item.health.state),) if is_health_known else ()),
            *((_holder(item),) if is_any_reserved else ()),
            units.ago(item.last_seen_at, now),
        )
        for item in devices
    ]
    known_health = ("HEALTH",) if is_health_known else ()
    reserved = ("RESERVED BY",) if is_any_reserved else ()
    heads = ("NAME", "ID", "ARCH", "SOC", "CORES", "MEMORY", "STATE", *known_health, *reserved, "LAST SEEN")
    return output.build_table(console, heads, rows, right=("CORES", "MEMORY"), shrink=("NAME", "SOC"))


def describe(device: Device) -> str:
    """Return what changes of a device."""
    telemetry_ = ", ".join(
        _TELEMETRY[key](value) for key, value in device.telemetry.items() if key in ("cpu_share", "temperature_c")
    )
    held = f"reserved by {_holder(device)}" if device.reservation else ""
    why = str(device.problem or "") or (device.drain.reason if device.drain else "")
    health_ = f"{device.health.state.value}: {device.health.reason}" if device.health.reason else ""
    return ", ".join(filter(None, (f"{device.name} ({device.id[:12]}): {device.state.value}", why, health_, held, telemetry_)))


def _holder(device: Device) -> str:
    """Return who holds a device until when, in local time; empty if it is not reserved."""
    reservation = device.reservation
    return f"{_owner_of(reservation)} until {reservation.expires_at.astimezone():%H:%M:%S}" if reservation else ""


def _owner_of(reservation: ReservationInfo) -> str:
    """Return the owner of a reservation, whom members of other projects do not see."""
    return reservation.owner or "another project"


def describe_reservation(reservation: ReservationInfo, now: datetime) -> str:
    """Return who holds a device, until when, why and by which reservation."""
    from etfarm.client.formats import units

    until = f"{reservation.expires_at.astimezone():%Y-%m-%d %H:%M:%S}"
    left = units.clock(max(0.0, (reservation.expires_at - now).total_seconds()))
    why = f": {reservation.reason}" if reservation.reason else ""
    which = f", reservation {reservation.id}" if reservation.id else ""
    return f"reserved by {_owner_of(reservation)} until {until} (in {left}) unless renewed{which}{why}"


_STYLES = {"IDLE": "green", "BUSY": "bold", "OFFLINE": "dim", "DRAINING": "yellow", "UNUSABLE": "red"}


def facts(device: Device, now: datetime) -> Iterator[tuple[str, RenderableType]]:
    """Yield all known facts of a device as names and values, without missing ones."""
    from rich.text import Text

    from etfarm.client.cli.views import device_health
    from etfarm.client.formats import units
    from etfarm.client.models import DeviceHealth

    reported = _HOST_TELEMETRY if device.emulated else _TELEMETRY.keys()
    telemetry = {key: _TELEMETRY[key](value) for key, value in device.telemetry.items() if key in reported}
    shared = [cluster for cluster in device.clusters if set(cluster.features) != set(device.features)]
    pairs: list[tuple[str, RenderableType]] = [
        ("name", device.name),
        ("id", device.id),
        ("state", Text(f"{device.state.value}, last seen {units.ago(device.last_seen_at, now)}", _STYLES[device.state.value])),
        ("problem", Text(str(device.problem), "red") if device.problem else ""),
        ("drained", Text(describe_drain(device.drain, now), "yellow") if device.drain else ""),
        ("reserved", Text(describe_reservation(device.reservation, now), "yellow") if device.reservation else ""),
        ("health", device_health.facts(device.health, now) if device.health != DeviceHealth() else ""),
        ("attempt", ", ".join(device.attempt_ids) or device.attempt_id),
        ("concurrent runs", str(device.concurrent_runs) if device.concurrent_runs > 1 else ""),
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
        ("runner", describe_runner(device)),
        ("backends", ", ".join(device.backends)),
        ("operators", str(device.operator_count or "")),
        ("labels", list_labels(device)),
        ("etfarm", device.agent_version),
        ("agent", f"{device.agent_id}{', ' if 'agent_rss_bytes' in telemetry else ''}{telemetry.get('agent_rss_bytes', '')}"),
    ]
    return ((name, value) for name, value in pairs if value)


def list_labels(device: Device) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(device.labels.items()))


def describe_drain(drain: Drain, now: datetime) -> str:
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


def describe_retirement(retired: RetiredDevice) -> Iterator[str]:
    """Yield sentences on a retired device: what became of its runs, of its agent, and of the agent's token."""
    device, agent_id = retired.device, retired.device.agent_id
    if count := len(retired.ended_attempts):
        yield f"{count} run{'s' if count > 1 else ''} on {device.name} {'were' if count > 1 else 'was'} ended."
    yield f"Device {device.name} ({device.id}) is retired; its reports stay."
    if not agent_id:
        yield "The server's first answer was lost: `etfarm agents list` shows whether its agent is refused."
        return
    if retired.other_devices:
        also = ", ".join(each[:12] for each in retired.other_devices)
        yield f"Agent {agent_id} also has {also}, so it keeps its token, and {device.name} is back when it announces it again."
    elif retired.revoked_tokens:
        yield f"{_revoked(retired.revoked_tokens)} Agent {agent_id} is refused."
    else:
        yield f"Agent {agent_id} is refused; its token is not its alone, and stays valid for others."


def describe_removal(removed: RemovedAgent) -> Iterator[str]:
    """Yield sentences on a removed agent and its tokens."""
    yield f"Agent {removed.agent.agent_id} is removed."
    if removed.revoked_tokens:
        yield _revoked(removed.revoked_tokens)
    elif removed.agent.principal:
        yield f"It had no token of its own: with one of {removed.agent.principal} that is valid, it can connect as a new agent."


def _revoked(tokens: Sequence[str]) -> str:
    return f"Token{'s' if len(tokens) > 1 else ''} {', '.join(tokens)} revoked."
