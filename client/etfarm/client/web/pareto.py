"""The Pareto plot of a job's cells: two metrics against each other, and the cells that no other one beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from etfarm.client.web.cell_values import Metric, scale

WIDTH: Final = 760
HEIGHT: Final = 380
LEFT: Final = 86
RIGHT: Final = 18
TOP: Final = 14
BOTTOM: Final = 44
MAX_TICKS: Final = 7


@dataclass(frozen=True)
class Dot:
    """A cell in the plot."""

    cell_id: str
    label: str
    x: float
    y: float
    text: str
    """Both values with their units."""
    is_best: bool
    """Whether no other cell is as good in both metrics and better in one."""


@dataclass(frozen=True)
class Plot:
    """A plot in pixels of its own coordinates, `WIDTH` by `HEIGHT`."""

    x: Metric
    y: Metric
    dots: tuple[Dot, ...]
    frontier: str
    """Points of the line through the best cells."""
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def build_plot(cells: Sequence[tuple[str, str, Mapping[str, float]]], x: Metric, y: Metric) -> Plot | None:
    """Return the plot of cells as (id, label, values by metric); None if fewer than two cells have both values."""
    known = [(cell, label, values[x.key], values[y.key]) for cell, label, values in cells if x.key in values and y.key in values]
    if len(known) < 2:
        return None
    across, up = _Axis([each[2] for each in known], x), _Axis([each[3] for each in known], y)
    dots = tuple(
        Dot(
            cell,
            label,
            round(LEFT + across.part(first) * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up.part(second) * (HEIGHT - TOP - BOTTOM), 1),
            f"{x.describe(first)}, {y.describe(second)}",
            not any(_beats(other[2:], (first, second), x, y) for other in known),
        )
        for cell, label, first, second in known
    )
    best = sorted((dot for dot in dots if dot.is_best), key=lambda dot: (dot.x, dot.y))
    return Plot(
        x, y, dots, " ".join(f"{dot.x},{dot.y}" for dot in best),
        tuple((round(LEFT + part * (WIDTH - LEFT - RIGHT), 1), text) for part, text in across.ticks()),
        tuple((round(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM), 1), text) for part, text in up.ticks()),
    )  # fmt: skip


def _beats(one: Sequence[float], other: Sequence[float], *metrics: Metric) -> bool:
    """Return whether the first cell is as good in all metrics, and better in one."""
    losses = [
        (mine - theirs) * (1 if metric.is_less_better else -1) for mine, theirs, metric in zip(one, other, metrics, strict=True)
    ]
    return all(loss <= 0 for loss in losses) and any(loss < 0 for loss in losses)


class _Axis:
    """An axis with room beside its lowest and its highest value."""

    def __init__(self, values: Sequence[float], metric: Metric) -> None:
        self._metric = metric
        low, high = min(scale(value, metric) for value in values), max(scale(value, metric) for value in values)
        room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
        self._low, self._high = low - room, high + room

    def part(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        return (scale(value, self._metric) - self._low) / (self._high - self._low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and texts of round values."""
        low, high = self._low, self._high
        if self._metric.is_logarithmic:
            low, high = math.exp(low), math.exp(high)
        values = list(_even_values(low, high, is_binary=self._metric.is_binary))
        if self._metric.is_logarithmic:
            # Of a wide axis, the powers of ten are enough.
            candidates = [
                list(_round_values(low, high, digits, is_binary=self._metric.is_binary)) for digits in ((1, 2, 5), (1,))
            ]
            values = next((each for each in candidates if 2 <= len(each) <= MAX_TICKS), values)
        return [(self.part(value), self._metric.describe(value)) for value in values]


def _round_values(low: float, high: float, digits: Sequence[int], *, is_binary: bool) -> Iterator[float]:
    """Yield the digits times powers of ten; of sizes, times 1, 10 and 100 KiB, MiB and so on."""
    powers = [10.0**power for power in range(-12, 19)]
    if is_binary:
        powers = [1024.0**unit * 10**power for unit in range(6) for power in range(3)]
    yield from (digit * power for power in powers for digit in digits if low <= digit * power <= high)


def _even_values(low: float, high: float, *, is_binary: bool) -> Iterator[float]:
    """Yield the multiples of a round step."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1.0), 1024))) if is_binary else 1.0
    step = unit * 10.0 ** math.floor(math.log10((high - low) / 2 / unit))
    while (high - low) / step > MAX_TICKS:
        step *= 2
    yield from (index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1))
