"""What is known of a device, as texts for its page. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from etfarm.client.fleet.runners import describe_runner
from etfarm.client.formats import units
from etfarm.client.models import Cluster, Device, HealthEvent

TRIGGERS: Final[Mapping[str, str]] = {
    "ENROLMENT": "first run", "PERIODIC": "regular run", "FAULT": "after a fault", "PROBE": "probe", "REQUEST": "requested",
}  # fmt: skip
MAX_SENSORS: Final = 12


def facts(device: Device, now: datetime) -> list[tuple[str, str]]:
    """Return the facts that do not change while a device is connected, as names and values, without missing ones."""
    return [(name, value) for name, value in _facts(device, now) if value]


def _facts(device: Device, now: datetime) -> Iterator[tuple[str, str]]:
    yield "ID", device.id
    yield "Product", device.model
    yield "System on a chip", device.soc
    yield "System", device.os
    yield "Architecture", f"{device.arch}{' (emulated: its times mean nothing)' if device.emulated else ''}"
    yield "CPUs", str(device.cores)
    for cluster in device.clusters:
        yield cluster.part or "Cluster", _cluster(cluster)
    yield "Features", " ".join(device.features)
    yield "Memory", units.size(device.memory_bytes) if device.memory_bytes else ""
    yield "Pages", f"{device.page_size_bytes >> 10} KiB each" if device.page_size_bytes else ""
    yield "Sensors", _sensors(device.thermal_zones)
    yield "Battery", "" if device.has_battery is None else "yes" if device.has_battery else "none"
    yield "Runner", describe_runner(device)
    yield "Backends", ", ".join(device.backends)
    yield "Operators", str(device.operator_count or "")
    yield "Concurrent runs", str(device.concurrent_runs) if device.concurrent_runs > 1 else ""
    yield "Projects", ", ".join(device.projects)
    yield "Agent", " ".join(filter(None, (device.agent_id, device.agent_version and f"(etfarm {device.agent_version})")))


def _cluster(cluster: Cluster) -> str:
    clock = f"up to {cluster.max_frequency_hz / 1e9:.2f} GHz" if cluster.max_frequency_hz else ""
    return ", ".join(filter(None, (units.count(cluster.physical_cores, "core"), clock, cluster.governor)))


def _sensors(names: Sequence[str]) -> str:
    more = len(names) - MAX_SENSORS
    return ", ".join(names[:MAX_SENSORS]) + (f" and {more} more" if more > 0 else "")


def readings(device: Device) -> list[str]:
    """Return the values of the last heartbeat as texts; those of an emulated device's host that apply to it."""
    shown = _OF_HOST if device.emulated else FORMATS.keys()
    return [FORMATS[key](value) for key, value in device.telemetry.items() if key in shown]


def health_events(events: Sequence[HealthEvent]) -> list[tuple[HealthEvent, str]]:
    """Return events of a device's health, each with what happened in a line."""
    return [(event, _describe(event)) for event in events]


def _describe(event: HealthEvent) -> str:
    run = event.run
    if run is None:
        return f"{event.reason}: {event.message}" if event.reason else event.message
    parts = [TRIGGERS.get(run.trigger, run.trigger.lower())]
    parts.append(event.message if run.passed else f"failed with {event.reason}: {event.message}")
    if run.p50_ns is not None:
        usual = f", usually {units.time(run.baseline_ns)}" if run.baseline_ns is not None else ""
        parts.append(f"p50 {units.time(run.p50_ns)}{usual}")
    return ", ".join(filter(None, parts))


def _size(value: float) -> str:
    return units.size(int(value))


FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "cpu_share": lambda value: f"{value * 100:.0f} % busy",
    "load_1m": lambda value: f"load {value:.2f}",
    "memory_available_bytes": lambda value: f"{_size(value)} of memory free",
    "disk_free_bytes": lambda value: f"{_size(value)} of disk free",
    "temperature_c": lambda value: f"{value:.1f} °C",
    "frequency_hz": lambda value: f"{value / 1e9:.2f} GHz",
    "battery_share": lambda value: f"battery {value * 100:.0f} %",
    "charging": lambda value: "charging" if value else "not charging",
}
"""Formatters of a heartbeat's values, by key."""

_OF_HOST: Final = ("memory_available_bytes", "disk_free_bytes")
"""Values of the host that also apply to the programs of an emulated device."""
