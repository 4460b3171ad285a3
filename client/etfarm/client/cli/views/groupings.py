"""View of a report's operators in groups: `etfarm report show JOB --by module`.

It takes a REPORT of etfarm.report/1. `etfarm.wire.views` determines the groups; this module lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from etfarm.client.cli.views import render
from etfarm.client.formats import answers, units
from etfarm.wire import views

TOP: Final = 30
"""Default number of shown groups."""

LEAST_DETAIL: Final = 12
"""Minimum number of characters of a shown detail; fewer are not useful."""

LEAST_NAME: Final = 24
"""Minimum number of characters of a line's place beside its code."""

BAR: Final = 12
"""Columns of a bar for the largest share."""

_NARROW: Final = 100
"""Columns below which bars are half as long."""

_PARTS: Final = " ▏▎▍▌▋▊▉█"
_LEAST_SHARE: Final = 0.0005
"""Shares below this are rounded to 0.0 %."""

_LEAST_UNEXPLAINED: Final = 0.05
"""Part of unexplained time from which it is explained."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class _Weight:
    """The bytes of a module in the program and in planned memory."""

    constant_bytes: int
    planned_bytes: int


def reports(documents: Sequence[Json], by: str, sort: str, *, width: int, top: int | None = None) -> RenderableType:
    """Return all reports of a job below each other; the arguments are those of `report`."""
    parts: list[RenderableType] = []
    for document in documents:
        parts += [Text(), report(document, by, sort, width=width, top=top)]
    return Group(*parts[1:])


def report(document: Json, by: str, sort: str, *, width: int, top: int | None = None) -> RenderableType:
    """Return one REPORT's headline and its groups.

    Args:
        by, sort: values of `views.BY` and `views.SORTS`.
        width: columns of the terminal.
        top: number of groups, those that took longest and their parent modules; 0 is all, None is TOP.
    """
    head = render.headline(document, width)
    weights = _weights(document) if by == "module" else {}
    operators = document["operators"] or []
    groups = views.group(operators, by, sort if operators else "name", modules=weights)
    if not groups:
        return Group(head, _indented(Text(_nothing(document), style="dim")))
    kept = _largest(groups, TOP if top is None else top)
    parts = [head, _indented(_table(kept, operators, by, weights, width - 2))]
    parts += [_indented(Text(line, style="dim")) for line in _notes(groups, kept, operators, by, weights)]
    return Group(*parts)


def _table(
    groups: Sequence[views.Group], operators: Sequence[Json], by: str, weights: Mapping[str, _Weight], width: int
) -> Table:
    """Return a row per group: share, bar, time, own share in a tree, weights and planned memory, key, detail."""
    columns = _columns(groups, operators, by, weights, width)
    room = width - sum(2 + column.width for column in columns)
    names = [_name(group, by) for group in groups]
    details = [_detail(group, by) for group in groups]
    # The code of a line says more than its path's folders; in other groups the name comes first.
    most = max(room * 11 // 20, LEAST_NAME) if by == "line" else room
    name_width = min(max(map(len, names)), most)
    detail_width = room - name_width - 2
    with_details = detail_width >= LEAST_DETAIL and any(details)
    shorten = units.without_start if by == "line" else units.without_end

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column.head, justify="right" if column.right else "left", style=column.style, no_wrap=True)
    table.add_column(_HEADS[by], no_wrap=True)
    if with_details:
        table.add_column("", style="dim", no_wrap=True)
    for place, group in enumerate(groups):
        cells: list[str | Text] = [column.cells[place] for column in columns]
        cells.append(Text(shorten(names[place], name_width), style=_style(group)))
        table.add_row(*cells, *([Text(units.without_end(details[place], detail_width))] if with_details else ()))
    return table


@dataclass(frozen=True)
class _Column:
    head: str
    cells: Sequence[str]
    style: str = ""
    right: bool = True
    spare: int = 0
    """Without enough room, the columns with the largest number are dropped first; those with 0 stay."""

    @property
    def width(self) -> int:
        return max(len(self.head), *map(len, self.cells))


def _columns(
    groups: Sequence[views.Group], operators: Sequence[Json], by: str, weights: Mapping[str, _Weight], width: int
) -> list[_Column]:
    columns: list[_Column] = []
    if operators:
        largest = max(group.total_share or 0.0 for group in groups)
        cells = BAR if width >= _NARROW else BAR // 2
        totals = [_share(group.total_share, group.total_ns) for group in groups]
        columns.append(_Column("total" if by == "module" else "share", totals))
        columns.append(_Column("", [_bar(group.total_share, largest, cells) for group in groups], "cyan", right=False, spare=3))
        if by == "module":
            columns.append(_Column("own", [_share(group.own_share, group.own_ns) for group in groups], "dim", spare=2))
        columns.append(_Column("time", _times(groups, operators)))
        if by != "module":
            columns.append(_Column("count", [str(group.rows) for group in groups], "dim", spare=2))
    if weights:
        below = _below(weights)
        columns.append(_Column("weights", [_size(below.get(group.key, 0)) for group in groups]))
        planned = {path: weight.planned_bytes for path, weight in weights.items()}
        columns.append(_Column("planned", [_size(planned.get(group.key, 0)) for group in groups], spare=1))
    while width - sum(2 + column.width for column in columns) < LEAST_NAME:
        spare = max(columns, key=lambda column: column.spare)
        if not spare.spare:
            break
        columns.remove(spare)
    return columns


_HEADS: Final = {"op": "operator", "type": "op types", "module": "module", "line": "line", "backend": "backend"}


def _name(group: views.Group, by: str) -> str:
    if by == "module":
        return "  " * group.depth + (group.key.rpartition(".")[2] if group.depth else group.key)
    if by == "type":
        return " + ".join(answers.short_type(name) for name in group.key.split(" + "))
    if by == "backend" and group.key not in (views.NOT_DELEGATED, views.NOT_EXPLAINED):
        return answers.backend_name(group.key)
    return group.key


def _detail(group: views.Group, by: str) -> str:
    return group.detail if by == "line" else ", ".join(answers.short_type(name) for name in group.detail.split(", "))


def _style(group: views.Group) -> str:
    if group.key == views.NOT_EXPLAINED:
        return "dim"
    return "bold" if (group.own_share or 0.0) >= 0.1 else ""


def _bar(share: float | None, largest: float, cells: int) -> str:
    """Return a bar of at most `cells` characters, with at least an eighth of one for any positive share."""
    if not share or not largest:
        return ""
    eighths = max(1, round(share / largest * cells * 8))
    return _PARTS[8] * (eighths // 8) + _PARTS[eighths % 8].strip()


def _share(share: float | None, time_ns: float | None) -> str:
    """Return a share; a positive one is never 0, and one with an unknown time is left out."""
    if share is None or time_ns is None:
        return ""
    return "<0.1 %" if 0 < share < _LEAST_SHARE else units.percent(share)


def _times(groups: Sequence[views.Group], operators: Sequence[Json]) -> list[str]:
    resolutions = {row["index"]: row["resolution_ns"] for row in operators}
    times = units.column([group.total_ns for group in groups])
    for place, group in enumerate(groups):
        known = [resolutions[index] for index in group.indexes if resolutions[index]]
        if not times[place] and known:
            times[place] = f"<{units.time(max(known))}"
    return times


def _size(value_bytes: int) -> str:
    return units.size(value_bytes) if value_bytes else ""


def _weights(document: Json) -> dict[str, _Weight]:
    """Return bytes by module, without those of other methods than the report's, if it names one."""
    weights: dict[str, _Weight] = {}
    for module in (document["compile"] or {}).get("modules") or ():
        if document["method"] in (None, module["method"]):
            path = module["module"] or views.MODEL
            before = weights.get(path, _Weight(0, 0))
            planned = max(before.planned_bytes, module["planned_bytes"])
            weights[path] = _Weight(before.constant_bytes + module["constant_bytes"], planned)
    return weights


def _below(weights: Mapping[str, _Weight]) -> dict[str, int]:
    """Return the bytes of constants of each module and its submodules."""
    total: dict[str, int] = {}
    for path, weight in weights.items():
        names = path.split(".")
        for depth in range(1, len(names) + 1):
            above = ".".join(names[:depth])
            total[above] = total.get(above, 0) + weight.constant_bytes
    return total


def _largest(groups: Sequence[views.Group], top: int) -> list[views.Group]:
    """Return the `top` groups with the largest totals, in order.

    A module's total is at least that of any submodule.
    """
    if not top or len(groups) <= top:
        return list(groups)
    by_total = sorted(range(len(groups)), key=lambda place: (-(groups[place].total_share or 0.0), place))
    return [groups[place] for place in sorted(by_total[:top])]


def _notes(
    groups: Sequence[views.Group], kept: Sequence[views.Group], operators: Sequence[Json], by: str, weights: Mapping[str, _Weight]
) -> list[str]:
    notes = []
    if len(kept) < len(groups):
        shown = {group.key for group in kept}
        share = sum(group.own_share or 0.0 for group in groups if group.key not in shown)
        notes.append(f"and {len(groups) - len(kept)} more, {units.percent(share)} together: --top 0 shows all")
    rest = sum(group.own_share or 0.0 for group in groups if group.key == views.NOT_EXPLAINED)
    if rest >= _LEAST_UNEXPLAINED:
        ticks = [row["resolution_ns"] for row in operators if row["kind"] == "KERNEL" and row["resolution_ns"]]
        scale, unit = units.unit_of(max(ticks, default=1.0))
        clock = f", and the part of each kernel below the clock's {max(ticks) / scale:g} {unit}" if ticks else ""
        notes.append(f"{views.NOT_EXPLAINED}: time between operators and around kernels{clock}")
    if weights:
        notes.append("weights: including submodules; planned: peak size of a module's own tensors")
    return notes


def _nothing(document: Json) -> str:
    if document["error"]:
        return str(document["error"]["message"])
    if document["device"] is None:
        return "No operators: the job compiled and ran nothing."
    return "No operators: the run was not traced."


def _indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2))
