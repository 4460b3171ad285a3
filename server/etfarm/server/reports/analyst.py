"""The daemon's side of analysis: hands an attempt's artifacts to a child and takes its findings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from etfarm.server.artifacts.store import Store
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.workers.pool import Workers
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.wire.errors import FarmError

ANALYZE_TASK: Final = "etfarm.server.reports.analyze:analyze"


class BadAnalysis(FarmError):
    """The analysis child's answer cannot be read."""

    reason = "BAD_WORKER_ANSWER"


class Analyst:
    """Finds out what an attempt's artifacts mean.

    Args:
        deadline_s: of one analysis, wall clock.
    """

    def __init__(self, workers: Workers, store: Store, *, deadline_s: float) -> None:
        self._workers = workers
        self._store = store
        self._deadline_s = deadline_s

    async def analyze(
        self,
        candidate: job_pb2.Candidate,
        compilation: compile_pb2.Compilation,
        method: str,
        inputs: common_pb2.Artifact | None,
        result: agent_pb2.CandidateResult,
        on_log: Callable[[str], None],
    ) -> report_pb2.Report:
        """What only the artifacts tell: latency, accuracy, profile and operators; what fails alone is a warning in
        `compile.warnings`.

        Raises:
            BadAnalysis: the child's answer is no report.
            EtfarmError: what the worker says.
        """
        path = self._store.path
        source = candidate.model.methods[method].exported_program if method in candidate.model.methods else None
        facts = compilation.facts.methods[method] if method in compilation.facts.methods else compile_pb2.MethodFacts()
        request = AnalyzeRequest(
            pte=path(compilation.program.pte.digest),
            etdump=path(result.etdump.digest) if result.HasField("etdump") else None,
            etrecord=path(compilation.etrecord.digest) if compilation.HasField("etrecord") else None,
            model=path(source.digest) if source is not None else None,
            inputs=path(inputs.digest) if inputs is not None else None,
            outputs=path(result.outputs.digest) if result.HasField("outputs") else None,
            samples=path(result.samples.digest) if result.HasField("samples") else None,
            method=method,
            output_names=tuple(spec.name or str(index) for index, spec in enumerate(facts.outputs)),
            traced_ns=tuple(result.traced_ns),
        )
        finished = await self._workers.run(ANALYZE_TASK, request, deadline_s=self._deadline_s, on_log=on_log)
        async with finished:
            try:
                return await asyncio.to_thread(report_pb2.Report.FromString, finished.result)
            except DecodeError as error:
                raise BadAnalysis(f"The analysis child's answer is no report: {error}.") from None
