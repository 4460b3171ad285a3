"""An attempt whose candidates generate text: prompt and tokens are timed instead of executions of a method.

Its passes are GENERATE, prompt lengths and depths one after the other, and TRACED.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from etfarm.device_agents.attempts import repeats
from etfarm.device_agents.attempts.attempt import Attempt, Execution, Files, Run
from etfarm.device_agents.attempts.cache import Lease
from etfarm.device_agents.attempts.passes import PhaseListener, traced_iterations
from etfarm.device_agents.attempts.token_feed import TokenFeed
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.conditions.sampler import Watch
from etfarm.device_agents.conditions.telemetry import add_samples, run_telemetry
from etfarm.device_agents.device.inventory import choose_cpus
from etfarm.device_agents.errors import generation_unsupported
from etfarm.device_agents.runners.errors import InputMismatch, ProgramFailed
from etfarm.device_agents.runners.generation import Generated, GenerateRequest
from etfarm.device_agents.runners.protocol import MethodInfo, Progress, Runner, Traced
from etfarm.device_agents.runners.score import Scored, ScoreRequest
from etfarm.v1 import agent_pb2, generation_pb2, job_pb2
from etfarm.wire import flows, generation
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.status import to_proto
from etfarm.wire.tensors import Value

_COMMAND: Final = "generate"
_SCORE_COMMAND: Final = "score"
MAX_TRACED: Final = 1000
"""Maximum number of traced executions of a method."""


class GenerationAttempt(Attempt):
    """An attempt of candidates with a plan of generation."""

    def execution(self, candidate: agent_pb2.RunCandidate, transfers: Transfers, lease: Lease, folder: Path) -> Execution:
        """Return how a candidate is executed."""
        return GenerationExecution(self, candidate, transfers, lease, folder)


class GenerationExecution(Execution):
    """One candidate: FETCH, a fresh runner process with its passes for each run, UPLOAD; SCORE in another process, UPLOAD."""

    def __init__(
        self, attempt: Attempt, candidate: agent_pb2.RunCandidate, transfers: Transfers, lease: Lease, folder: Path
    ) -> None:
        super().__init__(attempt, candidate, transfers, lease, folder)
        self._processes: list[Measured] = []
        self._encoder_inputs: dict[str, list[Value]] = {}

    async def run(self) -> agent_pb2.CandidateResult:
        """Run the candidate and return its result, complete or partial, with its error.

        Tokens are scored when all times are uploaded: an error that ends the runner is then one of the scores only.
        """
        if await self.guarded(self._run):
            if self._candidate.generation.HasField("score"):
                await self._try_score()
            await self.numerics()
        return self.result

    async def fetch_inputs(self) -> None:
        """Get the inputs of encoders that have any.

        Raises:
            BadTensorFile: they are not a tensor file.
        """
        for encoder in self._candidate.generation.model.flow.encoders:
            if encoder.HasField("inputs"):
                self._encoder_inputs[encoder.method] = await self.fetch_values(encoder.inputs)

    async def _measure(self, measurement: job_pb2.Measurement, cpus: frozenset[int] | None) -> Files:
        validate_plan(self._candidate.generation)
        count = repeats.repeat_of(measurement)
        for number in range(1, count + 1):
            self.step = f"run {number} of {count}" if count > 1 else ""
            # How long a run works is not known before: each gets an equal part of the remaining time.
            run = Run(self.result if number == 1 else agent_pb2.CandidateResult(), count - number + 1, math.inf)
            await self._measure_run(run, measurement, cpus)
        self.step = ""
        return Files([])

    async def _run_passes(self, run: Run, measurement: job_pb2.Measurement, cpus: frozenset[int] | None) -> Files:
        target, plan, is_first = self._attempt.target, self._candidate.generation, run.result is self.result
        async with self.start_runner() as runner:
            if not is_first:
                # As for other runs: a program that hangs in LOAD must not count as waiting for the device.
                self.enter_phase("LOAD")
            commands = (await runner.hello()).commands
            # Runners that know flows are newer than those that score.
            required = _SCORE_COMMAND if plan.model.HasField("flow") else _COMMAND
            if required not in commands:
                raise generation_unsupported(runner.kind)
            await self.load_program(runner, cpus, into=None if is_first else run.result)
            passes = GenerationPasses(runner, plan, run.result, self, self._encoder_inputs)
            if is_first:
                with self.phase("LOAD_METHOD"):
                    run.result.load.load_method_ns = await passes.load()
            else:
                run.result.load.load_method_ns = await passes.load()
            run.result.memory.planned_bytes.extend(passes.planned_bytes)
            measured = await passes.measure(target.watch(cpus), self._attempt.remaining_s)
            self._processes.append(measured)
            target.gates.measured()
            if run.left == 1:
                await passes.trace(self.folder)
                await self._collect()
            return Files([])

    async def _try_score(self) -> None:
        """Run SCORE. Its error is reported for the scores only."""
        error = await self._failure_of(self._score)
        self.measured()
        if error is not None:
            part = self.result.generations[-1].score
            part.Clear()
            part.error.CopyFrom(to_proto(error))
            self.report(force=True)

    async def _score(self) -> None:
        """Run SCORE in a separate runner, and UPLOAD."""
        attempt, plan, part = self._attempt, self._candidate.generation, self.result.generations[-1].score
        cpus = choose_cpus(attempt.target.device, attempt.start.measurement.cores, attempt.target.restricted)
        async with self.start_runner() as runner:
            with self.phase("SCORE"):
                if _SCORE_COMMAND not in (await runner.hello()).commands:
                    raise error_for(
                        "SCORING_UNSUPPORTED",
                        f"The {runner.kind} runner cannot score tokens, which the accuracy of generation needs.",
                        "Build the runner's bundle again with `etfarm bundle build`, and add it with `bundle add`.",
                        runner=runner.kind,
                    )
                own = agent_pb2.CandidateResult()
                await self.load_program(runner, cpus, into=own)
                passes = GenerationPasses(runner, plan, own, self, self._encoder_inputs)
                await passes.load()
                scored = await passes.score(attempt.remaining_s())
        self._runner = None
        self.measured()
        with self.phase("UPLOAD"):
            values = await self._transfers.upload(scored.values)
        part.tokens, part.vocabulary, part.duration_ns = scored.tokens, scored.vocabulary, scored.duration_ns
        part.values.CopyFrom(values)

    async def upload(self, files: Files) -> None:
        """Run UPLOAD of the times, the tokens and the traces."""
        self._runner = None
        if not self._candidate.generation.HasField("score"):
            self.measured()
        with self.phase("UPLOAD"):
            for measured in self._processes:
                result = measured.result
                result.token_ns.CopyFrom(await self._transfers.upload(measured.token_ns.tobytes()))
                result.tokens.CopyFrom(await self._transfers.upload(measured.tokens.tobytes()))
                for message, phase in ((result.prefill, measured.prefill), (result.decode, measured.decode)):
                    if phase is not None:
                        message.CopyFrom(trace_of(phase))
                        message.etdump.CopyFrom(await self._transfers.upload(phase.traced.etdump))
                for method, phase in measured.encoders.items():
                    encoder = result.encoders.add(method=method, trace=trace_of(phase))
                    encoder.trace.etdump.CopyFrom(await self._transfers.upload(phase.traced.etdump))
                self.result.generations.append(result)


@dataclass
class Phase:
    """A method's traced executions."""

    traced: Traced
    tokens: int
    """Number of tokens of each execution."""
    position: int
    """Position of the first one."""


@dataclass
class Measured:
    """What one process measured, for its GenerationResult."""

    result: agent_pb2.GenerationResult
    token_ns: array[int] = field(default_factory=lambda: array("q"))
    """The rows of all repetitions of all points."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    prefill: Phase | None = None
    decode: Phase | None = None
    encoders: dict[str, Phase] = field(default_factory=dict)
    """By method; `tokens` is the number of positions."""


def validate_score(plan: generation_pb2.GenerationPlan) -> None:
    """Refuse to score beyond the limits; the tokens themselves are the runner's to check.

    Raises:
        InputMismatch: the message names the limit.
    """
    score = plan.score
    rows = list(score.logits_after)
    most = max(1, generation.MAX_LOGITS_BYTES // generation.logits_bytes(1, plan.model.vocab_size))
    limits = [
        ("tokens to score", len(score.tokens), 1, generation.MAX_TEXT),
        ("a window", score.window, 1, plan.model.max_context_tokens),
        ("rows of logits", len(rows), 0, min(most, generation.MAX_LOGITS_ROWS)),
    ]
    _require("SCORE", limits)
    if rows != sorted(set(rows)) or any(not 0 <= row < len(score.tokens) for row in rows):
        raise InputMismatch("SCORE", "rows of logits must be those of tokens, ascending")


def validate_plan(plan: generation_pb2.GenerationPlan) -> None:
    """Refuse a plan beyond the limits, or beyond the program's context.

    Raises:
        InputMismatch: the message names the limit.
    """
    limits = [
        ("points", len(plan.points), 1, generation.MAX_POINTS),
        ("generated tokens", plan.generated_tokens, 1, generation.MAX_TOKENS),
        ("repetitions", plan.repetitions, 1, generation.MAX_REPETITIONS),
        ("warm-up repetitions", plan.warmup, 0, generation.MAX_REPETITIONS),
        ("a context", plan.model.max_context_tokens, 1, generation.MAX_CONTEXT_TOKENS),
        ("a vocabulary", plan.model.vocab_size, 1, (1 << 31) - 1),
        ("tokens of one execution", plan.model.max_prompt_tokens, 1, generation.MAX_CONTEXT_TOKENS),
    ]
    _require("GENERATE", limits)
    encoded = flows.encoded_positions(plan.model)
    if encoded < 0 or encoded > plan.model.max_context_tokens:
        raise InputMismatch("GENERATE", f"encoders have {encoded} positions in a context of {plan.model.max_context_tokens}")
    for point in plan.points:
        length = point.depth + encoded + point.prompt_tokens + plan.generated_tokens
        if point.depth < 0 or point.prompt_tokens < 1 or length > plan.model.max_context_tokens:
            what = f"{point.prompt_tokens} tokens at depth {point.depth} with {plan.generated_tokens} generated ones"
            raise InputMismatch("GENERATE", f"{what} do not fit into the context of {plan.model.max_context_tokens}")


def _require(stage: str, limits: Sequence[tuple[str, int, int, int]]) -> None:
    for name, count, least, most in limits:
        if not least <= count <= most:
            raise InputMismatch(stage, f"{name} must be {least} to {most}, got {count}")


class GenerationPasses:
    """The passes of one process, whose runner has the program loaded; they fill the results.

    Args:
        runner: the runner.
        plan: a valid plan.
        result: gets load times, memory and telemetry.
        listener: receives phases and progress.
        inputs: those of encoders, by method; the runner generates the others.
    """

    def __init__(
        self,
        runner: Runner,
        plan: generation_pb2.GenerationPlan,
        result: agent_pb2.CandidateResult,
        listener: PhaseListener,
        inputs: Mapping[str, Sequence[Value]] = MappingProxyType({}),
    ) -> None:
        self._inputs = inputs
        self._runner = runner
        self._plan = plan
        self._model = plan.model
        self._result = result
        self._listener = listener
        self._measured = Measured(agent_pb2.GenerationResult())
        self._methods: dict[str, MethodInfo] = {}
        self._of_traced: Generated | None = None
        """The measurement of the point that is traced."""

    @property
    def _names(self) -> list[str]:
        return flows.methods_of(self._model)

    async def load(self, *, trace: bool = False) -> int:
        """Load the methods and return the time that it took in ns."""
        total_ns = 0
        for index, name in enumerate(self._names):
            total_ns += (await self._runner.load_method(name, trace=trace, keep=index > 0)).load_method_ns
            self._methods[name] = await self._runner.method(name)
        for encoder in self._model.flow.encoders:
            await self._runner.select(encoder.method)
            if (values := self._inputs.get(encoder.method)) is None:
                await self._runner.default_inputs(self._plan.seed)
            else:
                await self._runner.set_inputs(values)
        return total_ns

    @property
    def planned_bytes(self) -> list[int]:
        """Sizes of the planned buffers of the loaded methods, one method after the other."""
        return [size for name in self._names for size in self._methods[name].planned_bytes]

    async def measure(self, watch: AbstractAsyncContextManager[Watch], left_s: Callable[[], float]) -> Measured:
        """Run GENERATE over all points.

        Args:
            watch: observes the device meanwhile.
            left_s: returns the attempt's remaining time in seconds.

        Raises:
            EtfarmError: no point was completed; that of the first.
        """
        listener, plan, measured = self._listener, self._plan, self._measured
        began_s = time.monotonic()
        listener.enter_phase("GENERATE")
        failures: list[EtfarmError] = []
        per_point = plan.generated_tokens * (plan.warmup + plan.repetitions)
        async with watch as watching:
            begun = False
            for index, point in enumerate(plan.points):

                def on_progress(progress: Progress, done: int = index * per_point) -> None:
                    nonlocal begun
                    is_timed = progress.stage == "TIMED"
                    if is_timed and not begun:
                        begun = True
                        watching.begin()
                    warmed = plan.generated_tokens * plan.warmup if is_timed else 0
                    listener.report_steps(done + warmed + progress.done, per_point * len(plan.points))

                part = measured.result.points.add(prompt_tokens=point.prompt_tokens, depth=point.depth)
                try:
                    generated = await self._runner.generate(await self._request(point), max(1.0, left_s()), on_progress)
                except (InputMismatch, ProgramFailed) as error:
                    # The runner is still usable; an error that ends it ends the candidate.
                    failures.append(error)
                    part.error.CopyFrom(to_proto(error))
                    continue
                self._take(part, generated)
                if index == plan.traced_point:
                    self._of_traced = generated
            sampled = await watching.seen()
        listener.end_phase("GENERATE", began_s, time.monotonic())
        if len(failures) == len(plan.points):
            raise failures[0]
        telemetry = self._result.telemetry
        completed = [point for point in measured.result.points if point.repetitions]
        telemetry.MergeFrom(completed[0].telemetry)
        for completed_point in completed[1:]:
            repeats.add_counters(telemetry, completed_point.telemetry)
        if sampled is not None:
            add_samples(telemetry, sampled)
        measured.result.load.CopyFrom(self._result.load)
        measured.result.telemetry.CopyFrom(telemetry)
        measured.result.telemetry.ClearField("series")
        return measured

    async def score(self, left_s: float) -> Scored:
        """Execute the tokens of the plan's score, with the methods loaded without tracing.

        Args:
            left_s: the attempt's remaining time in seconds.

        Raises:
            InputMismatch: the plan is beyond the limits, or the methods do not take its tokens.
            EtfarmError: the program or the runner failed.
        """
        plan, score, listener = self._plan, self._plan.score, self._listener
        validate_score(plan)
        request = ScoreRequest(
            self._model.prefill_method,
            self._model.decode_method,
            list(score.tokens),
            score.window,
            list(score.logits_after),
            max(1, round(score.max_time_s * 1e9)),
            self._model.token_input,
            self._model.position_input,
            plan.reload,
        )
        total = len(score.tokens)
        return await self._runner.score(
            request,
            # A program may have more logits than its metadata says.
            2 * self._model.vocab_size,
            # The last token begins in time; if it does not end, other candidates of the attempt need theirs.
            max(1.0, min(left_s, score.max_time_s + generation.MAX_SCORE_S)),
            lambda progress: listener.report_steps(progress.done, total),
        )

    async def trace(self, folder: Path) -> None:
        """Run TRACED, if the plan requests it: executions of the prefill method, then of the decode method."""
        plan, generated = self._plan, self._of_traced
        if not plan.trace_iterations or generated is None:
            return
        point = plan.points[plan.traced_point]
        depth, shift = point.depth, flows.encoded_positions(self._model)
        end = depth + point.prompt_tokens
        context = await self._context(point)
        chunk = min(point.prompt_tokens, self._model.max_prompt_tokens)
        with self._listener.phase("TRACED"):
            await self.load(trace=True)
            feed = TokenFeed(self._runner, self._model, self._methods)
            await self._trace_encoders(generated, depth, folder)
            await feed.process(context, 0, depth)
            await feed.encode(depth)
            if chunk > 1:
                chunk_ns = [each * chunk // point.prompt_tokens for each in generated.prefill_ns]
                await feed.set(self._model.prefill_method, context[depth : depth + chunk], depth + shift)
                self._measured.prefill = Phase(await self._trace(chunk_ns, folder / "prefill.etdp"), chunk, depth + shift)
            await feed.process(context, depth + chunk if chunk > 1 else depth, end, shift)
            token_ns = [each for row in generated.token_ns for each in row[1:]]
            await feed.set(self._model.decode_method, generated.tokens[0][:1], end + shift)
            traced = await self._trace(token_ns or generated.prefill_ns, folder / "decode.etdp")
            self._measured.decode = Phase(traced, 1, end + shift)

    async def _trace_encoders(self, generated: Generated, position: int, folder: Path) -> None:
        """Trace each encoder on its inputs, before there is a context that shared memory might lose."""
        parts = {part.method: part for part in generated.parts}
        for number, encoder in enumerate(self._model.flow.encoders):
            await self._runner.select(encoder.method)
            traced = await self._trace(parts[encoder.method].prefill_ns, folder / f"encoder-{number}.etdp")
            self._measured.encoders[encoder.method] = Phase(traced, encoder.positions, position)
            position += encoder.positions

    async def _request(self, point: generation_pb2.GenerationPoint) -> GenerateRequest:
        plan, model = self._plan, self._model
        return GenerateRequest(
            model.prefill_method,
            model.decode_method,
            await self._context(point),
            point.depth,
            plan.generated_tokens,
            plan.repetitions,
            plan.warmup,
            max(1, round(plan.max_time_s * 1e9)),
            model.token_input,
            model.position_input,
            model.max_prompt_tokens,
            plan.reload,
            model.flow.embedding_method,
            [encoder.method for encoder in model.flow.encoders],
        )

    async def _context(self, point: generation_pb2.GenerationPoint) -> array[int]:
        """Return the tokens of the context and the prompt; a million of them takes a second, and a heartbeat must not wait."""
        count = point.depth + point.prompt_tokens
        return await asyncio.to_thread(generation.draw_tokens, self._plan.seed, self._model.vocab_size, count)

    def _take(self, part: agent_pb2.GenerationPointResult, generated: Generated) -> None:
        result, measured = self._result, self._measured
        part.repetitions = generated.repetitions
        part.prefill_ns.extend(generated.prefill_ns)
        part.telemetry.CopyFrom(run_telemetry(generated))
        for each in generated.parts:
            part.parts.add(**vars(each))
        for row, tokens in zip(generated.token_ns, generated.tokens, strict=True):
            measured.token_ns += row
            measured.tokens += tokens
        result.warmup += self._plan.warmup
        result.warmup_ns += generated.warmup_ns
        result.duration_ns += generated.duration_ns
        if generated.first_run_ns is not None and not result.load.HasField("first_run_ns"):
            result.load.first_run_ns = generated.first_run_ns
        if generated.peak_rss_bytes is not None:
            result.memory.peak_rss_bytes = max(result.memory.peak_rss_bytes, generated.peak_rss_bytes)

    async def _trace(self, samples_ns: Sequence[int], etdump: Path) -> Traced:
        iterations = min(MAX_TRACED, traced_iterations(samples_ns, self._plan.trace_iterations))
        # Executions that filled the context are not recorded.
        return await self._runner.trace(
            iterations, etdump, warmup=1, on_progress=lambda progress: self._listener.report_steps(progress.done, iterations)
        )


def trace_of(phase: Phase) -> agent_pb2.GenerationTrace:
    """Return a phase as the result has it, without its file."""
    message = agent_pb2.GenerationTrace(traced_ns=phase.traced.samples_ns, tokens=phase.tokens, position=phase.position)
    if phase.traced.wall_ns is not None:
        message.telemetry.CopyFrom(run_telemetry(phase.traced))
    return message
