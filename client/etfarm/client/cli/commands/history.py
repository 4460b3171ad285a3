"""`etfarm history`: a model's numbers over time, and what changed along with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.errors import EtfarmError

if TYPE_CHECKING:
    from rich.text import Text

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.jobs.history import HistoryEntry, Point, Series

_BARS = "▁▂▃▄▅▆▇█"
_NO_EVIDENCE = "·"
_ID_CHARACTERS = 8
"""Number of shown characters of a job's id, which leaves room and still identifies the job."""

_HEADS = ("WHEN", "JOB", "P50", "CHANGE", "VERDICT", "SIZE", "SQNR", "TOP-1", "PERPLEXITY")
_RIGHT = ("SIZE", "SQNR", "TOP-1", "PERPLEXITY")
_SPARE = ("SIZE", "TOP-1", "PERPLEXITY", "SQNR")
"""Columns that a narrow terminal does without, the first ones first."""
_CHANGE_STYLES = {"equal": "dim", "inconclusive": "dim", "slower": "red", "faster": "green"}
_LEGENDS = {
    "equal": "≈: no difference found.",
    "inconclusive": "?: inconclusive. Separate runs of one program may differ as much; `etfarm bench --repeat 5` shows how much.",
}
_VERDICT_STYLES = {"VALID": "green", "INVALID": "red", "NOT_BENCHMARKABLE": "yellow", "FAILED": "red"}


def main(argv: list[str]) -> int:
    """Run `etfarm history`."""
    return execute(history, argv, "history")


def history(
    outcome: Outcome,
    connection: Connection,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model's name, as `bench` takes it or as reports show it, or the first characters of its digest.",
        ),
    ],
    device: Annotated[
        str, typer.Option("--device", metavar="SELECTOR", help="Only on devices that match: name=pi5-a or arch=aarch64.")
    ] = "",
    recipe: Annotated[str, typer.Option("--recipe", metavar="R", help="Only of this recipe, as reports name it.")] = "",
    method: Annotated[str, typer.Option("--method", metavar="M", help="Only of this method.")] = "",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Only with this number of threads.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of reports, newest first.")] = 20,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write etfarm.history/1 there, on failure too; - is stdout.")
    ] = None,
) -> int:
    """Show how a model's numbers went: a table for each recipe, device, method and thread count, the newest report last.

    CHANGE is against the VALID report before, by the rules of `etfarm compare`: ≈ where no difference was found, ? where separate
    runs of one program may differ as much. Below a report is what was another than then: toolchain, runner, model, recipe, state
    of the device.
    """
    from etfarm.client.export.spec import label_of
    from etfarm.client.jobs import history as past
    from etfarm.wire import selectors

    outcome.goes_to(json)
    outcome.document = lambda error: past.document(model, (), error)
    selectors.parse(device)

    async def fetch(farm: AsyncFarm) -> list[HistoryEntry]:
        read = partial(farm.history, device=device, recipe=recipe, method=method, threads=threads, limit=limit)
        try:
            return await read(model)
        except EtfarmError as error:
            if error.reason != "NO_HISTORY" or (label := label_of(model)) == model:
                raise
            return await read(label)

    entries = connection.call(fetch, outcome)
    outcome.document = lambda error: past.document(model, entries, error)
    to_stderr = json == STDOUT
    series = past.trends(entries)
    for place, item in enumerate(reversed(series)):
        _show(item, blank=place > 0, to_stderr=to_stderr)
    if not series:
        from etfarm.client.cli.terminal import output

        filters = {"--device": device, "--recipe": recipe, "--method": method, "--threads": threads}
        selection = " ".join(f"{name} {value}" for name, value in filters.items() if value)
        message = f"There are reports of {model}, but none matches {selection}. `etfarm history {model}` shows all."
        output.show(output.line(message), to_stderr=to_stderr)
    elif len(entries) == limit:
        from etfarm.client.cli.terminal import output

        output.show(output.line(f"The newest {limit} reports; --limit shows more.", style="dim"), to_stderr=to_stderr)
    return 0


def _show(series: Series, *, blank: bool, to_stderr: bool) -> None:
    from rich.text import Text

    from etfarm.client.cli.terminal import output
    from etfarm.client.jobs.history import describe_change

    head = Text(series.label, style="bold")
    medians = [point.time_ns for point in series.points if point.is_comparable and point.time_ns is not None]
    if len(medians) > 1:
        from etfarm.client.formats import units

        what = "p50" if series.points[-1].p50_ns is not None else "a token"
        head.append(f"   {sparkline(series.points)}   ", style="not bold cyan")
        head.append(f"{what} {units.time(min(medians))} to {units.time(max(medians))}", style="not bold")
    console = output.open_console(to_stderr=to_stderr)
    lines = [*([Text()] if blank else ()), head, *_lines(series.points, console.width if console.is_terminal else None)]
    outcomes = {describe_change(point)[1] for point in series.points}
    lines += [Text(legend, style="dim") for outcome, legend in _LEGENDS.items() if outcome in outcomes]
    output.say(console, *lines)


def _lines(points: Sequence[Point], room: int | None) -> list[Text]:
    """Return table rows; below the row of a point with remarks, these remarks with the necessary width.

    Args:
        room: the terminal's width, for which columns of `_SPARE` are left out; None for a file or pipe.
    """
    from rich.text import Text

    cells = [tuple(Text(head, style="dim") for head in _HEADS), *(_row(point) for point in points)]
    used = [place for place in range(len(_HEADS)) if any(row[place].cell_len for row in cells[1:])]
    widths = {place: max(row[place].cell_len for row in cells) for place in used}
    for head in _SPARE:
        if room is None or sum(widths.values()) + 2 * (len(widths) - 1) <= room:
            break
        widths.pop(_HEADS.index(head), None)
    used = list(widths)
    lines = []
    for row, remarks in zip(cells, [Text(), *map(_remarks, points)], strict=True):
        line = Text()
        for place in used:
            padding = " " * (widths[place] - row[place].cell_len)
            line += Text.assemble(padding, row[place]) if _HEADS[place] in _RIGHT else Text.assemble(row[place], padding)
            line.append("  ")
        line.rstrip()
        lines.append(line)
        if remarks.cell_len:
            lines.append(Text.assemble(" " * (widths[0] + 2), remarks))
    return lines


def sparkline(points: Sequence[Point]) -> str:
    """Return a bar for each point, the highest for the slowest median; `·` if it is no evidence.

    Equal medians have equal bars, and differences within 1 % of the slowest are not stretched to the full height.
    """
    medians = [point.time_ns for point in points if point.is_comparable and point.time_ns is not None]
    if not medians:
        return _NO_EVIDENCE * len(points)
    low, high = min(medians), max(medians)
    span = max(high - low, 0.01 * high)
    return "".join(
        _BARS[round((point.time_ns - low) / span * (len(_BARS) - 1))]
        if point.is_comparable and point.time_ns is not None
        else _NO_EVIDENCE
        for point in points
    )


def change(point: Point) -> tuple[str, str]:
    """Return a point's change from the previous one and its style: `12.3 % slower`, `≈ -0.4 %`."""
    from etfarm.client.jobs.history import describe_change

    text, outcome = describe_change(point)
    return text, _CHANGE_STYLES.get(outcome, "")


def _row(point: Point) -> tuple[Text, ...]:
    from rich.text import Text

    from etfarm.client.formats import answers, units
    from etfarm.wire.sqnr import level

    report = point.entry.report
    latency = answers.latency(report)
    median = " ".join(filter(None, (latency.text, latency.detail)))
    job = Text(point.entry.job[:_ID_CHARACTERS])
    if point.entry.tags:
        job.append(f" {', '.join(point.entry.tags)}", style="bold yellow")
    sqnr, size = point.sqnr_db, point.size_bytes
    return (
        Text(point.entry.at.astimezone().strftime("%Y-%m-%d %H:%M")),
        job,
        Text(median, style="" if point.is_comparable else "dim"),
        Text(*change(point)),
        Text(point.verdict.replace("_", " "), style=_VERDICT_STYLES.get(point.verdict, "")),
        Text("" if size is None else units.size(size)),
        Text("" if sqnr is None else level(sqnr)),
        Text("" if point.top1_agreement is None else units.percent(point.top1_agreement)),
        Text("" if point.perplexity is None else f"{point.perplexity:,.4g}"),
    )


def _remarks(point: Point) -> Text:
    """Return why a point is no evidence, and what changed since the previous one."""
    from rich.text import Text

    from etfarm.client.jobs.history import describe_doubts
    from etfarm.wire.changes import sentence

    doubts = describe_doubts(point)
    text = Text(doubts, style="dim")
    if point.changes:
        text.append("; " if doubts else "")
        text.append(f"changed: {'; '.join(sentence(item) for item in point.changes)}", style="not dim cyan")
    return text
