"""Step 5, command line: `etfarm devices`, what the farm can measure on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute, run_async


def main(argv: list[str]) -> int:
    """Runs `etfarm devices`."""
    later = ("reserve", "release", "drain", "undrain", "label")
    return execute({"list": list_, "show": show}, argv, "devices", "Lists and shows the devices of the farm.", later)


def list_(
    device: Annotated[str, typer.Option("--device", metavar="SELECTOR", help="Only those that match.")] = "",
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """All known devices, offline ones included."""
    from rich.text import Text

    from etfarm.client import units
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli import output
    from etfarm.client.models import Device

    async def fetch() -> list[Device]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.devices(device)

    found = run_async(fetch)
    if not found:
        print(f"No device matches {device!r}." if device else "No device has connected so far: run `etfarm agent` on one.")
        return
    now = datetime.now(UTC)
    rows = [
        (
            one.name,
            one.id[:12],
            f"{one.arch}{' (emulated)' if one.emulated else ''}",
            one.soc or "-",
            str(one.cores),
            units.size(one.memory_bytes),
            Text(one.state.value, style=_STYLES[one.state.value]),
            units.ago(one.last_seen_at, now),
        )
        for one in found
    ]
    heads = ("NAME", "ID", "ARCH", "SOC", "CORES", "MEMORY", "STATE", "LAST SEEN")
    output.show_table(heads, rows, right=("CORES", "MEMORY"), shrink=("NAME", "SOC"))


_STYLES = {"IDLE": "green", "BUSY": "bold", "OFFLINE": "dim", "DRAINING": "yellow"}


def show(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id, its first characters, or its name.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """One device with all that is known of it."""
    from etfarm.client import units
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli import output
    from etfarm.client.models import Device

    async def fetch() -> Device:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.device(device)

    one = run_async(fetch)
    pairs = [
        ("name", one.name),
        ("id", one.id),
        ("state", f"{one.state.value}, last seen {units.ago(one.last_seen_at, datetime.now(UTC))}"),
        ("attempt", one.attempt_id),
        ("arch", f"{one.arch}{' (emulated: its times say nothing about a real device)' if one.emulated else ''}"),
        ("soc", one.soc),
        ("os", one.os),
        ("cores", str(one.cores)),
        ("memory", units.size(one.memory_bytes)),
    ]
    for cluster in one.clusters:
        speed = f", up to {cluster.max_frequency_hz / 1e9:.2f} GHz" if cluster.max_frequency_hz else ""
        governor = f", governor {cluster.governor}" if cluster.governor else ""
        cpus = ", ".join(map(str, cluster.cpus))
        pairs.append(("cluster", f"{cluster.part}: cpus {cpus} ({units.count(cluster.physical_cores, 'core')}){speed}{governor}"))
    pairs += [
        ("features", " ".join(one.features)),
        ("runner", _runner(one.runner, one.own_runners)),
        ("backends", ", ".join(one.backends)),
        ("operators", str(one.operator_count or "")),
        ("labels", ", ".join(f"{key}={value}" for key, value in one.labels.items())),
        ("agent", one.agent_id),
    ]
    pairs += [(_TELEMETRY[key][0], _TELEMETRY[key][1](value)) for key, value in one.telemetry.items() if key in _TELEMETRY]
    output.show(output.facts((name, value) for name, value in pairs if value))


def _runner(used: str, own: Collection[str]) -> str:
    """What programs run with on a device, and what else it has."""
    if not used:
        return "none: `etfarm bundle build` makes one, `etfarm bundle add` offers it"
    if used in own:
        return f"{used}, its own"
    return f"{used}, the farm's bundle" + (f"; {', '.join(own)} of its own" if own else "")


def _size(value: float) -> str:
    from etfarm.client import units

    return units.size(int(value))


_TELEMETRY: dict[str, tuple[str, Callable[[float], str]]] = {
    "cpu_share": ("cpu", lambda value: f"{value * 100:.0f} % busy"),
    "load_1m": ("load", lambda value: f"{value:.2f} over a minute"),
    "memory_available_bytes": ("free memory", _size),
    "disk_free_bytes": ("free disk", _size),
    "temperature_c": ("temperature", lambda value: f"{value:.1f} °C"),
    "frequency_hz": ("frequency", lambda value: f"{value / 1e9:.2f} GHz"),
    "battery_share": ("battery", lambda value: f"{value * 100:.0f} %"),
    "charging": ("charging", lambda value: "yes" if value else "no"),
    "agent_rss_bytes": ("agent memory", _size),
}
"""How a heartbeat's values are shown, by key."""
