"""Reports as HTML fragments for notebooks: tables without scripts, styles or addresses. These are pure functions.

Every name and text is escaped: models, devices and programs choose them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from etfarm.client.formats import answers, label, sentences, units
from etfarm.wire import views
from etfarm.wire.escapes import printable

Json = Mapping[str, Any]

TOP: Final = 8
"""Number of operators below a report."""

MOST_ROWS: Final = 200
"""Maximum number of rows of the table of all operators."""


def job(document: Json) -> str:
    """Return a table with a row for each report of a document, and the errors of failed ones."""
    head = document["job"]
    title = f"etfarm job {head['id']} · {str(head['state']).lower()}" if head else "etfarm"
    return "".join([_element("div", title), *_overview(document["reports"]), *_notes(document["reports"])])


def report(of_report: Json) -> str:
    """Return a table with the answers of one report, the reasons of its verdict, and its slowest operators."""
    slowest = answers.slowest_rows(of_report, TOP)
    parts = [*_overview([of_report]), *_notes([of_report])]
    if slowest:
        parts += [_element("div", "Slowest operators"), *_operators(slowest)]
    return "".join(parts)


def operators(rows: Sequence[Json]) -> str:
    """Return a table of operators in the order of execution, at most `MOST_ROWS`."""
    more = len(rows) - MOST_ROWS
    note = [_element("div", f"… and {units.count(more, 'more row')}")] if more > 0 else []
    return "".join([*_operators(rows[:MOST_ROWS]), *note])


def progress(done: int, total: int, text: str) -> str:
    """Return a progress bar with a line of text."""
    bar = f'<progress value="{int(done)}" max="{max(1, int(total))}"></progress> '
    return f"<div>{bar}{_escaped(f'{done}/{total} {text}')}</div>"


def _overview(reports: Sequence[Json]) -> Iterator[str]:
    heads = ("", "p50", "95 % interval", "verdict", "delegated", "accuracy", "size", "peak memory")
    rows = []
    for each in reports:
        if each["state"] == "SUCCEEDED":
            latency = answers.latency(each)
            cells = [
                latency.text,
                latency.detail,
                *(answer(each).text for answer in (answers.verdict, answers.delegated, answers.accuracy)),
                *(answer(each).text for answer in (answers.size, answers.memory)),
            ]
        else:
            cells = [str(each["state"]).lower(), *[""] * (len(heads) - 2)]
        rows.append([label(each), *cells])
    yield from _table(heads, rows)


def _notes(reports: Sequence[Json]) -> Iterator[str]:
    """Yield a list of why reports failed, or why their numbers cannot be trusted."""
    notes = []
    for each in reports:
        if error := each["error"]:
            notes.append(f"{label(each)}: {error['reason']}: {error['message']} {error['remedy'] or ''}")
        notes += [f"{label(each)}: {reason}" for reason in sentences.verdict(each)]
        if each["profile"]:
            reasons = sentences.traced_verdict(each["profile"])
            notes += [f"{label(each)}: times of operators: {reason}" for reason in reasons]
    if notes:
        yield f"<ul>{''.join(_element('li', note) for note in notes)}</ul>"


def _operators(rows: Iterable[Json]) -> Iterator[str]:
    heads = ("#", "kind", "operator", "share", "time", "backend", "module", "source", "code")
    yield from _table(
        heads,
        [
            [
                str(row["index"]), str(row["kind"] or ""), row["name"] or "", units.percent(row["share"]), answers.time_of(row),
                answers.backend(row), row["module"] or "", views.line_of(row) or "",
                (source["code"] or "").strip() if source else "",
            ]
            for row in rows
            for source in [row["source"]]
        ],
    )  # fmt: skip


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"<table><thead><tr>{''.join(_element('th', head) for head in heads)}</tr></thead><tbody>"
    yield from (f"<tr>{''.join(_element('td', cell) for cell in row)}</tr>" for row in rows)
    yield "</tbody></table>"


def _element(name: str, text: str) -> str:
    return f"<{name}>{_escaped(text)}</{name}>"


def _escaped(text: str) -> str:
    # A dollar sign starts a formula in notebooks.
    return html.escape(printable(text)).replace("$", "&#36;")
