"""A device's health and its history, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from etfarm.client.cli.terminal import output
from etfarm.client.formats import units
from etfarm.client.models import DeviceHealth, HealthEvent, HealthState

if TYPE_CHECKING:
    from rich.text import Text

_STYLES: Final = {
    HealthState.UNKNOWN: "dim", HealthState.GOOD: "green", HealthState.SUSPECT: "yellow", HealthState.QUARANTINED: "red"
}  # fmt: skip
_TRIGGERS: Final = {
    "ENROLMENT": "first run", "PERIODIC": "regular run", "FAULT": "after a fault", "PROBE": "probe", "REQUEST": "requested"
}  # fmt: skip


def style_of(state: HealthState) -> str:
    """Return the style of a state."""
    return _STYLES[state]


def state_text(state: HealthState) -> Text:
    """Return a state in its colour."""
    from rich.text import Text

    return Text(state.value, style=_STYLES[state])


def facts(health: DeviceHealth, now: datetime) -> Text:
    """Return a device's health in a line: its state, since when, why, and when its health runs were and are due."""
    from rich.text import Text

    parts = [health.state.value]
    if health.since is not None:
        parts[0] += f" since {health.since:%Y-%m-%d %H:%M} UTC"
    if health.reason:
        parts[0] += f": {health.reason}"
    if health.fault_score >= 0.05:
        parts.append(f"fault score {health.fault_score:.1f}")
    if health.last_run_at is not None:
        parts.append(f"last health run {units.ago(health.last_run_at, now)}")
    if health.next_run_at is not None and health.next_run_at > now:
        parts.append(f"next {health.next_run_at:%Y-%m-%d %H:%M} UTC")
    return Text(", ".join(parts), style=_STYLES[health.state])


def show_events(events: Sequence[HealthEvent]) -> None:
    """Print events as a table."""
    if not events:
        return
    rows = [
        (f"{event.at:%Y-%m-%d %H:%M:%S}", event.kind.replace("_", " "), state_text(event.state), describe(event))
        for event in events
    ]
    output.show_table(("TIME (UTC)", "EVENT", "HEALTH", "WHAT"), rows, shrink=("WHAT",))


def describe(event: HealthEvent) -> str:
    """Return what happened, in a line."""
    run = event.run
    if run is None:
        return f"{event.reason}: {event.message}" if event.reason else event.message
    parts = [_TRIGGERS.get(run.trigger, run.trigger.lower())]
    parts.append(event.message if run.passed else f"failed with {event.reason}: {event.message}")
    if run.p50_ns is not None:
        usual = f", usually {units.time(run.baseline_ns)}" if run.baseline_ns is not None else ""
        doubts = f" (not compared: {', '.join(run.doubts)})" if run.doubts else ""
        parts.append(f"p50 {units.time(run.p50_ns)}{usual}{doubts}")
    return ", ".join(parts)
