"""The data of the page's charts, with as many points as a screen can show.

These are pure functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etfarm.wire import views

Json = Mapping[str, Any]

POINTS = 4_000
"""Maximum number of samples that are drawn one by one."""

STRETCHES = 1_000
"""Number of stretches that more samples are drawn as: the lowest, the median and the highest of each."""

BINS = 64
"""Number of bars of a histogram."""

TAIL = 0.005
"""Part of the samples that may lie above the histogram: a few slow ones would compress all others into one bar."""


PAUSE = 3
"""Number of usual steps between readings from which on a step is a pause between runs."""

FENCE = 3
"""Number of widths of the middle half above which a histogram ends (Tukey's outer fence): a disturbed run has an endless tail."""


def thinned(samples: Sequence[int], points: int = POINTS, stretches: int = STRETCHES) -> dict[str, Any]:
    """Return latencies by iteration: {x, y, stretch: 1}.

    More samples than `points` give {x, low, middle, high, stretch} instead.

    `stretch` is the number of samples per point and `x` its first iteration; no outlier is lost.
    """
    if len(samples) <= points:
        return {"x": list(range(len(samples))), "y": list(samples), "stretch": 1}
    stretch = math.ceil(len(samples) / stretches)
    starts = range(0, len(samples), stretch)
    ordered = [sorted(samples[start : start + stretch]) for start in starts]
    return {
        "x": list(starts),
        "low": [stretch_samples[0] for stretch_samples in ordered],
        "middle": [stretch_samples[len(stretch_samples) // 2] for stretch_samples in ordered],
        "high": [stretch_samples[-1] for stretch_samples in ordered],
        "stretch": stretch,
    }


def histogram(samples: Sequence[int], bins: int = BINS) -> dict[str, Any]:
    """Return {low, width, counts, beyond, max}: equal bars from `low` nanoseconds on, and the number beyond the last."""
    ordered = sorted(samples)
    low, high = ordered[0], ordered[min(len(ordered) - 1, math.ceil(len(ordered) * (1 - TAIL)))]
    lower, upper = (ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.25, 0.75))
    high = min(high, upper + max(FENCE * (upper - lower), upper // 20))
    # A bar is a whole number of nanoseconds: a clock's ticks would otherwise look like a comb.
    width = max(1, math.ceil((high - low + 1) / bins))
    counts = [0] * max(1, math.ceil((high - low + 1) / width))
    beyond = 0
    for sample in ordered:
        place = (sample - low) // width
        if place < len(counts):
            counts[place] += 1
        else:
            beyond += 1
    return {"low": low, "width": width, "counts": counts, "beyond": beyond, "max": ordered[-1]}


def joined(readings: Sequence[Json]) -> list[dict[str, Any]]:
    """Return the readings of several runs' timed passes one right after the other, with an empty reading between two passes.

    Nothing is read while the next run waits and warms up, which often takes longer than all passes, and a line across would look
    like readings.
    """
    points = [dict(reading) for reading in readings]
    steps = [later["elapsed_ms"] - earlier["elapsed_ms"] for earlier, later in itertools.pairwise(points)]
    if not steps:
        return points
    usual_ms = sorted(steps)[len(steps) // 4]
    left_out_ms = 0.0
    passes = points[:1]
    for step, point in zip(steps, points[1:], strict=True):
        if step > PAUSE * usual_ms > 0:
            left_out_ms += step - usual_ms
            empty: dict[str, Any] = {key: [] if isinstance(value, list) else None for key, value in point.items()}
            passes.append({**empty, "elapsed_ms": point["elapsed_ms"] - left_out_ms - usual_ms / 2})
        passes.append({**point, "elapsed_ms": point["elapsed_ms"] - left_out_ms})
    return passes


def flame(operators: Sequence[Json], method: str) -> list[dict[str, Any]]:
    """Return boxes of the modules' icicle chart, parents first: {x, w, d, name, path, own, total, rows, row}.

    `x` and `w` are shares of the method's time, `d` the depth. Below a module are its own operators (`row` is their
    index) and its submodules, as executed; time without an operator gets a separate box. A module that holds nothing but one
    submodule shares the submodule's box: `layers.0.conv`.
    """
    rows = {row["index"]: row for row in operators}
    boxes: list[dict[str, Any]] = [_box(0.0, 1.0, 0, method, "", None, 1.0)]
    ends = [0.0]
    """Start of the next box, by depth."""
    for group, depth, name in _without_chains(views.group(operators, "module", "order")):
        share = group.total_share or 0.0
        # A group at a depth starts where the previous one of its depth ended, or where its parent's own operators did.
        del ends[depth:]
        start = ends[depth - 1]
        ends[depth - 1] = start + share
        here = start
        if group.key == views.NOT_EXPLAINED:
            boxes.append({**_box(start, share, depth, name, "", group.own_share, share), "rest": True})
            continue
        is_path = group.key not in (views.MODEL, views.INSERTED, views.UNKNOWN)
        below = depth
        if is_path:
            boxes.append(_box(start, share, depth, name, group.key, group.own_share, share))
            below = depth + 1
        for index in group.indexes:
            row, part = rows[index], rows[index]["share"] or 0.0
            title = ", ".join(row["op_types"]) or views.operator_name(row)
            boxes.append({**_box(here, part, below, title, group.key if is_path else "", part, part), "row": index})
            here += part
        ends.append(here)
    return boxes


def _without_chains(groups: Sequence[views.Group]) -> Iterator[tuple[views.Group, int, str]]:
    """Yield groups in their depth-first order with the depths and names of their boxes, from depth 1.

    A module without own rows and with one submodule is left out; its name precedes the submodule's.
    """
    children = [0] * len(groups)
    open_groups: list[int] = []
    for place, group in enumerate(groups):
        del open_groups[group.depth :]
        if open_groups:
            children[open_groups[-1]] += 1
        open_groups.append(place)
    left_out: list[bool] = []
    """By depth: whether the last module there shares the box of its submodule."""
    prefix = ""
    for group, below in zip(groups, children, strict=True):
        del left_out[group.depth :]
        name = f"{prefix}{group.key.rpartition('.')[2]}"
        left_out.append(not group.rows and below == 1)
        prefix = f"{name}." if left_out[-1] else ""
        if not left_out[-1]:
            yield group, group.depth + 1 - sum(left_out), name


def _box(x: float, width: float, depth: int, name: str, path: str, own: float | None, total: float) -> dict[str, Any]:
    return {"x": x, "w": width, "d": depth, "name": name, "path": path, "own": own, "total": total}
