"""Checks of results against the server's clock, the plan and each other. An implausible result is a device fault.

An agent with a valid token can still invent consistent numbers. An honest agent always passes these checks.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import Message

from etfarm.v1 import agent_pb2, common_pb2, generation_pb2, job_pb2, report_pb2
from etfarm.wire import digest as digests
from etfarm.wire import flows
from etfarm.wire.errors import DeviceError
from etfarm.wire.generation import SCORE_BYTES, TIME_BYTES, TOKEN_BYTES, logits_bytes
from etfarm.wire.language_models import MAX_VOCAB
from etfarm.wire.series import little_endian
from etfarm.wire.words import word_of

MAX_SAMPLES: Final = 1_000_000
"""Maximum number of timed iterations of all runs together, unless the job sets one for each."""
LEAST_MEDIAN_NS: Final = 20
"""Minimum plausible median in ns: no processor executes a method faster, since reading its clock twice takes longer."""
CLOCK_TOLERANCE: Final = 0.05
"""Fraction by which a device's clock may run faster than the server's: that of an emulated board is off by some percent."""
CLOCK_SLACK_S: Final = 5.0
"""Tolerance added to the server's time: the agent's phases are rounded, and begin before the message has arrived."""
_SAMPLE_BYTES: Final = 8
MAX_SERIES: Final = {"traced iterations": 1_000, "blocks": 1_000, "points of telemetry": 120}
"""Maximum lengths of the lists in a result. What grows with the number of timed iterations is an artifact."""
MAX_RESULT_BYTES: Final = 8 << 20
"""Maximum size of a candidate's result, without the files that it names: a report has all of it."""
_PIECE_BYTES: Final = _SAMPLE_BYTES << 14
_GAP_NS: Final = 20_000
"""Maximum time between two timed iterations, for reading clocks and passing inputs; the slowest clock source takes some
microseconds."""
_PYTHON_GAP_NS: Final = 2_000_000
"""Maximum time between two timed iterations for the runner in Python."""
_COPY_NS_PER_BYTE: Final = 10
"""Maximum time for copying inputs into planned memory between two iterations: 100 MB/s, slower than any board's memory."""
_STALL: Final = 4.0
"""Maximum ratio of time between iterations to time within them, for a machine that may stop the runner at any point."""
_STALL_NS: Final = 1_000_000_000
MAX_TRACED: Final = 1_000
"""Maximum number of traced iterations of a method."""
_MAX_POINTS_OF_SERIES: Final = 120
_LEAST_NS: Final = 20
"""Minimum plausible time of a token: no processor executes a method faster, since reading its clock twice takes longer."""
_SLACK_NS: Final = 20_000
"""Time between the logits of a prompt and the selection of its first token that is still plausibly negative, for clock reads."""


class ImplausibleResult(DeviceError):
    """A result that contradicts the server's clock, the plan or itself."""

    reason = "RESULT_IMPLAUSIBLE"

    def __init__(self, what: str, **metadata: object) -> None:
        super().__init__(
            f"The agent's result is not plausible: {what}.",
            "Check the device's clock and its agent's version.",
            stage="",
            **metadata,
        )


@dataclass(frozen=True)
class Plan:
    """The server's request to an attempt, and the time until the result."""

    cells: frozenset[str]
    """The ids of the attempt's cells."""
    elapsed_s: float
    """Seconds from sending the attempt to the arrival of its result, by the server's clock."""
    measurement: job_pb2.Measurement | None = None
    """The requested measurement; None for a run without one."""
    planned_bytes: int = 0
    """Largest planned memory of the programs: an upper bound of the copied inputs."""
    generation: Mapping[str, generation_pb2.GenerationPlan] = dataclasses.field(default_factory=dict)
    """The plans of cells that generate text, by cell id."""

    @property
    def longest_ns(self) -> float:
        """Maximum plausible duration of anything in the result, in ns."""
        return (self.elapsed_s * (1 + CLOCK_TOLERANCE) + CLOCK_SLACK_S) * 1e9


def check_attempt(result: agent_pb2.RunResult, plan: Plan) -> None:
    """Check the candidates of an attempt together.

    Raises:
        ImplausibleResult: a cell does not belong to the attempt or appears twice, or the candidates took longer than the attempt.
    """
    ids = [candidate.cell_id for candidate in result.candidates]
    if unknown := sorted(set(ids) - plan.cells):
        raise ImplausibleResult(f"it names the cell {unknown[0][:80]!r}, which is not part of the attempt")
    if len(set(ids)) != len(ids):
        raise ImplausibleResult("it names a cell twice")
    total_ns = sum(candidate.duration_ns + candidate.warmup_ns for candidate in result.candidates)
    if total_ns > plan.longest_ns:
        raise _too_long("the candidates' passes", total_ns, plan)


def check_processes(result: agent_pb2.CandidateResult, plan: Plan) -> None:
    """Check the size, and the number of processes, each of which names artifacts. Cheap, so call it before these are looked up.

    Raises:
        ImplausibleResult: there are more than the job requested, or the result is larger than any.
    """
    if (size_bytes := result.ByteSize()) > MAX_RESULT_BYTES:
        raise ImplausibleResult(f"it has {size_bytes:,} bytes, more than {MAX_RESULT_BYTES:,}")
    if len(result.generations) > max(1, plan.measurement.repeat if plan.measurement is not None else 1):
        raise ImplausibleResult(f"it has {len(result.generations):,} processes of generation, more than were requested")


def check_candidate(result: agent_pb2.CandidateResult, plan: Plan, path: Callable[[str], Path]) -> None:
    """Check one candidate's result. Reads its samples, so call it in a thread.

    Args:
        path: returns the path of a stored artifact.

    Raises:
        ImplausibleResult: a number contradicts another, the plan or the server's clock.
    """
    for name, value in _numbers(result):
        if not 0 <= value < math.inf:
            raise ImplausibleResult(f"{name} is {value:g}", field=name)
    for name, value in _durations_ns(result):
        if value > plan.longest_ns:
            raise _too_long(name, value, plan)
    passes = (result.telemetry, result.traced_telemetry, *(run.telemetry for run in result.runs))
    points = max(len(telemetry.series) for telemetry in passes)
    counts = (len(result.traced_ns), len(result.blocks), points)
    for what, count in zip(MAX_SERIES, counts, strict=True):
        if count > MAX_SERIES[what]:
            raise ImplausibleResult(f"it has {count:,} {what}, more than {MAX_SERIES[what]:,}")
    check_processes(result, plan)
    for artifact in artifacts_of(result):
        if not digests.is_digest(artifact.digest):
            raise ImplausibleResult(f"{artifact.digest[:80]!r} is not a digest")
    if result.HasField("error"):
        return
    if plan.measurement is None:
        if result.HasField("samples"):
            raise ImplausibleResult("it has samples of a measurement that the job did not request")
        return
    generated = plan.generation.get(result.cell_id)
    if generated is not None:
        repeat = max(1, plan.measurement.repeat)
        _check_generations(result, generated, repeat=repeat, longest_ns=plan.longest_ns, path=path)
        return
    if result.generations:
        raise ImplausibleResult("it has generation, which the job did not request")
    _check_counts(result, plan.measurement)
    _check_samples(result, plan, path(result.samples.digest))


def artifacts_of(result: agent_pb2.CandidateResult) -> Iterator[common_pb2.Artifact]:
    """Yield the artifacts that a candidate's result names."""
    holders: list[Message] = [result, result.numerics, result.further, result.calls]
    for generated in result.generations:
        traces = (encoder.trace for encoder in generated.encoders)
        holders += (generated, generated.prefill, generated.decode, generated.score, *traces)
    for holder in holders:
        for field, value in holder.ListFields():
            if field.message_type is not None and field.message_type.full_name == common_pb2.Artifact.DESCRIPTOR.full_name:
                yield value


def _numbers(result: agent_pb2.CandidateResult) -> Iterator[tuple[str, float]]:
    """Yield the counts and durations, which must be finite and not negative."""
    for message in (result, result.load, result.memory, result.further, result.calls, *result.runs, *_further_loads(result)):
        for field, value in message.ListFields():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield field.name, value
    for phase in result.phases:
        yield f"the start of {phase.phase[:40]}", phase.start_ms
        yield f"the duration of {phase.phase[:40]}", phase.duration_ms
    if result.traced_ns:
        yield "traced_ns", min(result.traced_ns)


def _further_loads(result: agent_pb2.CandidateResult) -> Iterator[report_pb2.Load]:
    """Yield the load times of each process of several."""
    yield from (run.load for run in result.runs)
    yield from (generated.load for generated in result.generations)


def _durations_ns(result: agent_pb2.CandidateResult) -> Iterator[tuple[str, float]]:
    """Yield the durations on the device in ns, none of which can exceed that of the attempt."""
    yield "the timed pass", result.duration_ns
    yield "the warm-up", result.warmup_ns
    for run in result.runs:
        yield "the timed pass", run.duration_ns
        yield "the warm-up", run.warmup_ns
    yield "the traced pass", sum(result.traced_ns)
    for each in result.generations:
        traces = [each.prefill, each.decode, *(encoder.trace for encoder in each.encoders)]
        yield "the traced pass", sum(sum(trace.traced_ns) for trace in traces)
    for load in (result.load, *_further_loads(result)):
        for field, value in load.ListFields():
            yield field.name, value
    for phase in result.phases:
        yield f"the phase {phase.phase[:40]}", (phase.start_ms + phase.duration_ms) * 1e6


def _check_counts(result: agent_pb2.CandidateResult, measurement: job_pb2.Measurement) -> None:
    """Check the timed passes against the plan."""
    # An agent of an earlier release measures once and reports no runs.
    if result.runs and len(result.runs) != measurement.repeat:
        raise ImplausibleResult(f"it has {len(result.runs):,} runs, but {measurement.repeat:,} were requested")
    if result.runs and result.blocks:
        raise ImplausibleResult("it has both runs and blocks")
    for name in ("iterations", "duration_ns", "warmup", "warmup_ns") if result.runs else ():
        if sum(getattr(run, name) for run in result.runs) != getattr(result, name):
            raise ImplausibleResult(f"the {name} of its runs do not add up to {getattr(result, name):,}")
    max_samples = measurement.max_samples if measurement.HasField("max_samples") else MAX_SAMPLES // max(1, len(result.runs))
    for part in result.runs or [result]:
        _check_pass(part, measurement, max_samples)
    if result.samples.size_bytes != _SAMPLE_BYTES * result.iterations:
        raise ImplausibleResult(f"{result.iterations:,} iterations have {result.samples.size_bytes:,} bytes of samples")
    if result.blocks and sum(block.samples for block in result.blocks) != result.iterations:
        raise ImplausibleResult("the samples of its blocks are not those of its iterations")
    if result.blocks and not measurement.interleave:
        raise ImplausibleResult("it has blocks of an interleaved attempt, which the job did not request")
    if any(min(block.round, block.process_pair, block.place, block.samples) < 0 for block in result.blocks):
        raise ImplausibleResult("a number of a block is negative")


def _check_pass(
    result: agent_pb2.CandidateResult | agent_pb2.MeasuredRun, measurement: job_pb2.Measurement, max_samples: int
) -> None:
    """Check one timed pass against the plan."""
    if word_of(common_pb2.StopReason.DESCRIPTOR, result.stop_reason) is None:
        raise ImplausibleResult(f"its timed pass ended for the reason {result.stop_reason}, which does not exist")
    if not 1 <= result.iterations <= max_samples:
        raise ImplausibleResult(f"{result.iterations:,} timed iterations were measured; 1 to {max_samples:,} are possible")
    if result.stop_reason == common_pb2.STOP_REASON_ENOUGH:
        requested = measurement.iterations if measurement.HasField("iterations") else 1
        if result.iterations < requested:
            raise ImplausibleResult(f"{result.iterations:,} iterations were reported as enough, but {requested:,} were requested")
        min_time_s = measurement.min_time_s if measurement.HasField("min_time_s") else 0.0
        if result.duration_ns < min_time_s * 1e9 * (1 - CLOCK_TOLERANCE):
            raise ImplausibleResult(
                f"{result.duration_ns / 1e9:.3g} s were reported as enough, but {min_time_s:g} s were requested"
            )


def _check_samples(result: agent_pb2.CandidateResult, plan: Plan, path: Path) -> None:
    """Check the samples against the duration of the timed pass."""
    # Check the size before reading, since the size in the result is only the agent's claim.
    if (size_bytes := path.stat().st_size) != _SAMPLE_BYTES * result.iterations:
        raise ImplausibleResult(f"{result.iterations:,} iterations have {size_bytes:,} bytes of samples")
    total_ns = below_least = 0
    # In pieces, since each call that goes over all samples blocks the event loop's thread.
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            samples = little_endian(array("q", data))
            if (smallest := min(samples)) < 0:
                raise ImplausibleResult("a sample is negative")
            total_ns += sum(samples)
            if smallest < LEAST_MEDIAN_NS:
                below_least += sum(sample < LEAST_MEDIAN_NS for sample in samples)
    if total_ns > result.duration_ns * (1 + CLOCK_TOLERANCE) + _GAP_NS:
        raise ImplausibleResult(f"its samples take {total_ns / 1e9:.3g} s of a pass of {result.duration_ns / 1e9:.3g} s")
    max_gap_ns = _PYTHON_GAP_NS if result.runner.kind == common_pb2.RUNNER_KIND_PYTHON else _GAP_NS
    stall_ns = _STALL_NS * max(1, len(result.runs))
    max_between_ns = result.iterations * (max_gap_ns + _COPY_NS_PER_BYTE * plan.planned_bytes) + _STALL * total_ns + stall_ns
    if result.duration_ns - total_ns > max_between_ns:
        raise ImplausibleResult(f"its samples take only {total_ns / 1e9:.3g} s of a pass of {result.duration_ns / 1e9:.3g} s")
    if 2 * below_least > result.iterations:
        raise ImplausibleResult(f"more than half of its iterations take less than {LEAST_MEDIAN_NS} ns")


def _too_long(what: str, value_ns: float, plan: Plan) -> ImplausibleResult:
    return ImplausibleResult(
        f"{what} took {value_ns / 1e9:.3g} s of an attempt that lasted {plan.elapsed_s:.3g} s",
        measured_s=f"{value_ns / 1e9:.6g}",
        elapsed_s=f"{plan.elapsed_s:.6g}",
    )


def _check_generations(
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
        ImplausibleResult: a number contradicts another, the plan or the server's clock.
    """
    if not 1 <= len(result.generations) <= repeat:
        raise ImplausibleResult(f"it has {len(result.generations):,} processes of generation, but {repeat:,} were requested")
    if result.HasField("samples") or result.HasField("outputs") or result.runs or result.blocks:
        raise ImplausibleResult("it has both generation and the samples of a timed pass")
    total_ns = 0
    for generated in result.generations:
        total_ns += _check_process(generated, plan, path)
    if total_ns > longest_ns:
        raise ImplausibleResult(
            f"its tokens took {total_ns / 1e9:.3g} s of an attempt that lasted {longest_ns / 1e9:.3g} s at most"
        )


def _check_process(
    generated: agent_pb2.GenerationResult, plan: generation_pb2.GenerationPlan, path: Callable[[str], Path]
) -> int:
    """Check the result of one process; return the time of all of its tokens in ns."""
    requested = [(point.prompt_tokens, point.depth) for point in plan.points]
    if [(point.prompt_tokens, point.depth) for point in generated.points] != requested:
        raise ImplausibleResult("its prompt lengths and depths are not those that were requested")
    for point in generated.points:
        least = 0 if point.HasField("error") else 1
        if not least <= point.repetitions <= plan.repetitions:
            raise ImplausibleResult(
                f"it has {point.repetitions:,} repetitions of a prompt of {point.prompt_tokens:,} tokens; {least} to "
                f"{plan.repetitions:,} are possible"
            )
        if len(point.prefill_ns) != point.repetitions or any(value < _LEAST_NS for value in point.prefill_ns):
            raise ImplausibleResult("the times of its prompts are not those of its repetitions")
    if not any(point.repetitions for point in generated.points):
        raise ImplausibleResult("it has no repetition, and no error of its own")
    telemetries = [generated.telemetry, generated.prefill.telemetry, generated.decode.telemetry]
    telemetries += (point.telemetry for point in generated.points)
    telemetries += (encoder.trace.telemetry for encoder in generated.encoders)
    if any(len(telemetry.series) > _MAX_POINTS_OF_SERIES for telemetry in telemetries):
        raise ImplausibleResult("it has too many points of telemetry")
    _check_traces(generated, plan)
    _check_score(generated, plan, path)
    rows = [repetition for point in generated.points for repetition in point.prefill_ns]
    columns = plan.generated_tokens
    times = _read(generated.token_ns, "q", TIME_BYTES * len(rows) * columns, "times", path)
    if min(times) < 0:
        raise ImplausibleResult("the time of a token is negative")
    for place, prefill_ns in enumerate(rows):
        if prefill_ns > times[place * columns] + _SLACK_NS:
            raise ImplausibleResult("a prompt took longer than the time to its first token")
    _check_parts(generated, plan, times)
    if 2 * sum(value < _LEAST_NS for value in times) > len(times):
        raise ImplausibleResult(f"more than half of its tokens take less than {_LEAST_NS} ns")
    tokens = _read(generated.tokens, "i", TOKEN_BYTES * len(rows) * columns, "tokens", path)
    # A program may have more logits than its metadata says, for example for the alignment of its last layer.
    if min(tokens) < 0 or max(tokens) >= MAX_VOCAB:
        raise ImplausibleResult(f"it has a token that is negative or not below {MAX_VOCAB:,}")
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
        raise ImplausibleResult("its traced encoders are not those of the program")
    position = point.depth
    for encoder, traced in zip(plan.model.flow.encoders, generated.encoders, strict=False):
        traces.append((encoder.method, True, traced.trace, (encoder.positions, position)))
        position += encoder.positions
    for name, is_traced, trace, requested in traces:
        if len(trace.traced_ns) > MAX_TRACED or any(value < 0 for value in trace.traced_ns):
            raise ImplausibleResult(f"it has more than {MAX_TRACED:,} traced iterations, or negative times of them")
        if is_traced and (trace.tokens, trace.position) != requested:
            raise ImplausibleResult(
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
            raise ImplausibleResult("it has scores of tokens, and an error instead of them")
        return
    if not 1 <= score.tokens <= len(requested.tokens) or not 1 <= score.vocabulary <= MAX_VOCAB:
        raise ImplausibleResult(
            f"it has {score.vocabulary:,} logits for {score.tokens:,} scored tokens, of {len(requested.tokens):,}"
        )
    rows = sum(index < score.tokens for index in requested.logits_after)
    size_bytes = SCORE_BYTES * score.tokens + logits_bytes(rows, score.vocabulary)
    # The limit of agents: a program may have more logits than its metadata says.
    vocabulary = plan.model.vocab_size
    if size_bytes > SCORE_BYTES * len(requested.tokens) + 2 * logits_bytes(len(requested.logits_after), vocabulary):
        raise ImplausibleResult(f"it has {score.vocabulary:,} logits for a token, but the model's vocabulary has {vocabulary:,}")
    values = _read(score.values, "f", size_bytes, "scores of tokens", path)
    best = array("i", values[score.tokens : 2 * score.tokens].tobytes())
    # A sum is NaN or infinite only if a value is: float32 cannot overflow its 64 bits. Minus infinity alone is possible.
    if math.isnan(total := sum(values[: score.tokens])) or total > 0 or max(values[: score.tokens]) > 0:
        raise ImplausibleResult("the probability of a token is above 1 or NaN")
    if min(best) < 0 or max(best) >= score.vocabulary:
        raise ImplausibleResult("its most likely token is not one that it has logits of")
    if math.isnan(total := sum(values[2 * score.tokens :])) or total == math.inf:
        raise ImplausibleResult("its logits have NaN or infinity")


def _check_parts(generated: agent_pb2.GenerationResult, plan: generation_pb2.GenerationPlan, times: array[int]) -> None:
    """Check the parts of a flow's methods: those of each repetition must fit into its own times.

    Args:
        times: for each repetition of all points, the times of its tokens in ns.
    """
    methods = flows.methods_of(plan.model) if plan.model.HasField("flow") else []
    columns, place = plan.generated_tokens, 0
    for point in generated.points:
        if [part.method for part in point.parts] != (methods if point.repetitions else []):
            raise ImplausibleResult("its parts are not those of the methods of the model's flow")
        for part in point.parts:
            if {len(part.prefill_ns), len(part.decode_ns)} != {point.repetitions} or min(*part.prefill_ns, *part.decode_ns) < 0:
                raise ImplausibleResult(f"the times of {part.method!r} are not those of its repetitions")
            if min(part.prefill_executions, part.decode_executions) < 0:
                raise ImplausibleResult(f"{part.method!r} has a negative number of executions")
        for repetition in range(point.repetitions):
            own = times[place * columns : (place + 1) * columns]
            prefill_ns = sum(part.prefill_ns[repetition] for part in point.parts)
            decode_ns = sum(part.decode_ns[repetition] for part in point.parts)
            if prefill_ns > own[0] + _SLACK_NS or decode_ns > sum(own[1:]) + _SLACK_NS:
                raise ImplausibleResult("the methods of its flow took longer than the tokens")
            place += 1


def _read(artifact: common_pb2.Artifact, kind: str, size_bytes: int, what: str, path: Callable[[str], Path]) -> array[int]:
    """Return the values of an artifact, whose size is checked before it is read."""
    file = path(artifact.digest)
    if file.stat().st_size != size_bytes:
        raise ImplausibleResult(f"its {what} have {file.stat().st_size:,} bytes instead of {size_bytes:,}")
    return little_endian(array(kind, file.read_bytes()))
