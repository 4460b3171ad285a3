"""An attempt whose candidates generate text: prompt and tokens are timed instead of executions of a method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from etfarm.device_agents.attempts import repeats
from etfarm.device_agents.attempts.attempt import Attempt, Execution, Files, Run
from etfarm.device_agents.attempts.cache import Lease
from etfarm.device_agents.attempts.generation_passes import GenerationPasses, Measured, trace_of, validate_plan
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.device.inventory import choose_cpus
from etfarm.device_agents.errors import generation_unsupported
from etfarm.v1 import agent_pb2, job_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.status import to_proto
from etfarm.wire.tensors import Value

_COMMAND: Final = "generate"
_SCORE_COMMAND: Final = "score"


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
