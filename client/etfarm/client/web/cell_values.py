"""What a job's cells measured, as numbers by metric, and how good they are beside each other. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.formats import units
from etfarm.client.models import Cell
from etfarm.wire.sqnr import level

Json = Mapping[str, Any]

HEATS: Final = 8
"""Number of shades after the best value's."""


@dataclass(frozen=True)
class Metric:
    """Something that cells are compared by."""

    key: str
    title: str
    is_less_better: bool
    describe: Callable[[float], str]
    is_logarithmic: bool = True
    is_binary: bool = False
    """Whether its round values are multiples of KiB, MiB and so on."""


METRICS: Final[Mapping[str, Metric]] = {
    metric.key: metric
    for metric in (
        Metric("latency", "Latency (p50)", True, units.time),
        Metric("tokens", "Decode", False, lambda value: f"{units.significant(value)} tokens/s"),
        Metric("size", "Program size", True, lambda value: units.size(int(value)), is_binary=True),
        Metric("memory", "Peak memory", True, lambda value: units.size(int(value)), is_binary=True),
        Metric("accuracy", "Accuracy (SQNR)", False, level, is_logarithmic=False),
    )
}


def measured_values(report: Json) -> dict[str, float]:
    """Return the known values of a REPORT by metric."""
    return {key: float(value) for key, value in _values(report) if value is not None and math.isfinite(value)}


def _values(report: Json) -> Iterator[tuple[str, float | None]]:
    latency, compiled, memory = report["latency"] or {}, report["compile"] or {}, report["memory"] or {}
    yield "latency", latency.get("p50_ns") or None
    points = (report["generation"] or {}).get("points") or ()
    yield "tokens", next((point["decode_tokens_per_s"] for point in points if point["decode_tokens_per_s"]), None)
    if compiled.get("program"):
        data = sum(file["size_bytes"] for file in (compiled.get("data") or {}).values())
        yield "size", compiled["program"]["size_bytes"] + data
    yield "memory", memory.get("peak_rss_bytes") or None
    first = next((output["reference"] for output in report["accuracy"] or ()), None)
    known = [row["sqnr_db"] for row in report["accuracy"] or () if row["reference"] == first and row["sqnr_db"] is not None]
    yield "accuracy", min(known, default=None)


@dataclass(frozen=True)
class Entry:
    """A cell of the job in its matrix."""

    cell: Cell
    values: Mapping[str, float]
    text: str
    """The value of the shown metric; empty without one."""
    heat: int | None
    """Its shade, 0 for the best to `HEATS` for the worst of the model; None without a value."""


@dataclass(frozen=True)
class Matrix:
    """The cells of one model: a row for each recipe, method and thread count, a column for each device."""

    model: str
    devices: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[Entry, ...], ...]], ...]
    """Labels, and for each device its cells."""


def build_matrices(
    cells: Sequence[Cell], values: Mapping[str, Mapping[str, float]], devices: Mapping[str, str], metric: Metric
) -> list[Matrix]:
    """Return a matrix for each model.

    Args:
        values: values by cell id and metric.
        devices: names of devices by id.
    """
    models = dict.fromkeys(cell.model for cell in cells)
    return [_build(model, [cell for cell in cells if cell.model == model], values, devices, metric) for model in models]


def _build(
    model: str, cells: Sequence[Cell], values: Mapping[str, Mapping[str, float]], devices: Mapping[str, str], metric: Metric
) -> Matrix:
    known = [value for cell in cells if (value := values.get(cell.id, {}).get(metric.key)) is not None]
    columns = tuple(dict.fromkeys(_place(cell, devices) for cell in cells))
    rows: dict[str, dict[str, list[Entry]]] = {}
    for cell in cells:
        own = values.get(cell.id, {})
        value = own.get(metric.key)
        text = "" if value is None else metric.describe(value)
        entry = Entry(cell, own, text, None if value is None else shade(value, known, metric))
        label = " · ".join(filter(None, cell.traits[1:])) or "as it is"
        rows.setdefault(label, {}).setdefault(_place(cell, devices), []).append(entry)
    return Matrix(
        model, columns, tuple((label, tuple(tuple(row.get(column, ())) for column in columns)) for label, row in rows.items())
    )


def _place(cell: Cell, devices: Mapping[str, str]) -> str:
    if cell.device:
        return devices.get(cell.device) or cell.device[:12]
    return "not placed yet" if cell.on_device else "compiled"


def shade(value: float, all_values: Sequence[float], metric: Metric) -> int:
    """Return how far a value is from the best one: 0 for the best, `HEATS` for the worst."""
    scaled = [scale(each, metric) for each in all_values]
    best, worst = (min(scaled), max(scaled)) if metric.is_less_better else (max(scaled), min(scaled))
    if math.isclose(best, worst):
        return 0
    return round(HEATS * (scale(value, metric) - best) / (worst - best))


def scale(value: float, metric: Metric) -> float:
    """Return the position of a value on the metric's axis, which is logarithmic for times and sizes."""
    return math.log(max(value, 1e-12)) if metric.is_logarithmic else value
