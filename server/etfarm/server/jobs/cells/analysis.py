"""Analysis of a cell's result, and assembly of its report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial

from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.groups import base_of
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.reports.analyst import Analyst
from etfarm.server.reports.assembly import assemble
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.workers.child_pool import OnTurn
from etfarm.v1 import agent_pb2, report_pb2
from etfarm.v1.common_pb2 import LogSource
from etfarm.v1.job_pb2 import Cell


class CellAnalysis:
    """Analysis of cell results and assembly of cell reports."""

    def __init__(self, analyst: Analyst, joblog: JobLog, thresholds: Thresholds) -> None:
        self._analyst = analyst
        self._joblog = joblog
        self._thresholds = thresholds

    async def analyze(
        self, run: CellRun, results: Mapping[str, agent_pb2.CandidateResult], on_turn: OnTurn = lambda has_turn: None
    ) -> report_pb2.Report:
        """Return the analysis of the artifacts of a cell's result.

        Args:
            on_turn: as in `ChildPool.run`.
            results: results of all cells that shared the attempt, in the order of the job's cells.
        """
        assert run.compilation is not None and run.result is not None
        return await self._analyst.analyze(
            run.candidate,
            run.compilation,
            run.cell.method,
            run.inputs,
            run.result,
            partial(self._joblog.add, run.job.id, run.cell.id, LogSource.LOG_SOURCE_ANALYSIS),
            on_turn,
            base=base_of(run.cell.id, results),
            samples=run.samples,
            calls=run.calls,
            numerics=run.numerics,
            generation=run.generation,
            fresh=run.job.spec.no_cache,
            project=run.job.project,
            owner=run.job.owner,
        )

    def report(self, run: CellRun, cell: Cell, report_id: str, *, at: datetime) -> report_pb2.Report:
        """Return the report of a terminal version of the run's cell."""
        return assemble(
            report_id,
            run.job,
            cell,
            at=at,
            compilation=run.compilation,
            device=run.device,
            result=run.result,
            analysis=run.analysis,
            thresholds=self._thresholds,
            numerics=run.numerics,
            inputs=run.inputs,
            samples=run.samples,
            calls=run.calls,
            warnings=run.warnings,
            earlier=run.earlier,
            generation=None if run.analysis is None else run.generation,
        )
