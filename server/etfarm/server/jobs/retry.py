"""New jobs from the failed cells of terminal ones."""

from __future__ import annotations

from etfarm.server.jobs import model
from etfarm.server.jobs.cells import groups
from etfarm.v1.job_pb2 import Cell, Job, JobSpec
from etfarm.wire.errors import error_for
from etfarm.wire.names import RETRY_LABEL


def spec_of_retry(job: Job) -> JobSpec:
    """Return the spec of a job that repeats cells of `job`. The name stays with `job` alone, so that it keeps resolving to it."""
    spec = JobSpec()
    spec.CopyFrom(job.spec)
    spec.ClearField("name")
    # It was the time by which the former job's results were needed, and has often passed.
    spec.ClearField("deadline_time")
    spec.labels[RETRY_LABEL] = job.id
    return spec


def cells_to_retry(job: Job) -> list[Cell]:
    """Return the cells of a terminal job that failed, and those that are interleaved with them, without their results.

    Raises:
        JOB_LIVE: a cell is live.
        NOTHING_TO_RETRY: no cell failed.
    """
    if not model.is_terminal(job.state):
        raise error_for("JOB_LIVE", f"Job {job.id} is still live.", f"Wait: `etfarm jobs watch {job.id}`.", job=job.id)
    again = [
        cell for cells in groups.together(job, job.cells) if any(cell.state == model.FAILED for cell in cells) for cell in cells
    ]
    if not again:
        raise error_for(
            "NOTHING_TO_RETRY", f"No cell of job {job.id} failed.", "Submit the models again to repeat the others.", job=job.id
        )
    return [_without_results(cell) for cell in sorted(again, key=lambda cell: cell.index)]


def _without_results(cell: Cell) -> Cell:
    return Cell(
        candidate_index=cell.candidate_index,
        device_index=cell.device_index if cell.HasField("device_index") else None,
        selector=cell.selector,
        method=cell.method,
        threads=cell.threads if cell.HasField("threads") else None,
        candidate_name=cell.candidate_name,
        recipe_name=cell.recipe_name,
    )
