"""The run of one cell: the results of its stages so far, and the order of the stages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from etfarm.server.jobs import generation, model
from etfarm.server.reports.latency.between_runs import Earlier
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, generation_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import EtfarmError
from etfarm.wire.located_failures import locate
from etfarm.wire.samples import AccuracySamples


@dataclass
class CellRun:
    """A live cell with the results of its stages, from which its report is assembled."""

    job: Job
    cell: Cell
    compilation: compile_pb2.Compilation | None = None
    device: Device | None = None
    sent_ms: float = 0.0
    """Time at which the last attempt was sent, in milliseconds after the submission."""
    result: agent_pb2.CandidateResult | None = None
    analysis: report_pb2.Report | None = None
    numerics: compile_pb2.Compilation | None = None
    """The program of the numerics pass, which may be `compilation`; None if there is no such pass."""
    earlier: Earlier = field(default_factory=Earlier)
    """Medians of earlier reports, once the result is analyzed."""
    warnings: list[compile_pb2.Warning] = field(default_factory=list)
    """Warnings for the report, in addition to those of the compilation and of the analysis."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while a change of the cell is decided and written. The task of one cell leads all cells that share an
    attempt, so several tasks may change a cell."""

    async def lead(self, stages: Stages) -> None:
        """Lead the cell through its stages in order (compile, place and run, analyze) from the journaled state.

        Raises:
            EtfarmError: the reason why the cell failed; its end is not written yet.
        """
        try:
            if self.cell.state in (model.QUEUED, model.COMPILING):
                await stages.compile(self)
            else:
                await stages.recover(self)
            while self.cell.state in (model.WAITING, model.RUNNING):
                await stages.place_and_run(self)
        finally:
            stages.leave(self)
        if self.cell.state == model.ANALYZING:
            await stages.analyze(self)

    @property
    def is_over(self) -> bool:
        """Whether the cell is in a terminal state."""
        return self.cell.state in model.TERMINAL

    @property
    def candidate(self) -> job_pb2.Candidate:
        """The candidate that the cell was created from."""
        return model.candidate_of(self.job, self.cell)

    @property
    def facts(self) -> compile_pb2.MethodFacts:
        """The requirements of the cell's method, or of both methods of a language model, once it is compiled."""
        assert self.compilation is not None
        if (plan := self.generation) is not None:
            return generation.facts_of(plan, self.compilation.facts)
        return self.compilation.facts.methods[self.cell.method]

    @property
    def generation(self) -> generation_pb2.GenerationPlan | None:
        """What the agent measures of a compiled language model; None if the job does not request generation.

        Raises:
            BadJob, NotALanguageModel, CONTEXT_TOO_SHORT: as `generation.plan`, before the cell waits for a device.
        """
        measurement = self.job.spec.measurement
        if self.compilation is None or not measurement.HasField("generation"):
            return None
        return generation.plan(measurement, self.compilation.facts, self.cell.candidate_name, self.job.spec.inputs)

    def locate(self, error: EtfarmError, method: str = "", *, repeated: bool = False) -> EtfarmError:
        """Return an error that the device reports with the source line of the operator that failed, if that is known.

        Args:
            method: the method that failed; the cell's when empty.
            repeated: whether it failed in the passes that a measured program is executed in again and again.
        """
        operators = self.compilation.located_operators if self.compilation is not None else {}
        method = method or self.cell.method
        if method not in operators:
            return error
        return locate(error, operators[method], advances_state=repeated and self.is_measured and self.writes_state)

    @property
    def is_measured(self) -> bool:
        """Whether the job measures the program's executions, not what a language model generates."""
        return self.job.spec.HasField("measurement") and not self.job.spec.measurement.HasField("generation")

    @property
    def inputs(self) -> common_pb2.Artifact | None:
        """The inputs of the program: the job's, else the model's own; None if the runner generates them."""
        if self.compilation is None or self.job.spec.measurement.HasField("generation"):
            return None
        return self.job.spec.inputs.get(self.cell.method) or self.compilation.example_inputs.get(self.cell.method)

    @property
    def samples(self) -> list[common_pb2.Artifact]:
        """Further inputs for the accuracy of a measured program: the job's, else the model's own; none for generation.

        A ready program has none either, since there is no model to compare it with.
        """
        spec, method = self.job.spec, self.cell.method
        if self.inputs is None or not spec.HasField("measurement") or method not in self.candidate.model.methods:
            return []
        if method in spec.inputs:
            samples = list(spec.further_inputs[method].samples) if method in spec.further_inputs else []
        else:
            source = self.candidate.model.methods[method]
            samples = list(source.samples or source.calibration)
        taken = AccuracySamples()
        taken.take(self.inputs.digest, self.inputs.size_bytes)
        return [sample for sample in samples if taken.take(sample.digest, sample.size_bytes)]

    @property
    def writes_state(self) -> bool:
        """Whether the method may write to state, as one of a program that came ready may."""
        if self.compilation is None or self.cell.method not in self.candidate.model.methods:
            return True
        return self.cell.method in self.compilation.stateful_methods

    @property
    def calls(self) -> list[agent_pb2.RunCall]:
        """The calls that compare a measured program's state with the model's: its own, else each method once if they share state.

        None without example inputs, for which the compilation warns.
        """
        if self.compilation is None or not self.is_measured:
            return []
        model = self.candidate.model
        shares = bool(self.compilation.shared_buffers)
        examples = self.compilation.example_inputs
        calls = list(model.calls) or [job_pb2.ModelCall(method=method) for method in sorted(model.methods) if shares]
        if any(not call.HasField("inputs") and call.method not in examples for call in calls):
            return []
        return [
            agent_pb2.RunCall(method=call.method, inputs=call.inputs if call.HasField("inputs") else examples[call.method])
            for call in calls
        ]


class Stages(Protocol):
    """The stages of a cell's run. Each advances the cell's state, or raises the reason why the cell failed."""

    async def compile(self, run: CellRun) -> None:
        """Compile the cell, until it waits for a device; a cell without a device succeeds here."""

    async def recover(self, run: CellRun) -> None:
        """Load the compilation of a cell that an earlier server compiled."""

    async def place_and_run(self, run: CellRun) -> None:
        """Place the cell on a device and run it there once. After a device fault, the cell waits for a device again."""

    def leave(self, run: CellRun) -> None:
        """Release the cells that wait for this one before their next attempt."""

    async def analyze(self, run: CellRun) -> None:
        """Analyze the result and write the report of a cell that succeeded."""
