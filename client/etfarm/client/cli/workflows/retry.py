"""Another measurement of INVALID cells: a job for each, with the same compiled program on the same device."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from etfarm.client.aio import AsyncFarm
from etfarm.client.cli.terminal.display import Display
from etfarm.client.cli.views import render
from etfarm.client.cli.workflows.job import follow
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.reports import JobResult, Report, VerdictStatus


async def retry_invalid(
    farm: AsyncFarm, job: AsyncJob, result: JobResult, display: Display, tries: int, *, verbose: bool, with_series: bool
) -> tuple[JobResult, dict[str, str]]:
    """Measure the cells with INVALID latencies or rates again, until they are VALID or the tries are over.

    Each try is a job of its own, which is named on the terminal and keeps its report on the farm.

    Returns:
        The last report of each cell, with the job of the last try if all are from it, else with the first job; and the id of
        each report's job by the report's id.
    """
    jobs = {report.id: job.id for report in result.reports}
    for number in range(1, tries + 1):
        invalid = [report for report in result.reports if is_invalid(report)]
        for report in invalid:
            again = await farm.measure_again(jobs[report.id], report.cell or "")
            codes = ", ".join(reason.code for reason in report.verdict.reasons) if report.verdict else ""
            display.log(
                f"{render.label(report.to_dict())} is INVALID ({codes}). Retry {number} of {tries} is job {again.id}.", ""
            )
            try:
                measured = await follow(again, display, verbose=verbose, with_series=with_series)
            except asyncio.CancelledError:
                await asyncio.shield(again.cancel())
                raise
            (latest,) = measured.reports
            if latest.latency is not None or latest.generation is not None:
                jobs[latest.id] = again.id
                result = replace(result, reports=tuple(latest if each is report else each for each in result.reports))
                if all(jobs[each.id] == again.id for each in result.reports):
                    result = replace(result, job=measured.job)
    return result, {report.id: jobs[report.id] for report in result.reports}


def is_invalid(report: Report) -> bool:
    """Return whether a report's latency, or how it generates text, is INVALID."""
    return report.verdict is not None and report.verdict.status == VerdictStatus.INVALID
