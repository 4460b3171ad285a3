"""Generated text on the page: the table of rates, tokens per second over the context as lines, and the operators of prefill.

These are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from etfarm.client.formats import answers, generation, units

Json = Mapping[str, Any]

WIDTH: Final = 760
HEIGHT: Final = 240
LEFT: Final = 56
"""Width of the labels beside the lines."""
_BOTTOM: Final = 22
_TICKS: Final = 5
_POINTS: Final = 400
"""Maximum number of points of a line."""
_OPERATORS: Final = 20


def shown(generated: Json) -> dict[str, Any]:
    """Return the values of REPORT.generation for the template."""
    return {
        "columns": generation.COLUMNS,
        "rows": generation.rows(generated),
        "accuracy": [f"{name}: {text}" for name, text in generation.accuracy_facts(generated["accuracy"])],
        "part_columns": generation.PART_COLUMNS,
        "parts": generation.parts(generated),
        "plot": plot(generated["points"], _encoded(generated)),
        "traced": [
            *((each["method"], _slowest(each["operators"])) for each in generated["encoders"] if each["operators"]),
            *([("prefill", _slowest(generated["prefill_operators"]))] if generated["prefill_operators"] else []),
        ],
    }


def _slowest(operators: Sequence[Json]) -> list[tuple[str, str, str, str, str]]:
    """Return the slowest operators of a method: share, time, name, backend and place."""
    return [
        (units.percent(row["share"]), answers.time_of(row), row["name"], answers.backend(row), answers.place(row))
        for row in answers.slowest_rows({"operators": operators}, _OPERATORS)
    ]


def _encoded(generated: Json) -> int:
    """Return the number of positions that the outputs of encoders take at the beginning of a prompt."""
    return sum(encoder["positions"] for encoder in ((generated["model"] or {}).get("flow") or {"encoders": ()})["encoders"])


def plot(points: Sequence[Json], encoded: int = 0) -> dict[str, Any] | None:
    """Return the lines of tokens per second by position in the context, in a box of WIDTH x HEIGHT; None without tokens.

    `encoded` is the number of positions between a point's depth and its prompt. A value is the median of neighbouring tokens, so
    that a line has at most _POINTS. The scale begins at 0.
    """
    lines = [(generation.where(point), _rates(point, encoded)) for point in points]
    known = [(name, rates) for name, rates in lines if rates]
    if not known:
        return None
    top = _round_up(max(rate for _, rates in known for _, rate in rates))
    last = max(position for _, rates in known for position, _ in rates)
    step = math.ceil(_round_up(last / _TICKS))

    def x(position: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 4) * position / max(1, last), 1)

    def y(rate: float) -> float:
        return round((HEIGHT - _BOTTOM) * (1 - rate / top) + 6 * rate / top, 1)

    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "y_ticks": [(y(top * part / _TICKS), f"{top * part / _TICKS:,.4g}") for part in range(_TICKS + 1)],
        "x_ticks": [(x(position), f"{position:,}") for position in range(0, last + 1, step)],
        "lines": [
            {"name": name, "points": " ".join(f"{x(position)},{y(rate)}" for position, rate in rates)} for name, rates in known
        ],
    }


def _rates(point: Json, encoded: int) -> list[tuple[int, float]]:
    """Return pairs of a position in the context and tokens per second there, without the first token."""
    decode = list(enumerate((point["token_ns"] or ())[1:], point["depth"] + encoded + point["prompt_tokens"]))
    size = math.ceil(len(decode) / _POINTS) or 1
    parts = [decode[start : start + size] for start in range(0, len(decode), size)]
    middles = [(part[len(part) // 2][0], sorted(time_ns for _, time_ns in part)[len(part) // 2]) for part in parts]
    return [(position, 1e9 / time_ns) for position, time_ns in middles if time_ns > 0]


def _round_up(value: float) -> float:
    """Return the next number of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value), value)
