"""`etfarm devices telemetry`: the stored readings of a device, with a small plot on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from etfarm.client.cli import options
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import tell

if TYPE_CHECKING:
    from etfarm.client.models import Telemetry

BARS: Final = "▁▂▃▄▅▆▇█"
_NO_READING: Final = " "
_WIDEST: Final = 120


def telemetry(
    outcome: Outcome,
    connection: Connection,
    device: options.DeviceId,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="From when on: a duration such as 2h, or an ISO time.")
    ] = "2h",
    json: options.ListJson = None,
) -> None:
    """Show the stored readings of a device: of each minute for a day, of each tenth minute for a week.

    On a terminal, a small plot for each kind of reading; else a line for each time.
    """
    from etfarm.client.cli.terminal import output

    start = options.instant_of("--since", since)
    listing = JsonListing(outcome, json, "telemetry")

    readings = listing.record(connection.call(lambda farm: farm.device_telemetry(device, since=start)))
    if listing.is_on_stdout:
        return
    keys = [key for key in FORMATS if any(key in reading.values for reading in readings)]
    if not keys:
        tell(f"The farm has no readings of {device} for this time.")
    elif sys.stdout.isatty():
        console = output.open_console()
        name = max(map(len, keys))
        width = min(_WIDEST, console.width - name - 30)
        for key in keys:
            output.show(output.line(f"{key:<{name}}  {_plotted(readings, key, max(10, width))}"))
        output.show(output.line(f"{_clock(readings[0])} to {_clock(readings[-1])}, {len(readings):,} readings", style="dim"))
    else:
        rows = [(reading.at.isoformat().replace("+00:00", "Z"), *(_text(key, reading) for key in keys)) for reading in readings]
        output.show_table(("TIME", *(key.upper() for key in keys)), rows, right=[key.upper() for key in keys])


def plot(values: Sequence[float | None], width: int) -> str:
    """Return a plot of values in at most `width` characters: the highest value of each part, and a blank where there is none."""
    width = min(width, len(values))
    parts = [values[index * len(values) // width : (index + 1) * len(values) // width] for index in range(width)]
    highest = [max((value for value in part if value is not None), default=None) for part in parts]
    known = [value for value in highest if value is not None]
    if not known:
        return _NO_READING * width
    low, span = min(known), max(known) - min(known)
    steps = len(BARS) - 1
    return "".join(
        _NO_READING if value is None else BARS[round((value - low) / span * steps) if span else 0] for value in highest
    )


def _plotted(readings: Sequence[Telemetry], key: str, width: int) -> str:
    values = [_number(reading, key) for reading in readings]
    known = [value for value in values if value is not None]
    low, high, last = (FORMATS[key](value) for value in (min(known), max(known), known[-1]))
    return f"{plot(values, width)}  {low} to {high}, now {last}"


def _number(reading: Telemetry, key: str) -> float | None:
    return float(reading.values[key]) if key in reading.values else None


def _text(key: str, reading: Telemetry) -> str:
    return FORMATS[key](reading.values[key]) if key in reading.values else "-"


def _clock(reading: Telemetry) -> str:
    return f"{reading.at.astimezone():%Y-%m-%d %H:%M}"


def _size(value: float) -> str:
    from etfarm.client.formats import units

    return units.size(int(value))


FORMATS: Final[dict[str, Callable[[float], str]]] = {
    "temperature_c": lambda value: f"{value:.1f} °C",
    "frequency_hz": lambda value: f"{value / 1e9:.2f} GHz",
    "cpu_share": lambda value: f"{value * 100:.0f} %",
    "load_1m": lambda value: f"{value:.2f}",
    "memory_available_bytes": _size,
    "disk_free_bytes": _size,
    "battery_share": lambda value: f"{value * 100:.0f} %",
    "charging": lambda value: "yes" if value else "no",
    "agent_rss_bytes": _size,
}
"""Formatters of readings, by key, in the order of the plots."""
