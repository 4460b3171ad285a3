"""A comparison as Markdown, for a pull request.

It is a pure function of etfarm.comparison/1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from etfarm.client.formats import escapes
from etfarm.client.formats.compared import (
    GATE_WORDS,
    SPREAD,
    Fact,
    Json,
    answer,
    changed,
    facts,
    heading,
    joined,
    limits,
    matching,
    moved,
    status,
    unmoved,
    worst_accuracy,
)
from etfarm.wire.comparison import label

_GATE_MARKS: Final = {"passed": "✅", "failed": "❌", "inconclusive": "❔"}

_ONCE = ("first run", "load program", "load method")
"""Times that are measured once and differ between any two runs."""


def write(document: Json) -> str:
    """Return the Markdown of a comparison: a row per pair, the gate's outcome, and other changes, folded."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Json) -> Iterator[str]:
    gate = document["gate"]
    if gate:
        mark = _GATE_MARKS[gate["outcome"]]
        yield f"**{mark} gate {GATE_WORDS[gate['outcome']]}** ({escapes.text(limits(gate))})"
        yield ""
        for reason in gate["reasons"]:
            yield f"- {mark} {escapes.text(reason['message'])}"
        for note in gate["notes"]:
            yield f"- ⚠️ {escapes.text(note['message'])}"
        if gate["reasons"] or gate["notes"]:
            yield ""
    yield "| | p50 | candidate / base | | size | peak memory | SQNR |"
    yield "| --- | ---: | ---: | --- | ---: | ---: | ---: |"
    for pair in document["pairs"]:
        yield _row(pair)
    for entry in document["unpaired"]:
        yield f"| {escapes.text(label(entry['report']))} | | only in the {entry['side'].lower()} | | | | |"
    for pair in document["pairs"]:
        yield from _details(pair, several=len(document["pairs"]) > 1)
    yield ""
    for note in document["notes"]:
        yield f"<sub>{escapes.text(note)}</sub>  "
    names = [_source(document[side]) for side in ("base", "candidate")]
    yield f"<sub>etfarm: {escapes.text(names[0])} (base), {escapes.text(names[1])} (candidate)</sub>"


def _row(pair: Json) -> str:
    known = {fact.name: fact for fact in facts(pair)}
    latency = pair["latency"]
    p50, ratio, outcome = known.get("p50"), "", ""
    succeeded = all(pair[side]["state"] == "SUCCEEDED" for side in ("base", "candidate"))
    if succeeded and latency and latency["ratio"] is not None:
        ratio, _, outcome = answer(pair).partition("  ")
        if (verdict := status(pair)) not in (None, "VALID"):
            outcome += f" ({str(verdict).replace('_', ' ')})"
    else:
        outcome = answer(pair)
    sqnr = worst_accuracy(pair)
    cells = [
        f"**{escapes.text(heading(pair))}**",
        f"{p50.base} → {p50.candidate}" if p50 else "",
        ratio,
        f"**{escapes.text(outcome)}**" if latency and latency["outcome"] in ("faster", "slower") else escapes.text(outcome),
        *(_cell(known.get(name)) for name in ("program", "peak memory")),
        _cell(sqnr),
    ]
    return f"| {' | '.join(cells)} |"


def _details(pair: Json, *, several: bool) -> Iterator[str]:
    rows = [fact for fact in facts(pair) if fact.name == SPREAD or (fact.change and fact.name not in _ONCE)]
    others, operators, joins = changed(pair), moved(pair), list(joined(pair))
    if same := unmoved(pair):
        others.append(f"{'modules' if pair['operators']['by'] == 'MODULE' else 'operators'}: {same}")
    if by_name := matching(pair):
        others.append(f"operators: {by_name}")
    if not (rows or others or operators or joins):
        return
    yield ""
    yield f"<details><summary>What changed{f' in {escapes.html(heading(pair))}' if several else ''}</summary>"
    if others:
        yield ""
        yield from (f"- {escapes.text(item)}" for item in others)
    if rows:
        yield ""
        yield "| | base | candidate | change |"
        yield "| --- | ---: | ---: | ---: |"
        yield from (f"| {escapes.text(fact.name.strip())} | {fact.base} | {fact.candidate} | {fact.change} |" for fact in rows)
    if operators:
        yield ""
        yield f"| {'module' if pair['operators']['by'] == 'MODULE' else 'operator'} | | base | candidate | change |"
        yield "| --- | --- | ---: | ---: | ---: |"
        for item in operators:
            yield f"| {escapes.text(item.what)} | {escapes.text(item.place)} | {item.base} | {item.candidate} | {item.change} |"
    if joins:
        yield ""
        yield from (f"- {escapes.text(item)}" for item in joins)
    yield ""
    yield "</details>"


def _source(side: Json) -> str:
    choice = f"#{side['choice']}" if side["choice"] else ""
    return f"{side['file']}{choice}" if side["file"] else f"job {(side['job'] or {}).get('id', '?')}{choice}"


def _cell(fact: Fact | None) -> str:
    if fact is None:
        return ""
    return f"{fact.candidate} ({fact.change})" if fact.change else fact.candidate
