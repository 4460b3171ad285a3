"""Checks of the results of generation against their plan, the server's clock and each other."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

from etfarm.v1 import agent_pb2, common_pb2, generation_pb2
from etfarm.wire import flows
from etfarm.wire.generation import SCORE_BYTES, TIME_BYTES, TOKEN_BYTES, logits_bytes
from etfarm.wire.language_models import MAX_VOCAB
from etfarm.wire.series import little_endian

MAX_TRACED: Final = 1_000
"""Maximum number of traced iterations of a method."""
_MAX_POINTS_OF_SERIES: Final = 120
_LEAST_NS: Final = 20
"""Minimum plausible time of a token: no processor executes a method faster, since reading its clock twice takes longer."""
_SLACK_NS: Final = 20_000
"""Time between the logits of a prompt and the selection of its first token that is still plausibly negative, for clock reads."""


class BadGenerationResult(ValueError):
    """A contradiction in the result of generation, as the rest of a sentence."""


def check_generations(
    result: agent_pb2.CandidateResult,
    plan: generation_pb2.GenerationPlan,
    *,
    repeat: int,
    longest_ns: float,
    path: Callable[[str], Path],
) -> None:
    """Check what the processes of a candidate report. Reads their times and tokens, so call it in a thread.

    Args:
        repeat: number of processes that the job requested.
        longest_ns: maximum plausible duration of everything in the result.
        path: returns the path of a stored artifact.

    Raises:
        BadGenerationResult: a number contradicts another, the plan or the server's clock.
    """
    if not 1 <= len(result.generations) <= repeat:
        raise BadGenerationResult(f"it has {len(result.generations):,} processes of generation, but {repeat:,} were requested")
    if result.HasField("samples") or result.HasField("outputs") or result.runs or result.blocks:
        raise BadGenerationResult("it has both generation and the samples of a timed pass")
    total_ns = 0
    for generated in result.generations:
        total_ns += _check_process(generated, plan, path)
    if total_ns > longest_ns:
        raise BadGenerationResult(
            f"its tokens took {total_ns / 1e9:.3g} s of an attempt that lasted {longest_ns / 1e9:.3g} s at most"
        )


def _check_process(
    generated: agent_pb2.GenerationResult, plan: generation_pb2.GenerationPlan, path: Callable[[str], Path]
) -> int:
    """Check the result of one process; return the time of all of its tokens in ns."""
    requested = [(point.prompt_tokens, point.depth) for point in plan.points]
    if [(point.prompt_tokens, point.depth) for point in generated.points] != requested:
        raise BadGenerationResult("its prompt lengths and depths are not those that were requested")
    for point in generated.points:
        least = 0 if point.HasField("error") else 1
        if not least <= point.repetitions <= plan.repetitions:
            raise BadGenerationResult(
                f"it has {point.repetitions:,} repetitions of a prompt of {point.prompt_tokens:,} tokens; {least} to "
                f"{plan.repetitions:,} are possible"
            )
        if len(point.prefill_ns) != point.repetitions or any(value < _LEAST_NS for value in point.prefill_ns):
            raise BadGenerationResult("the times of its prompts are not those of its repetitions")
    if not any(point.repetitions for point in generated.points):
        raise BadGenerationResult("it has no repetition, and no error of its own")
    telemetries = [generated.telemetry, generated.prefill.telemetry, generated.decode.telemetry]
    telemetries += (point.telemetry for point in generated.points)
    telemetries += (encoder.trace.telemetry for encoder in generated.encoders)
    if any(len(telemetry.series) > _MAX_POINTS_OF_SERIES for telemetry in telemetries):
        raise BadGenerationResult("it has too many points of telemetry")
    _check_traces(generated, plan)
    _check_score(generated, plan, path)
    rows = [repetition for point in generated.points for repetition in point.prefill_ns]
    columns = plan.generated_tokens
    times = _read(generated.token_ns, "q", TIME_BYTES * len(rows) * columns, "times", path)
    if min(times) < 0:
        raise BadGenerationResult("the time of a token is negative")
    for place, prefill_ns in enumerate(rows):
        if prefill_ns > times[place * columns] + _SLACK_NS:
            raise BadGenerationResult("a prompt took longer than the time to its first token")
    _check_parts(generated, plan, times)
    if 2 * sum(value < _LEAST_NS for value in times) > len(times):
        raise BadGenerationResult(f"more than half of its tokens take less than {_LEAST_NS} ns")
    tokens = _read(generated.tokens, "i", TOKEN_BYTES * len(rows) * columns, "tokens", path)
    # A program may have more logits than its metadata says, for example for the alignment of its last layer.
    if min(tokens) < 0 or max(tokens) >= MAX_VOCAB:
        raise BadGenerationResult(f"it has a token that is negative or not below {MAX_VOCAB:,}")
    return sum(times)


def _check_traces(generated: agent_pb2.GenerationResult, plan: generation_pb2.GenerationPlan) -> None:
    """Check the traced passes of a process, of which those that are absent have no iterations."""
    point = plan.points[plan.traced_point]
    chunk = min(point.prompt_tokens, plan.model.max_prompt_tokens)
    begin = point.depth + flows.encoded_positions(plan.model)
    traces = [
        ("prefill", generated.HasField("prefill"), generated.prefill, (chunk, begin)),
        ("decode", generated.HasField("decode"), generated.decode, (1, begin + point.prompt_tokens)),
    ]
    if generated.encoders and [each.method for each in generated.encoders] != [each.method for each in plan.model.flow.encoders]:
        raise BadGenerationResult("its traced encoders are not those of the program")
    position = point.depth
    for encoder, traced in zip(plan.model.flow.encoders, generated.encoders, strict=False):
        traces.append((encoder.method, True, traced.trace, (encoder.positions, position)))
        position += encoder.positions
    for name, is_traced, trace, requested in traces:
        if len(trace.traced_ns) > MAX_TRACED or any(value < 0 for value in trace.traced_ns):
            raise BadGenerationResult(f"it has more than {MAX_TRACED:,} traced iterations, or negative times of them")
        if is_traced and (trace.tokens, trace.position) != requested:
            raise BadGenerationResult(
                f"its trace of {name} is of {trace.tokens:,} tokens at position {trace.position:,} instead of "
                f"{requested[0]:,} at {requested[1]:,}"
            )


def _check_score(generated: agent_pb2.GenerationResult, plan: generation_pb2.GenerationPlan, path: Callable[[str], Path]) -> None:
    """Check the scores of tokens, which are absent, failed, or have values of the requested shape without NaN."""
    score, requested = generated.score, plan.score
    if not generated.HasField("score"):
        return
    if score.HasField("error"):
        if score.HasField("values") or score.tokens:
            raise BadGenerationResult("it has scores of tokens, and an error instead of them")
        return
    if not 1 <= score.tokens <= len(requested.tokens) or not 1 <= score.vocabulary <= MAX_VOCAB:
        raise BadGenerationResult(
            f"it has {score.vocabulary:,} logits for {score.tokens:,} scored tokens, of {len(requested.tokens):,}"
        )
    rows = sum(index < score.tokens for index in requested.logits_after)
    size_bytes = SCORE_BYTES * score.tokens + logits_bytes(rows, score.vocabulary)
    # The limit of agents: a program may have more logits than its metadata says.
    vocabulary = plan.model.vocab_size
    if size_bytes > SCORE_BYTES * len(requested.tokens) + 2 * logits_bytes(len(requested.logits_after), vocabulary):
        raise BadGenerationResult(
            f"it has {score.vocabulary:,} logits for a token, but the model's vocabulary has {vocabulary:,}"
        )
    values = _read(score.values, "f", size_bytes, "scores of tokens", path)
    best = array("i", values[score.tokens : 2 * score.tokens].tobytes())
    # A sum is NaN or infinite only if a value is: float32 cannot overflow its 64 bits. Minus infinity alone is possible.
    if math.isnan(total := sum(values[: score.tokens])) or total > 0 or max(values[: score.tokens]) > 0:
        raise BadGenerationResult("the probability of a token is above 1 or NaN")
    if min(best) < 0 or max(best) >= score.vocabulary:
        raise BadGenerationResult("its most likely token is not one that it has logits of")
    if math.isnan(total := sum(values[2 * score.tokens :])) or total == math.inf:
        raise BadGenerationResult("its logits have NaN or infinity")


def _check_parts(generated: agent_pb2.GenerationResult, plan: generation_pb2.GenerationPlan, times: array[int]) -> None:
    """Check the parts of a flow's methods: those of each repetition must fit into its own times.

    Args:
        times: for each repetition of all points, the times of its tokens in ns.
    """
    methods = flows.methods_of(plan.model) if plan.model.HasField("flow") else []
    columns, place = plan.generated_tokens, 0
    for point in generated.points:
        if [part.method for part in point.parts] != (methods if point.repetitions else []):
            raise BadGenerationResult("its parts are not those of the methods of the model's flow")
        for part in point.parts:
            if {len(part.prefill_ns), len(part.decode_ns)} != {point.repetitions} or min(*part.prefill_ns, *part.decode_ns) < 0:
                raise BadGenerationResult(f"the times of {part.method!r} are not those of its repetitions")
            if min(part.prefill_executions, part.decode_executions) < 0:
                raise BadGenerationResult(f"{part.method!r} has a negative number of executions")
        for repetition in range(point.repetitions):
            own = times[place * columns : (place + 1) * columns]
            prefill_ns = sum(part.prefill_ns[repetition] for part in point.parts)
            decode_ns = sum(part.decode_ns[repetition] for part in point.parts)
            if prefill_ns > own[0] + _SLACK_NS or decode_ns > sum(own[1:]) + _SLACK_NS:
                raise BadGenerationResult("the methods of its flow took longer than the tokens")
            place += 1


def _read(artifact: common_pb2.Artifact, kind: str, size_bytes: int, what: str, path: Callable[[str], Path]) -> array[int]:
    """Return the values of an artifact, whose size is checked before it is read."""
    file = path(artifact.digest)
    if file.stat().st_size != size_bytes:
        raise BadGenerationResult(f"its {what} have {file.stat().st_size:,} bytes instead of {size_bytes:,}")
    return little_endian(array(kind, file.read_bytes()))
