"""A comparison as text: its answer, and the facts, operators and other differences behind it.

These are pure functions of etfarm.comparison/1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.formats import generation, sentences, units
from etfarm.wire import changes, views
from etfarm.wire.comparison import EXACT_DB, label, traits
from etfarm.wire.comparison.numbers import ratio_text
from etfarm.wire.comparison.program import has_other_samples
from etfarm.wire.delegation import GLUE
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Fact:
    """One fact about both sides."""

    name: str
    base: str
    candidate: str
    change: str
    """`+2.1 %`; empty if nothing changed or a side lacks the fact."""


def number_fact(name: str, values: Json | None, shown: Callable[[Any], str]) -> Iterator[Fact]:
    """Yield the fact of a NUMBER; nothing for None."""
    if values is None:
        return
    change = ""
    if values["change"] and values["ratio"] is not None:
        change = sentences.change(values["ratio"] - 1)
        change = "" if change == "0.0 %" else change
    yield Fact(name, shown(values["base"]), shown(values["candidate"]), change)


NOTEWORTHY: Final = 0.01
"""Part of the traced time by which an operator must change to be listed; smaller changes occur between any two runs."""

TOP: Final = 5
"""Number of operators to list."""

GATE_WORDS: Final = {"passed": "passed", "failed": "not passed", "inconclusive": "inconclusive"}
"""Outcomes of a gate."""

SPREAD: Final = "between runs"
"""Name of the fact that says how much separate runs vary."""


@dataclass(frozen=True)
class Moved:
    """An operator or a module with a different part of the time."""

    change: str
    base: str
    candidate: str
    what: str
    place: str
    slower: bool
    is_certain: bool
    """Whether the change is more than chance explains, as far as that is known."""


def answer(pair: Json) -> str:
    """Return `0.912x [0.905, 0.919]  9 % faster`, or why latency was not measured on both sides."""
    latency = pair["latency"]
    failed = [pair[side] for side in ("base", "candidate") if pair[side]["state"] != "SUCCEEDED"]
    if failed:
        sides = [side for side in ("base", "candidate") if pair[side]["state"] != "SUCCEEDED"]
        return ", ".join(
            f"the {side} {(pair[side]['state'] or '?').lower()} ({pair[side]['error'] or 'no error'})" for side in sides
        )
    if latency is None or latency["ratio"] is None:
        generated = next(rates(pair, "decode"), None)
        return "no latency on both sides" if generated is None else f"decode {rate_answer(*generated, pair)}"
    return f"{ratio_text(latency['ratio'], latency['ratio_ci95'])}  {describe_change(latency)}"


def main_change(pair: Json) -> tuple[str, str]:
    """Return the ratio that `answer` is about, as `0.912x` or `?` if it is unknown, and its outcome."""
    change = pair["latency"]
    if change is None or change["ratio"] is None:
        change = next((rate for _, rate in rates(pair, "decode")), None)
    return ("?", "") if change is None else (ratio_text(change["ratio"]), change["outcome"] or "")


def describe_change(latency: Json) -> str:
    """Return `9 % faster`, `no difference found`, `12 % slower, inconclusive` or `same program, 12 % apart`."""
    text = sentences.ratio(latency["ratio"], latency["ratio_ci95"])
    if latency["outcome"] == "too_few":
        text = f"too few {'rounds' if latency['method'] == 'paired' else 'samples'} to tell"
    if latency["outcome"] == "inconclusive":
        apart = f"{units.significant(abs(1 - latency['ratio']) * 100, 2)} % apart"
        text = apart if latency["same_program"] else f"{text}, inconclusive"
    return f"same program, {text}" if latency["same_program"] else text


def status(pair: Json) -> str | None:
    """Return VALID if both sides are, else the first other status; None without a verdict."""
    return sentences.worst_status(
        pair[side]["verdict"]["status"] or "?" for side in ("base", "candidate") if pair[side]["verdict"]
    )


def heading(pair: Json) -> str:
    """Return the label of the pair, with both values of each trait that differs."""
    if not pair["differs"]:
        return label(pair["candidate"])
    both = zip(traits(pair["base"]), traits(pair["candidate"]), strict=True)
    return " · ".join(
        str(first) if first == second else f"{first or 'none'} -> {second or 'none'}" for first, second in both if first or second
    )


def facts(pair: Json) -> Iterator[Fact]:
    """Yield all known facts of either side, times first."""
    latency, size, memory = pair["latency"] or {}, pair["size"] or {}, pair["memory"] or {}
    for name, key in (("p50", "p50_ns"), ("p90", "p90_ns"), ("p99", "p99_ns"), ("first run", "first_run_ns")):
        yield from number_fact(name, latency.get(key), units.time)
    if latency.get("method") == "separate":
        yield Fact(SPREAD, spread(latency["base_spread"]), spread(latency["candidate_spread"]), "")
    yield from rate_facts(pair)
    yield from part_facts(pair)
    yield from number_fact("load program", latency.get("load_ns"), units.time)
    yield from number_fact("load method", latency.get("load_method_ns"), units.time)
    yield from number_fact("program", size.get("total_bytes"), units.size)
    for name, key in (("  operators", "program_bytes"), ("  constants", "constant_bytes"), ("  delegates", "delegate_bytes")):
        if (size.get(key) or {}).get("change"):
            yield from number_fact(name, size[key], units.size)
    yield from number_fact("peak memory", memory.get("peak_rss_bytes"), units.size)
    yield from number_fact("planned", memory.get("planned_bytes"), units.size)
    for output in pair["accuracy"]:
        yield _accuracy(output, alone=len(pair["accuracy"]) == 1)
    yield from logit_facts(pair)
    for method, delegation in (pair["delegation"] or {}).items():
        yield from _delegation(method, delegation, alone=len(pair["delegation"]) == 1)


def spread(values: Json | None) -> str:
    """Return how much separate runs vary: `1.2 % (5 runs)`, `3.0 % (assumed)` or `unknown`."""
    if values is None or values["relative_stddev"] is None:
        return "unknown"
    sources = {"REPEATS": units.count(values["runs"], "run"), "HISTORY": units.count(values["runs"], "earlier report")}
    return f"{values['relative_stddev'] * 100:.1f} % ({sources.get(values['source'], 'assumed')})"


def moved(pair: Json, top: int = TOP) -> list[Moved]:
    """Return the operators that changed most, by at least NOTEWORTHY of the time and by more than chance; all if `top` is 0."""
    operators = pair["operators"]
    if not operators:
        return []
    sums = [sum(row[side]["time_ns"] or 0.0 for row in operators["rows"] if row[side]) for side in ("base", "candidate")]
    least_ns = NOTEWORTHY * max(sums)
    rows = [row for row in operators["rows"] if row["change_ns"] is not None and abs(row["change_ns"]) >= max(least_ns, 1e-9)]
    if top:
        rows = [row for row in rows if row["outcome"] != "no_difference"][:top]
    return [_moved(row) for row in rows]


def unmoved(pair: Json) -> str:
    """Return in how many operators chance explains the change: `no difference found in 12 of 14`; empty without outcomes."""
    outcomes = [row["outcome"] for row in (pair["operators"] or {}).get("rows", ()) if row["outcome"]]
    count = outcomes.count("no_difference")
    return f"no difference found in {count} of {len(outcomes)}" if count else ""


def matching(pair: Json) -> str:
    """Return how operators without a graph were matched; empty if the graph or the program's own rows say it.

    For example `matched by name and order; 2 names occur more often on one side and are compared as a whole`.
    """
    operators = pair["operators"] or {}
    if operators.get("matched_by") != "NAME":
        return ""
    sizes = [[len(row[side]["indexes"]) for side in ("base", "candidate")] for row in operators["rows"] if _is_kernels(row)]
    count = sum(base != candidate for base, candidate in sizes)
    text = "kernels matched by name and order, since a .pte alone has no graph of its model"
    if not count:
        return text
    whole = (
        "name occurs more often on one side, and its kernels are" if count == 1 else "names occur more often on one side, and are"
    )
    return f"{text}; {count} {whole} compared as a whole"


def _is_kernels(row: Json) -> bool:
    """Return whether a row stands for operators or kernels of both sides."""
    return row["kind"] in ("OPERATOR", "DELEGATE") and row["base"] is not None and row["candidate"] is not None


def joined(pair: Json) -> Iterator[str]:
    """Yield the first operators with a changed delegation: `aten_mean_dim: 1 -> 0 delegated`."""
    lines = [line for line in _joined(pair) if not line.rpartition(": ")[0].endswith(GLUE)]
    yield from lines[:TOP]
    if len(lines) > TOP:
        yield f"and {units.count(len(lines) - TOP, 'more operator')}"


def _joined(pair: Json) -> Iterator[str]:
    for method, delegation in (pair["delegation"] or {}).items():
        where = f"{method}: " if len(pair["delegation"]) > 1 else ""
        for operator in delegation["operators"]:
            sides = [operator[side] or {"delegated": 0, "non_delegated": 0} for side in ("base", "candidate")]
            parts = [
                f"{sides[0][key]} -> {sides[1][key]} {name}"
                for key, name in (("delegated", "delegated"), ("non_delegated", "not delegated"))
                if sides[0][key] != sides[1][key]
            ]
            yield f"{where}{operator['op']}: {', '.join(parts)}"


def changed(pair: Json) -> list[str]:
    """Return the other differences: `executorch 1.5.0 -> 1.5.1`."""
    return [changes.sentence(change) for change in pair["changes"]]


def limits(gate: Json) -> str:
    """Return `latency 3 %, size 1 %`: all limits of a passed gate, else those not kept.

    A failed or missing cell keeps none.
    """
    broken = {reason["metric"] for reason in gate["reasons"]}
    shown = [limit for limit in gate["limits"] if not broken or None in broken or limit["metric"] in broken]
    return ", ".join(f"{limit['metric']} {limit['limit']:g} {limit['unit']}" for limit in shown)


def why(gate: Json) -> str:
    """Return in one line why a gate did not pass."""
    first, *more = gate["reasons"]
    return f"{first['message']}{f'; and {len(more)} more' if more else ''}"


def _accuracy(output: Json, *, alone: bool) -> Fact:
    name = "SQNR" if alone or not output["output"] else f"SQNR {output['output']}"
    change_db = _change_db(output)
    change = f"{change_db:+.1f} dB" if abs(change_db) >= 0.05 else ""
    if len({side["reference"] for side in (output["base"], output["candidate"]) if side}) > 1:
        change = "another reference"
    elif has_other_samples(output["base"], output["candidate"]):
        change = "other samples"
    base, candidate = (_errors(output[side], with_samples=change == "other samples") for side in ("base", "candidate"))
    return Fact(name, base, candidate, change)


def worst_accuracy(pair: Json) -> Fact | None:
    """Return the accuracy of the output with the largest loss, or of a language model's logits; None if nothing was compared."""
    if (logits := next((fact for fact in logit_facts(pair)), None)) is not None:
        return logits
    return next((_accuracy(output, alone=True) for output in sorted(pair["accuracy"], key=_exactness)), None)


def _change_db(output: Json) -> float:
    """Return by how much an SQNR changed in dB; 0 if unknown, or if both sides differ by rounding only."""
    change_db: float | None = output["change_db"]
    if change_db is None or min(output[side]["sqnr_db"] for side in ("base", "candidate")) >= EXACT_DB:
        return 0.0
    return change_db


def _errors(errors: Json | None, *, with_samples: bool) -> str:
    if errors is None:
        return "-"
    level = "equal" if errors["equal"] else "-" if errors["sqnr_db"] is None else decibels(errors["sqnr_db"])
    return f"{level} ({units.count(errors.get('samples') or 1, 'sample')})" if with_samples else level


def _exactness(output: Json) -> tuple[float, float]:
    """Return a sort key: outputs with the largest loss first, then the least exact."""
    exact = [output[side]["sqnr_db"] for side in ("candidate", "base") if output[side] and output[side]["sqnr_db"] is not None]
    return _change_db(output), exact[0] if exact else 300.0


def _delegation(method: str, delegation: Json, *, alone: bool) -> Iterator[Fact]:
    def nodes(side: str) -> str:
        inside, outside, parts = (
            (delegation[key] or {}).get(side) for key in ("delegated_nodes", "non_delegated_nodes", "subgraphs")
        )
        if inside is None or outside is None or parts is None:
            return "-"
        within = f" in {units.count(parts, 'subgraph')}" if parts else ""
        return f"{inside} of {inside + outside}{within}"

    before, after = nodes("base"), nodes("candidate")
    change = (delegation["delegated_nodes"] or {}).get("change")
    yield Fact(
        "delegated" if alone else f"delegated {method}",
        before,
        after,
        f"{change:+d}" if change else "" if before == after or "-" in (before, after) else "*",
    )


_OUTCOMES = {"no_difference": " (no difference)", "inconclusive": " (inconclusive)"}
"""Text beside the change of an operator, by its outcome."""


def _time(side: Json | None) -> str:
    """Return the time of a side's operators, `< 1.00 µs` below the clock's resolution; a dash if it lacks them."""
    if side is None:
        return "-"
    if side["time_ns"] is None and side["time_ci95_ns"]:
        return f"< {units.time(side['time_ci95_ns'][1])}"
    return units.time(side["time_ns"])


def _moved(row: Json) -> Moved:
    before, after = (_time(row[side]) for side in ("base", "candidate"))
    change = row["change_ns"]
    first, more = row["op_types"][:1], len(row["op_types"]) - 1
    types = "".join(map(_short, first)) + (f" (+{more})" if more > 0 else "")
    if row["kind"] == "UNATTRIBUTED" and not _is_one_kernel(row):
        what = "kernels of no operator"
    else:
        what = ": ".join(filter(None, (row["module"], types or _kernel(row))))
    text = f"{units.difference(change, row['change_ci95_ns'])}{_OUTCOMES.get(row['outcome'] or '', '')}"
    return Moved(text, before, after, name_of(row, what), views.line_of(row) or "", change > 0, row["outcome"] not in _OUTCOMES)


def name_of(row: Json, name: str) -> str:
    """Return the name of an operator's row, which may be what nothing explains, and whether only one side has it."""
    if row["kind"] == "REST":
        name = "not explained by operators or kernels"
    return f"{name} (new)" if row["base"] is None else f"{name} (gone)" if row["candidate"] is None else name


def _is_one_kernel(row: Json) -> bool:
    return all(len(row[side]["indexes"]) == 1 for side in ("base", "candidate") if row[side])


def _kernel(row: Json) -> str:
    """Return the name of a row's kernels, with their numbers if there are several: `Softmax`, `Softmax (2 -> 3 kernels)`."""
    sides = [row[side] or {"name": None, "indexes": []} for side in ("candidate", "base")]
    after, before = (len(side["indexes"]) for side in sides)
    # The name of several kernels has no number.
    name = max(sides, key=lambda side: len(side["indexes"]))["name"] or "?"
    if max(before, after) <= 1:
        return name
    return f"{name} ({before} -> {after} kernels)" if before and after else f"{name} ({max(before, after)} kernels)"


def _short(name: str) -> str:
    """Return `conv2d` for `aten.conv2d.default`."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else name


def columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column of texts."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []


_LOGITS: Final = (
    "reference", "sqnr_db", "top1_agreement", "kl_divergence", "generated_tokens", "first_difference", "perplexity",
)  # fmt: skip
"""The numbers of a side that are shown."""


def rates(pair: Json, key: str) -> Iterator[tuple[Json, Json]]:
    """Yield the points of generated text that both sides have, each with the change of a number that has a ratio."""
    for point in (pair["generation"] or {}).get("points", ()):
        if point[key] and point[key]["ratio"] is not None:
            yield point, point[key]


def rate_answer(point: Json, change: Json, pair: Json) -> str:
    """Return `1.052x [1.041, 1.063]  faster (prompt 128)` for a rate, of which more is better."""
    outcome = (change["outcome"] or "").replace("_", " ")
    same = "same program, " if pair["generation"]["same_program"] else ""
    ratio = ratio_text(change["ratio"], change["ratio_ci95"])
    return f"{ratio} of the tokens per second  {same}{outcome} ({generation.where(point)})"


def rate_facts(pair: Json) -> Iterator[Fact]:
    """Yield the numbers of generated text at each prompt length and depth that both sides have."""
    for key, name in (("ttft", "first token"), ("prefill", "prefill"), ("decode", "decode")):
        for point, change in rates(pair, key):
            shown = units.time if key == "ttft" else _tokens_per_s
            yield Fact(
                f"{name}, {generation.where(point)}", shown(change["base"]), shown(change["candidate"]),
                f"{(change['ratio'] - 1) * 100:+.1f} %",
            )  # fmt: skip


def part_facts(pair: Json) -> Iterator[Fact]:
    """Yield what each method of a language model takes at each prompt length and depth, for a prompt and for a token."""
    for point in (pair["generation"] or {}).get("points", ()):
        for part in point["parts"]:
            for key, what in (("prefill_ns", "first token"), ("decode_ns", "token")):
                yield from number_fact(f"  {part['method']}, {what}, {generation.where(point)}", part[key], units.time)


def logit_facts(pair: Json) -> Iterator[Fact]:
    """Yield the accuracy of a language model: its logits, the agreement of their largest ones, and the perplexity of the text."""
    logits = (pair["generation"] or {}).get("accuracy")
    if not logits:
        return
    base, candidate = (logits[side] or dict.fromkeys(_LOGITS) for side in ("base", "candidate"))
    yield Fact("SQNR of logits", _decibels(base), _decibels(candidate), _sqnr_change(logits, base, candidate))
    points = (logits["top1_change"] or 0.0) * 100
    dropped = f"{points:+.1f} points{' (lower)' if logits['top1_dropped'] else ''}" if abs(points) >= 0.05 else ""
    yield Fact("top-1 agreement", _share(base["top1_agreement"]), _share(candidate["top1_agreement"]), dropped)
    divergences = base["kl_divergence"], candidate["kl_divergence"]
    if divergences != (None, None):
        yield Fact("KL divergence", _shown(divergences[0], ".2g", " nats"), _shown(divergences[1], ".2g", " nats"), "")
    if base["generated_tokens"] or candidate["generated_tokens"]:
        yield Fact("first other token", _parting(base), _parting(candidate), "")
    if logits["perplexity"] is not None:
        yield from number_fact("perplexity", logits["perplexity"], lambda value: _shown(value, ",.4g"))
    elif base["perplexity"] is not None or candidate["perplexity"] is not None:
        yield Fact("perplexity", _shown(base["perplexity"], ",.4g"), _shown(candidate["perplexity"], ",.4g"), "another text")


def _decibels(side: Json) -> str:
    return "-" if side["sqnr_db"] is None else generation.logits(side)


def _sqnr_change(logits: Json, base: Json, candidate: Json) -> str:
    """Return `-2.1 dB`; empty if the change is unknown or only rounding."""
    if base["reference"] and candidate["reference"] and base["reference"] != candidate["reference"]:
        return "another reference"
    change_db = logits["sqnr_change_db"]
    if change_db is None or min(base["sqnr_db"] or 0.0, candidate["sqnr_db"] or 0.0) >= EXACT_DB or abs(change_db) < 0.05:
        return ""
    return f"{change_db:+.1f} dB"


def _share(share: float | None) -> str:
    return "-" if share is None else units.percent(share)


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _parting(side: Json) -> str:
    """Return where generated text parts from the reference's: `57 of 128`, or `none of 128`."""
    if not side["generated_tokens"]:
        return "-"
    first = side["first_difference"]
    return f"{'none' if first is None else f'{first:,}'} of {side['generated_tokens']:,}"


def _tokens_per_s(value: float | None) -> str:
    return units.rate(value)[0]
