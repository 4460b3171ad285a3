"""What waits for a device: its names in the queue, and the work by which the duration of later runs is estimated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from etfarm.server.devices.scheduling.forecast import NO_WORKLOAD, Workload
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.placement import Placement, Subject, Use
from etfarm.server.jobs.records.recent import recent_attempts
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Cell, Measurement, QueuedRun

REMEMBERED_S: Final = 7 * 86_400.0
"""Age of the attempts that a new server still considers. What they used hardly counts by then, and how long they took does."""


def subject_of(cell_runs: Sequence[CellRun]) -> Subject:
    """Return what cells that wait together are in the queue."""
    job, first = cell_runs[0].job, cell_runs[0].cell
    entry = QueuedRun(
        job_id=job.id,
        job_name=job.name,
        cell_ids=[run.cell.id for run in cell_runs],
        candidate_name=first.candidate_name,
        recipe_name=first.recipe_name,
        method=first.method,
        selector=first.selector,
    )
    return Subject(
        entry=entry,
        work=workload_of(job.spec.measurement, [run.cell for run in cell_runs]),
        # Together they wait since the last of them has arrived.
        since=max(run.cell.update_time.ToDatetime(UTC) for run in cell_runs),
        max_wait_s=job.spec.max_wait_s if job.spec.HasField("max_wait_s") else None,
    )


async def restore_use(placement: Placement, database: Database, now: datetime) -> None:
    """Let a new server's placement know the attempts that earlier servers led."""
    for past in await recent_attempts(database, now - timedelta(seconds=REMEMBERED_S)):
        placement.remember(
            Use(
                party=(past.project, past.owner),
                device_id=past.device_id,
                started_s=past.started_at.timestamp(),
                ended_s=past.finished_at.timestamp(),
                work=NO_WORKLOAD if past.measurement is None else workload_of(past.measurement, past.cells),
                programs=tuple(cell.program.pte.digest for cell in past.cells if cell.HasField("program")),
            )
        )


def workload_of(measurement: Measurement, cells: Sequence[Cell]) -> Workload:
    """Return what determines the duration of a run of cells, as far as it is known before."""
    measured = measurement.SerializeToString(deterministic=True)
    common = [(cell.method, cell.threads) for cell in cells]
    programs = [cell.program.digest or cell.program.pte.digest for cell in cells]
    models = [(cell.candidate_name, cell.recipe_name) for cell in cells]
    return Workload(program=_digest(measured, common, programs) if all(programs) else "", model=_digest(measured, common, models))


def _digest(measured: bytes, *parts: object) -> str:
    return hashlib.sha256(measured + repr(parts).encode()).hexdigest()[:32]
