"""Requests for the analysis of an attempt, with the stored files that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.store import Store
from etfarm.server.reports.analysis_parts import files_of
from etfarm.server.reports.findings import Findings
from etfarm.server.reports.latency.samples import Block, GeneratingProcess, Generation
from etfarm.server.reports.request import (
    LOW_ACCURACY,
    AnalyzeRequest,
    CalledMethod,
    Calls,
    Further,
    Numerics,
    Scores,
    TokenInputs,
    Trace,
)
from etfarm.server.workers.child_pool import OnTurn
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, generation_pb2, job_pb2, report_pb2
from etfarm.wire.flows import encoded_positions
from etfarm.wire.sqnr import FAR_FROM_QUANTIZED_GRAPH, PART_LOST

_KNOWN_DIFFERENCES: Final = frozenset({LOW_ACCURACY, "OUTPUTS_DIFFER", PART_LOST, FAR_FROM_QUANTIZED_GRAPH})
"""Codes of the compilation's warnings that name wrong outputs."""


@dataclass(frozen=True)
class Base:
    """The result of another cell of the same interleaved attempt, used as the base of a comparison."""

    cell_id: str
    result: agent_pb2.CandidateResult


class Analyst:
    """The server's side of the analysis of attempts."""

    def __init__(self, findings: Findings, store: Store) -> None:
        self._findings = findings
        self._store = store

    async def analyze(
        self,
        candidate: job_pb2.Candidate,
        compilation: compile_pb2.Compilation,
        method: str,
        inputs: common_pb2.Artifact | None,
        result: agent_pb2.CandidateResult,
        on_log: Callable[[str], None],
        on_turn: OnTurn = lambda has_turn: None,
        *,
        base: Base | None = None,
        samples: Sequence[common_pb2.Artifact] = (),
        calls: Sequence[agent_pb2.RunCall] = (),
        numerics: compile_pb2.Compilation | None = None,
        generation: generation_pb2.GenerationPlan | None = None,
        fresh: bool = False,
        project: str = "",
        owner: str = "",
    ) -> report_pb2.Report:
        """Return the analysis of an attempt's artifacts.

        It has latency, accuracy, profile and operators, with a `base` the comparison, and with `numerics` the numeric gap. A
        part that fails adds a warning to `compile.warnings`.

        Args:
            samples, calls: the further inputs and the calls that were sent with the attempt.
            numerics: the compilation that the result's numerics pass ran, which may be `compilation`.
            generation: the plan of the generation that the result has; `method` is then that of decode.
            on_turn, fresh, project, owner: as in `Findings.of`, whose errors are also raised.
        """
        path = self._store.place
        sent = candidate.model.methods.get(method)
        source = None if sent is None else _original_of(sent)
        # A constant method was never exported, so it has no graph with operators and no reference.
        has_graph = source is not None or candidate.WhichOneof("source") == "program"
        request = AnalyzeRequest(
            pte=path(compilation.program.pte.digest),
            etdump=path(result.etdump.digest) if result.HasField("etdump") else None,
            etrecord=path(compilation.etrecord.digest) if has_graph and compilation.HasField("etrecord") else None,
            model=path(source.digest) if source is not None else None,
            inputs=path(inputs.digest) if inputs is not None else None,
            outputs=path(result.outputs.digest) if result.HasField("outputs") else None,
            samples=path(result.samples.digest) if result.HasField("samples") else None,
            method=method,
            output_names=_output_names(compilation, method),
            backends=tuple(compilation.facts.methods[method].backends) if method in compilation.facts.methods else (),
            traced_ns=tuple(result.traced_ns),
            runs=tuple(run.iterations for run in result.runs),
            blocks=_blocks(result),
            base_samples=path(base.result.samples.digest) if base is not None else None,
            base_blocks=_blocks(base.result) if base is not None else (),
            quantized=self._quantized(candidate, compilation, method),
            is_quantized=self._quantized(candidate, compilation, method) is not None,
            known_problems=_known_problems(compilation, method),
            further=self._further(samples, result.further),
            calls=self._calls(candidate, compilation, calls, result.calls),
            numerics=self._numerics(candidate, compilation, numerics, method, result.numerics),
        )
        if generation is not None:
            request = self._with_generation(request, generation, result)
            if result.generations[-1].score.HasField("values"):
                request = replace(request, scores=self._scores(candidate, compilation, generation, result.generations[-1]))
        # The analysis leaves out parts whose files are no longer stored.
        await self._store.bring(path.name for path in files_of(request))
        report = await self._findings.of(request, on_log, on_turn, fresh=fresh, project=project, owner=owner)
        if base is not None and report.HasField("interleaved"):
            report.interleaved.base_cell = base.cell_id
        return report

    def _with_generation(
        self, request: AnalyzeRequest, plan: generation_pb2.GenerationPlan, result: agent_pb2.CandidateResult
    ) -> AnalyzeRequest:
        """Return the request with the files of all processes, and the traces of the last one."""
        path, last = self._store.place, result.generations[-1]

        def trace(of: agent_pb2.GenerationTrace, method: str) -> Trace | None:
            etdump = path(of.etdump.digest) if of.HasField("etdump") else None
            return Trace(etdump, tuple(of.traced_ns), method) if etdump is not None or of.traced_ns else None

        decode = trace(last.decode, plan.model.decode_method)
        return replace(
            request,
            etdump=decode.etdump if decode is not None else None,
            traced_ns=decode.traced_ns if decode is not None else (),
            prefill=trace(last.prefill, plan.model.prefill_method),
            encoders=tuple(filter(None, (trace(each.trace, each.method) for each in last.encoders))) or None,
            generation=Generation(
                prompt_tokens=tuple(encoded_positions(plan.model) + point.prompt_tokens for point in plan.points),
                generated_tokens=plan.generated_tokens,
                processes=tuple(
                    GeneratingProcess(
                        path(each.token_ns.digest),
                        path(each.tokens.digest),
                        tuple(tuple(point.prefill_ns) for point in each.points),
                    )
                    for each in result.generations
                ),
            ),
        )

    def _scores(
        self,
        candidate: job_pb2.Candidate,
        compilation: compile_pb2.Compilation,
        plan: generation_pb2.GenerationPlan,
        last: agent_pb2.GenerationResult,
    ) -> Scores:
        """Return the files of the tokens that the last process scored, and of the text that it generated."""
        path, model, score = self._store.place, plan.model, last.score
        completed = [place for place, point in enumerate(last.points) if point.repetitions]
        shortest = min(completed, key=lambda place: last.points[place].depth + last.points[place].prompt_tokens)
        before = sum(point.repetitions for point in last.points[:shortest])
        is_one_method = model.prefill_method == model.decode_method
        return Scores(
            values=path(score.values.digest),
            tokens=tuple(plan.score.tokens),
            executed=score.tokens,
            vocabulary=score.vocabulary,
            window=plan.score.window,
            logits_after=tuple(plan.score.logits_after),
            is_text=plan.score.is_text,
            inputs=TokenInputs(
                model.token_input,
                model.position_input,
                tuple(spec.dtype for spec in compilation.facts.methods[model.decode_method].inputs),
                model.positions == generation_pb2.POSITION_INPUT_VECTOR,
                model.max_prompt_tokens if is_one_method and model.dynamic_prompt else 1,
            ),
            generated=path(last.tokens.digest),
            generated_skipped=before * plan.generated_tokens,
            generated_tokens=plan.generated_tokens,
            seed=plan.seed,
            vocab_size=model.vocab_size,
            context=last.points[shortest].depth + last.points[shortest].prompt_tokens,
            # ExecuTorch's Python binding would need the data files, too.
            on_host=candidate.WhichOneof("source") == "program" and not compilation.program.data,
        )

    def _further(self, samples: Sequence[common_pb2.Artifact], result: agent_pb2.FurtherOutputs) -> Further | None:
        """Return the files of the samples that the device executed; None without any."""
        executed = samples[: max(0, result.samples)]
        if not executed or not result.HasField("outputs"):
            return None
        path = self._store.place
        return Further(tuple(path(sample.digest) for sample in executed), path(result.outputs.digest))

    def _calls(
        self,
        candidate: job_pb2.Candidate,
        compilation: compile_pb2.Compilation,
        calls: Sequence[agent_pb2.RunCall],
        result: agent_pb2.FurtherOutputs,
    ) -> Calls | None:
        """Return the files of the calls that the device executed; None without any."""
        executed = calls[: max(0, result.samples)]
        if not executed or not result.HasField("outputs"):
            return None
        path, methods = self._store.place, dict.fromkeys(call.method for call in executed)
        return Calls(
            methods=tuple(
                CalledMethod(
                    method, path(_original_of(candidate.model.methods[method]).digest), _output_names(compilation, method)
                )
                for method in methods
            ),
            inputs=tuple((call.method, path(call.inputs.digest)) for call in executed),
            outputs=path(result.outputs.digest),
            shared=tuple(compilation.shared_buffers),
            is_quantized=any(self._quantized(candidate, compilation, method) is not None for method in methods),
        )

    def _numerics(
        self,
        candidate: job_pb2.Candidate,
        timed: compile_pb2.Compilation,
        compilation: compile_pb2.Compilation | None,
        method: str,
        result: agent_pb2.NumericsResult,
    ) -> Numerics | None:
        """Return the files of a numerics pass; None if it did not write all of them."""
        if compilation is None or not (
            compilation.HasField("etrecord") and result.HasField("etdump") and result.HasField("debug")
        ):
            return None
        path = self._store.place
        return Numerics(
            pte=path(compilation.program.pte.digest),
            etrecord=path(compilation.etrecord.digest),
            etdump=path(result.etdump.digest),
            debug=path(result.debug.digest),
            outputs=path(result.outputs.digest) if result.HasField("outputs") else None,
            quantized=self._quantized(candidate, compilation, method),
            is_timed_program=compilation.program.digest == timed.program.digest,
        )

    def _quantized(self, candidate: job_pb2.Candidate, compilation: compile_pb2.Compilation, method: str) -> Path | None:
        """Return the exported program that was lowered if a stage quantized it; None if it is the original."""
        sent = candidate.model.methods.get(method)
        lowered = compilation.exported_programs.get(method)
        if sent is None or lowered is None or lowered.digest == _original_of(sent).digest:
            return None
        return self._store.place(lowered.digest)


def _known_problems(compilation: compile_pb2.Compilation, method: str) -> tuple[tuple[str, str], ...]:
    """Return code and message of the warnings that name wrong outputs of a method."""
    about = re.compile(rf"(?<![\w.]){re.escape(method)}(?![\w.])")
    warnings = (warning for warning in compilation.warnings if warning.code in _KNOWN_DIFFERENCES)
    return tuple((warning.code, warning.message) for warning in warnings if about.search(warning.message))


def _output_names(compilation: compile_pb2.Compilation, method: str) -> tuple[str, ...]:
    """Return the names of a method's outputs in order; empty for an unknown method."""
    outputs = compilation.facts.methods[method].outputs if method in compilation.facts.methods else ()
    return tuple(spec.name or str(index) for index, spec in enumerate(outputs))


def _original_of(method: job_pb2.MethodSource) -> common_pb2.Artifact:
    """Return the exported program before any quantization, if the client sent it."""
    return method.reference if method.HasField("reference") else method.exported_program


def _blocks(result: agent_pb2.CandidateResult) -> tuple[Block, ...]:
    return tuple(Block(block.round, block.process_pair, block.samples) for block in result.blocks)
