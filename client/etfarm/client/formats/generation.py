"""Generated text as text and tables, for every format. Takes REPORT.generation of etfarm.report/1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from etfarm.client.formats import sentences, units
from etfarm.wire.sqnr import EXACT_DB, decibels

Json = Mapping[str, Any]

COLUMNS: Final = ("prompt", "depth", "first token", "prefill", "decode", "token", "verdict")
"""Headings of the columns of `rows`."""

PART_COLUMNS: Final = ("prompt", "depth", "method", "executions", "of the first token", "share", "of each token", "share")
"""Headings of the columns of `parts`."""


def headline(generation: Json) -> tuple[str, str, str] | None:
    """Return the rate of decode, its interval and what it is of, at the first point that has one; None without any."""
    point = next((each for each in generation["points"] if each["decode_tokens_per_s"] is not None), None)
    if point is None:
        return None
    rate, interval = units.rate(point["decode_tokens_per_s"], point["decode_tokens_per_s_ci95"])
    return rate, interval, where(point)


def where(point: Json) -> str:
    """Return the prompt length and the depth of a point: `prompt 128`, `prompt 512 at depth 1,024`."""
    at = f" at depth {point['depth']:,}" if point["depth"] else ""
    return f"prompt {point['prompt_tokens']:,}{at}"


def rows(generation: Json) -> list[list[str]]:
    """Return a row of texts for each point, with COLUMNS; an error takes the place of the numbers that are missing."""
    return [_row(point) for point in generation["points"]]


def parts(generation: Json) -> list[list[str]]:
    """Return a row of texts for each method of each point, with PART_COLUMNS; empty unless several methods generate together."""
    return [_part_row(point, part) for point in generation["points"] for part in point["parts"]]


def _part_row(point: Json, part: Json) -> list[str]:
    return [
        f"{point['prompt_tokens']:,}",
        f"{point['depth']:,}",
        part["method"],
        f"{part['prefill_executions']:,} + {part['decode_executions']:,}",
        _joined(*_time(part["prefill_ns"], part["prefill_ci95_ns"])),
        _share(part["prefill_share"]),
        _joined(*_time(part["decode_ns"], part["decode_ci95_ns"])),
        _share(part["decode_share"]),
    ]


def _share(share: float | None) -> str:
    return "-" if share is None else units.percent(share)


def _row(point: Json) -> list[str]:
    error, verdict = point["error"], point["verdict"] or {}
    ttft = _joined(*_time(point["ttft_ns"], point["ttft_ci95_ns"]))
    rates = [_joined(*units.rate(point[name], point[f"{name}_ci95"])) for name in ("prefill_tokens_per_s", "decode_tokens_per_s")]
    status = (verdict.get("status") or "").replace("_", " ")
    return [
        f"{point['prompt_tokens']:,}",
        f"{point['depth']:,}",
        ttft,
        *rates,
        curve(point["token_ns"] or ()),
        error["reason"] if error else status,
    ]


def _time(value_ns: float | None, ends_ns: Sequence[float] | None) -> tuple[str, str]:
    return ("-", "") if value_ns is None else units.median(value_ns, ends_ns or ())


def _joined(value: str, interval: str) -> str:
    return f"{value} {interval}" if interval else value


def curve(token_ns: Sequence[float]) -> str:
    """Return how the time of a token changes over a repetition: `8.79 ms to 9.05 ms`; empty without tokens of decode.

    The ends are medians over an eighth of the tokens, at least one.
    """
    decode = list(token_ns[1:])
    if not decode:
        return ""
    part = max(1, len(decode) // 8)
    first, last = (sorted(values)[len(values) // 2] for values in (decode[:part], decode[-part:]))
    return f"{units.time(first)} to {units.time(last)}"


def facts(generation: Json) -> Iterator[tuple[str, str]]:
    """Yield facts of the model and of the measurement, each with its name."""
    model = generation["model"]
    if model:
        context = f"{model['max_context_tokens']:,} tokens of context, {model['vocab_size']:,} in the vocabulary"
        chunk = model["max_prompt_tokens"]
        yield "model", f"{context}, at most {units.count(chunk, 'token')} an execution"
        if model["kv_cache_bytes"]:
            yield "KV cache", f"{units.size(model['kv_cache_bytes'])}, part of the planned memory"
        if model["flow"]:
            yield "flow", flow(model)
    yield "generated", _generated(generation)
    for name, key in (("prefill", "prefill_execution"), ("decode", "decode_execution")):
        if traced := generation[key]:
            yield f"traced {name}", f"{units.count(traced['tokens'], 'token')} at position {traced['position']:,}"
    yield from accuracy_facts(generation["accuracy"])
    if known := [point["tokens_equal"] for point in generation["points"] if point["tokens_equal"] is not None]:
        equal = all(known)
        yield "tokens", "equal in all repetitions" if equal else "different between repetitions"


def accuracy_facts(accuracy: Json | None) -> Iterator[tuple[str, str]]:
    """Yield facts of the logits after given tokens, the perplexity, and where the generated text parts from the reference's."""
    if not accuracy:
        return
    if error := accuracy["error"]:
        yield "accuracy", f"not measured: {error['message']}"
        return
    for each in accuracy["references"]:
        yield "accuracy", f"{logits(each)}, {_agreement(each)}, to the {each['reference']}"
        if each["generated_tokens"]:
            yield "text", f"{parting(each)} {each['reference']} generates"
    if accuracy["perplexity"] is not None:
        yield "perplexity", _perplexity(accuracy)


def logits(reference: Json) -> str:
    """Return the signal-to-noise ratio of logits: `117.3 dB`, or `equal`."""
    level_db = reference["sqnr_db"]
    return "no dB" if level_db is None else "equal" if level_db >= EXACT_DB else decibels(level_db)


def _agreement(reference: Json) -> str:
    share = reference["top1_agreement"]
    agrees = "" if share is None else f"{sentences.top1(share)} of {reference['tokens']:,} tokens"
    divergence = reference["kl_divergence"]
    return agrees if divergence is None else f"{agrees}, KL {divergence:.2g} nats"


def parting(reference: Json) -> str:
    """Return how far generated text is the reference's: `differs at token 57 (12 instead of 90, gap 0.015) from what the`."""
    first = reference["first_difference"]
    if not first:
        return f"its {units.count(reference['generated_tokens'], 'token')} are those that the"
    instead = f"{first['token']:,} instead of {first['reference_token']:,}, whose logit leads by {first['gap']:.3g}"
    return f"its token {first['index']:,} is the first to differ ({instead}) from what the"


def _perplexity(accuracy: Json) -> str:
    others = [
        f"{each['perplexity']:,.4g} of the {each['reference']} ({each['perplexity_ratio']:.4f}x)"
        for each in accuracy["references"]
        if each["perplexity"] is not None and each["perplexity_ratio"] is not None
    ]
    of = f"{accuracy['perplexity']:,.4g} over {units.count(accuracy['perplexity_tokens'], 'token')}"
    return "; ".join([of, *others])


def flow(model: Json) -> str:
    """Return what feeds the decoder: `vision_encoder (256 positions), token_embedding > text_decoder`."""
    encoders = [f"{each['method']} ({units.count(each['positions'], 'position')})" for each in model["flow"]["encoders"]]
    decoders = dict.fromkeys((model["prefill_method"], model["decode_method"]))
    return f"{', '.join([*encoders, model['flow']['embedding_method']])} > {', '.join(decoders)}"


def _generated(generation: Json) -> str:
    runs = max((len(point["runs"]) for point in generation["points"]), default=0)
    repetitions = max((point["repetitions"] for point in generation["points"]), default=0)
    processes = f" in {units.count(runs, 'process')}" if runs > 1 else ""
    return f"{units.count(generation['generated_tokens'], 'token')}, greedy, {units.count(repetitions, 'repetition')}{processes}"
