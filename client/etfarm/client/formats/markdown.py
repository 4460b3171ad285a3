"""A job's reports as Markdown, for a pull request or an issue: a table first, details folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etfarm.client.formats import answers, escapes, gaps, generation, label, sentences, units
from etfarm.wire.comparison.numbers import ratio_text
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]

TOP = 8
"""Number of operators per report."""

_VERDICTS = {"VALID": "✅ valid", "INVALID": "❌ **invalid**", "NOT_BENCHMARKABLE": "⚪ not benchmarkable"}


def write(document: Json) -> bytes:
    """Return the Markdown of a document."""
    return ("\n".join(_lines(document)) + "\n").encode()


def _lines(document: Json) -> Iterator[str]:
    reports = document["reports"]
    if document["error"]:
        yield f"> [!CAUTION]\n> {_error(document['error'])}"
        yield ""
    if reports:
        yield from _overview(reports)
    for report in reports:
        yield ""
        yield from _report(report)
    job = document["job"]
    if job:
        yield ""
        facts = (f"etfarm job {job['id']}", job["state"].lower(), job["submitted_at"])
        yield f"<sub>{' · '.join(map(escapes.text, facts))}</sub>"


def _overview(reports: Sequence[Json]) -> Iterator[str]:
    compared = any(report["interleaved"] for report in reports)
    heads = ["", "p50", "verdict", "delegated", "accuracy", "size", "peak memory", *(["in turns"] if compared else [])]
    yield _row(heads)
    yield _row(["---", "---:", "---", "---:", "---:", "---:", "---:", *(["---"] if compared else [])])
    for report in reports:
        cells = [f"**{escapes.text(label(report))}**"]
        if report["state"] != "SUCCEEDED":
            reason = escapes.text(report["error"]["reason"]) if report["error"] else ""
            yield _row([*cells, f"❌ {escapes.text(report['state'].lower())} {reason}", *[""] * (len(heads) - 2)])
            continue
        time, share = answers.latency(report), answers.delegated(report)
        runs = f"({sentences.runs(report)})" if len(report["runs"]) > 1 else ""
        cells.append(" ".join(filter(None, (time.text, escapes.text(time.detail), escapes.text(runs)))))
        unquantized = "⚠️ **not quantized**" if sentences.unquantized(report) else ""
        cells.append(" ".join(filter(None, (_VERDICTS.get(str((report["verdict"] or {}).get("status")), ""), unquantized))))
        cells += [share.text, escapes.text(answers.accuracy(report).text), answers.size(report).text, answers.memory(report).text]
        if compared:
            cells.append(escapes.text(_paired(report, reports)))
        yield _row(cells)


def _paired(report: Json, reports: Sequence[Json]) -> str:
    paired = report["interleaved"]
    if not paired or paired["ratio"] is None:
        return ""
    ends = paired["ratio_ci95"]
    return f"{ratio_text(paired['ratio'], ends)} of {answers.against(report, reports)}: {sentences.ratio(paired['ratio'], ends)}"


def _report(report: Json) -> Iterator[str]:
    if report["error"]:
        yield f"**{escapes.text(label(report))}**: {_error(report['error'])}"
        return
    warnings = [str(warning["message"]) for warning in (report["compile"] or {}).get("warnings") or ()]
    for warning in warnings[:TOP]:
        yield f"> ⚠️ {escapes.text(label(report))}: {escapes.text(warning)}"
    if warnings:
        yield ""
    if reasons := sentences.verdict(report):
        yield f"> {escapes.text(label(report))}: {_VERDICTS.get(report['verdict']['status'], '')}"
        yield from (f"> - {escapes.text(str(reason))}" for reason in reasons)
        yield ""
    if report["generation"]:
        yield f"**{escapes.text(label(report))}**"
        yield ""
        yield from _generation(report["generation"])
    folded = [*_operators(report), *_accuracy(report), *_gap(report), *_compiled(report)]
    if folded:
        slow = answers.slowest(report)
        text = f": {escapes.text(slow.text)} of the time in {escapes.code(slow.detail)}" if slow.text else ""
        yield f"<details><summary>{escapes.html(label(report))}</summary>"
        yield ""
        if text:
            yield f"Slowest{text}"
            yield ""
        yield from folded
        yield "</details>"


def _generation(generated: Json) -> Iterator[str]:
    """Yield the table of generated text: its rates by prompt length and depth."""
    yield _row(list(generation.COLUMNS))
    yield _row(["---:", "---:", "---:", "---:", "---:", "---", "---"])
    for row in generation.rows(generated):
        yield _row([escapes.text(cell) for cell in row])
    yield ""
    if parts := generation.parts(generated):
        yield _row(list(generation.PART_COLUMNS))
        yield _row(["---:", "---:", "---", "---:", "---:", "---:", "---:", "---:"])
        for row in parts:
            yield _row([escapes.text(cell) for cell in row])
        yield ""
    yield f"<sub>{escapes.html(' · '.join(f'{name}: {text}' for name, text in generation.facts(generated)))}</sub>"
    yield ""


def _operators(report: Json) -> Iterator[str]:
    rows = answers.slowest_rows(report, TOP)
    if not rows:
        return
    if reasons := sentences.traced_verdict(report["profile"]) if report["profile"] else []:
        yield f"> Times of operators: {_VERDICTS.get(report['profile']['verdict']['status'], '')}"
        yield from (f"> - {escapes.text(str(reason))}" for reason in reasons)
        yield ""
    yield _row(["share", "time", "operator", "backend", "source"])
    yield _row(["---:", "---:", "---", "---", "---"])
    for row in rows:
        where = answers.place(row)
        code = row["source"]["code"].strip() if row["source"] and row["source"]["code"] else ""
        source = " ".join(part for part in (escapes.code(where) if where else "", escapes.code(code) if code else "") if part)
        cells = [
            units.percent(answers.share(row)),
            escapes.text(answers.time_of(row)),
            escapes.text(row["name"]),
            escapes.text(answers.backend(row)),
            source,
        ]
        yield _row(cells)
    yield ""


def _accuracy(report: Json) -> Iterator[str]:
    outputs = report["accuracy"]
    if not outputs:
        return
    yield _row(["output", "against", "SQNR", "max abs error", "mean abs error", "cosine", "top-1"])
    yield _row(["---", "---", "---:", "---:", "---:", "---:", "---:"])
    for output in outputs:
        numbers = [
            _number(output[key], form) for key, form in (("max_abs_error", ".3g"), ("mean_abs_error", ".3g"), ("cosine", ".6f"))
        ]
        level = "equal" if output["equal"] else decibels(output["sqnr_db"]) if output["sqnr_db"] is not None else ""
        if not level and output.get("equal_share") is not None:
            level = f"{units.percent(output['equal_share'])} equal"
        if samples := sentences.samples(output):
            level = f"{level} ({samples})".lstrip()
        yield _row(
            [
                escapes.text(output["output"] or "output"),
                escapes.text(output["reference"] or ""),
                level,
                *numbers,
                units.percent(output["top1_agreement"]),
            ]
        )
    yield ""


def _gap(report: Json) -> Iterator[str]:
    numerics, rows = report["numerics"], report["numeric_gap"] or ()
    bad = [row for row in rows if row["first_bad"]]
    if not numerics or not rows:
        return
    if not bad:
        values = list(gaps.operators(rows))
        judged = gaps.judged(values, numerics)
        note = f", {judged} of them judged" if judged < len(values) else ""
        answer = (
            "none is bad alone"
            if numerics.get("wrong_only_when_fused")
            else "none is bad"
            if judged
            else "so it is not known whether one is bad"
        )
        yield f"Numerics: {units.count(len(values), 'operator')} compared{note}, {answer}."
        if fused := gaps.describe_fused(numerics):
            yield f"The program is wrong only when fused: {fused}."
    for row in bad:
        level = decibels(row["snr_db"]) if row["snr_db"] is not None else "no SNR"
        where = answers.place(row)
        what, at = escapes.text(", ".join(row["ops"])), f", {escapes.code(where)}" if where else ""
        against = answers.REFERENCES.get(row["reference"], "reference")
        yield f"Numerics: the first bad operator is {what} with {level} against the {against}{at}."
    yield ""


def _compiled(report: Json) -> Iterator[str]:
    missed = answers.undelegated(report)
    if missed and report["recipe"] != "portable":
        named = ", ".join(f"{escapes.text(op)} ({_nodes(count, places)})" for _, op, count, places in missed[:TOP])
        more = f" and {len(missed) - TOP} more" if len(missed) > TOP else ""
        yield f"Not delegated: {named}{more}."
        yield ""
    compiled = report["compile"] or {}
    tools = compiled.get("toolchain") or {}
    device, runner = report["device"], report["runner"]
    facts = [f"{name} {version}" for name, version in tools.items() if version]
    if device:
        facts.append(f"on {device['soc'] or device['arch']}, {device['os']}")
    if runner:
        facts.append(f"{runner['kind']} runner with ExecuTorch {runner['executorch']}")
    if facts:
        yield f"<sub>{escapes.html(' · '.join(facts))}</sub>"
        yield ""


def _nodes(count: int, places: Sequence[Json]) -> str:
    reasons = answers.undelegated_reasons(places)
    return f"{count} x: {escapes.text(reasons)}" if reasons else f"{count} x"


def _error(error: Json) -> str:
    remedy = f" {escapes.text(error['remedy'])}" if error["remedy"] else ""
    return f"**{escapes.text(error['reason'])}** {escapes.text(error['message'])}{remedy}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
