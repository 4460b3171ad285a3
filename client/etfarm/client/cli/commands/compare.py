"""`etfarm compare`: two measurements against each other, and a gate for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.files import require_writable, write_whole
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import put, tell
from etfarm.client.errors import DONE, FAILED, GATE, INCONCLUSIVE
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from etfarm.client.reports import Comparison

Json = Mapping[str, Any]

_SIDE = "A job (id, its start, a tag, a name, latest) or a report file (x.json); #N, #RECIPE or #MODEL chooses of its reports."

_STYLES = {"faster": "green", "slower": "red", "too_few": "yellow", "inconclusive": "yellow"}
_GATE_STYLES = {"passed": "bold green", "failed": "bold red", "inconclusive": "bold yellow"}


def main(argv: list[str]) -> int:
    """Run `etfarm compare`."""
    return execute(compare, argv, "compare")


def compare(
    outcome: Outcome,
    connection: Connection,
    base: Annotated[str, typer.Argument(metavar="BASE", help=_SIDE)],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="What to compare with BASE, in the same form.")],
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            metavar="[METRIC=]LIMIT",
            help="3% (latency), size=1%, memory=5%, accuracy=1dB, top1=2%, decode=3%; repeatable.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Pass no other program if the interval does not show that the limit is kept.")
    ] = False,
    accept_invalid: Annotated[
        bool,
        typer.Option("--accept-invalid", help="Also gate latencies that are INVALID, NOT BENCHMARKABLE or of different devices."),
    ] = False,
    top: Annotated[int, typer.Option("--top", metavar="N", min=0, help="Number of changed operators to show; 0: all.")] = 5,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown for a pull request there; - is stdout.")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write etfarm.comparison/1 there, on failure too; - is stdout.")
    ] = None,
    junit: options.JunitFile = None,
    notify: Annotated[
        bool,
        typer.Option("--notify", help="Tell the candidate job's --notify addresses and the farm's webhooks if a gate fails."),
    ] = False,
) -> int:
    """Compare CANDIDATE with BASE: latency, operators, size, memory, accuracy, delegation, and what else is not the same.

    Reports are paired by model, recipe, method, threads and device (the same one, else one of its kind); two single ones are
    paired whatever they are. Select among several of one job with # and the cell's number from 0, as in `etfarm jobs show`,
    its recipe or its model: `compare latest#0 latest#1`. Two files need no server.

    Latencies are compared as a ratio of medians with its 95 % interval: round by round where both took turns (`bench
    --interleave`), else as separate runs, which vary by more than what varies within a run. How much, repeats (`bench --repeat
    5`) or earlier runs of the same program on the device show. If they do not on both sides, a difference is inconclusive; so is
    one within the 99 % interval of runs that vary by more than 3 %.

    --gate 3% is not passed when the interval shows the candidate to be slower by more than 3 %: all of it is above 1.03. One
    that spans 1.03 passes with a note; it is inconclusive with --strict, if it reaches more than 5 % above the ratio, or if all
    of it is above 1 and the ratio above 1.03. Also inconclusive are latencies that are not VALID on both sides, or of devices
    of different kinds, and separate runs of different programs whose spread is unknown, unless they differ by a factor of 2.5
    or more: slower is not passed, faster passes with a note. The message names the command that decides. No gate is passed
    where a cell of the candidate failed or is missing.

    Other metrics of --gate: size, the .pte with its data; memory, the process's peak and the planned memory; accuracy, the SQNR
    of each output and of a language model's logits, where values above 100 dB count as 100; top1, how often the largest value is
    the reference's, in percentage points; perplexity of a text; decode, prefill and ttft, the times of a language model.

    Exit codes: 0 done, and every gate passed; 1 a cell of the candidate failed, or there is nothing to compare; 2 usage; 3 a
    gate is not passed; 4 the server cannot be reached; 5 a gate is inconclusive, and none failed: measure again.
    """
    from etfarm.client.jobs import comparison as comparisons
    from etfarm.client.jobs import report_file
    from etfarm.wire import comparison

    outcome.document = comparison.failed
    if markdown == json == STDOUT:
        raise error_for("USAGE", "--json and --markdown cannot both be on stdout.", "Give one of them a file.")
    if markdown is not None and markdown != STDOUT:
        require_writable(Path(markdown))
    outcome.goes_to(json)
    outcome.goes_to_junit(junit)
    if markdown == junit == STDOUT:
        raise error_for("USAGE", "--junit and --markdown cannot both be on stdout.", "Give one of them a file.")
    if notify and (not gate or report_file.is_named(comparison.split_choice(candidate)[0])):
        raise error_for("USAGE", "--notify requires --gate, and a job as the candidate.", "Leave it out.")
    limits = comparisons.gate_of(gate or (), strict=strict, accept_invalid=accept_invalid)

    async def ask() -> Comparison:
        if not notify and not comparisons.needs_farm(base, candidate):
            return await comparisons.compare(None, base, candidate, limits)
        async with connection.farm() as farm:
            compared = await farm.compare(base, candidate, gate or (), strict=strict, accept_invalid=accept_invalid)
            judged = compared.json()["gate"]
            if notify and judged and judged["outcome"] == "failed":
                job = await farm.job(comparison.split_choice(candidate)[0])
                await job.report_gate(
                    " ".join(f"--gate {limit}" for limit in gate or ()), [reason["message"] for reason in judged["reasons"]]
                )
            return compared

    document = run_async(ask, outcome).json()
    outcome.document = lambda error: document
    _show(document, top, to_stderr=STDOUT in (json, markdown, junit))
    if markdown is not None:
        from etfarm.client.formats import compared_markdown

        text = compared_markdown.write(document)
        if markdown == STDOUT:
            put(text)
        else:
            write_whole(Path(markdown), text.encode())
    return _code(document)


def _code(document: Json) -> int:
    from etfarm.client.formats import compared

    gate = document["gate"]
    if gate is not None:
        if gate["outcome"] == "passed":
            return DONE
        tell(f"etfarm: The gate is {compared.GATE_WORDS[gate['outcome']]}: {compared.why(gate)}.", to_stderr=True)
        return GATE if gate["outcome"] == "failed" else INCONCLUSIVE
    failed = [pair["candidate"] for pair in document["pairs"]]
    failed += [entry["report"] for entry in document["unpaired"] if entry["side"] == "CANDIDATE"]
    return FAILED if any(entry["state"] != "SUCCEEDED" for entry in failed) else DONE


def _show(document: Json, top: int, *, to_stderr: bool) -> None:
    from etfarm.client.cli.terminal import output

    console = output.open_console(to_stderr=to_stderr)
    output.say(console, *rendered(document, top=top, width=console.width))


def rendered(document: Json, *, top: int, width: int) -> list[RenderableType]:
    """Return a comparison: per pair the result and then all details; then notes; then the gate.

    Args:
        top: number of changed operators; 0 is all.
        width: columns of the terminal.
    """
    from rich.text import Text

    from etfarm.wire.comparison import label

    parts: list[RenderableType] = []
    for pair in document["pairs"]:
        if parts:
            parts.append(Text())
        parts += _pair(pair, top, width)
    for entry in document["unpaired"]:
        parts.append(Text(f"only in the {entry['side'].lower()}: {label(entry['report'])}", style="yellow"))
    parts += [Text(note, style="dim") for note in document["notes"]]
    if document["gate"]:
        parts += _gate(document["gate"])
    return parts


def _pair(pair: Json, top: int, width: int) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import compared

    yield _headline(pair, width)
    facts = list(compared.facts(pair))
    if facts:
        yield Padding(_table(facts), (0, 0, 0, 2))
    moved = compared.moved(pair, top)
    if moved:
        yield Padding(_moved(moved, width - 2), (0, 0, 0, 2))
    rows: list[tuple[str, RenderableType]] = []
    if same := compared.unmoved(pair):
        rows.append(("operators", Text(same)))
    elif pair["operators"] and not moved:
        rows.append(("operators", Text("no share of the time changed by 1 % or more")))
    if by_name := compared.matching(pair):
        rows.append(("operators", Text(by_name)))
    rows += [("delegation", Text(line)) for line in compared.joined(pair)]
    rows += [("changed", Text(line)) for line in compared.changed(pair)]
    if rows:
        named = [(name if place == 0 or rows[place - 1][0] != name else "", value) for place, (name, value) in enumerate(rows)]
        yield Padding(output.facts(named), (0, 0, 0, 2))


def _headline(pair: Json, width: int) -> RenderableType:
    """Return the result, on one line with the pair's label if there is room, else below it."""
    from rich.console import Group
    from rich.text import Text

    from etfarm.client.cli.terminal.output import VERDICT_STYLES
    from etfarm.client.formats import compared, units

    latency = pair["latency"]
    text = Text("candidate / base  ", style="bold")
    answer, _, meaning = compared.answer(pair).partition("  ")
    text.append(answer)
    if meaning:
        text.append("  ").append(meaning, _STYLES.get(compared.main_change(pair)[1], "not bold"))
    if latency and latency["method"] == "paired":
        text.append(f"  {units.count(latency['rounds'], 'round')}", "not bold dim")
    if (status := compared.status(pair)) is not None:
        text.append("  ").append(status.replace("_", " "), f"not bold {VERDICT_STYLES.get(status, '')}".strip())
    heading = Text(compared.heading(pair), style="dim")
    if text.cell_len + 3 + heading.cell_len <= width:
        return text.append("   ").append_text(heading)
    return Group(text, Text("  ").append_text(heading))


def _table(facts: list[Any]) -> RenderableType:
    from rich.text import Text

    from etfarm.client.cli.terminal.output import columns

    table = columns(("left", "dim"), ("right", ""), ("right", ""), ("right", ""))
    table.add_row("", *(Text(name, style="dim") for name in ("base", "candidate", "change")))
    for fact in facts:
        table.add_row(fact.name, fact.base, fact.candidate, fact.change)
    return table


def _moved(rows: list[Any], width: int) -> RenderableType:
    from rich.text import Text

    from etfarm.client.cli.terminal.output import columns
    from etfarm.client.formats import compared, units

    fixed = compared.columns([(row.base, row.candidate, row.change) for row in rows])
    room = max(20, width - sum(fixed) - 2 * len(fixed) - 2)
    places = min(max(len(row.place) for row in rows), room // 2)
    table = columns(("right", ""), ("right", ""), ("right", ""), ("left", ""), ("left", "dim"))
    for row in rows:
        table.add_row(
            row.base,
            row.candidate,
            Text(row.change, style="" if not row.is_certain else "red" if row.slower else "green"),
            units.without_end(row.what, room - places),
            units.without_start(row.place, places),
        )
    return table


def _gate(gate: Json) -> Iterator[Text]:
    from rich.text import Text

    from etfarm.client.formats import compared

    text = Text("gate ", style="bold")
    text.append(compared.GATE_WORDS[gate["outcome"]], _GATE_STYLES[gate["outcome"]])
    yield text.append(f"  {compared.limits(gate)}", "not bold dim")
    for note in gate["notes"]:
        yield Text(f"  {note['message']}", style="yellow")
    # The first error is on stderr.
    for reason in gate["reasons"] if len(gate["reasons"]) > 1 else ():
        yield Text(f"  {reason['message']}", style="red")
