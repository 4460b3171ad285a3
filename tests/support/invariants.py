"""What holds of every farm, whatever happened to it: no job lost, none recorded twice, nothing left behind."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import psycopg

from etfarm.server.jobs import model
from etfarm.v1 import artifact_pb2, common_pb2, device_pb2, job_pb2, report_pb2
from tests.support.farm_calls import LIVE, FarmCalls

ENDS: Final = frozenset({model.SUCCEEDED, model.FAILED, model.CANCELLED})


def check_events(job: job_pb2.Job, events: Sequence[job_pb2.JobEvent]) -> list[str]:
    """Return what is wrong with the journaled events of a terminal job."""
    wrong: list[str] = []
    if [event.sequence for event in events] != list(range(1, len(events) + 1)):
        wrong.append(f"job {job.id}: its events are not contiguous: {[event.sequence for event in events]}")
    kinds = [event.WhichOneof("event") for event in events]
    if kinds[:1] != ["job"] or kinds[-1:] != ["job"] or kinds.count("job") != 2:
        wrong.append(f"job {job.id}: its own events are not the first and the last one: {kinds}")
    if not events or events[-1].job_state in LIVE:
        wrong.append(f"job {job.id}: it never ended")
    states: dict[str, int] = {cell.id: model.QUEUED for cell in job.cells}
    versions: dict[str, int] = {cell.id: 1 for cell in job.cells}
    for event in events:
        if event.WhichOneof("event") != "cell":
            continue
        cell = event.cell
        if cell.id not in states:
            wrong.append(f"job {job.id}: the unknown cell {cell.id}")
            continue
        if cell.state not in model.TRANSITIONS[states[cell.id]]:
            names = [common_pb2.CellState.Name(state) for state in (states[cell.id], cell.state)]  # type: ignore[arg-type]
            wrong.append(f"cell {cell.id}: from {names[0]} to {names[1]}")
        if cell.version != versions[cell.id] + 1:
            wrong.append(f"cell {cell.id}: version {cell.version} follows {versions[cell.id]}")
        states[cell.id], versions[cell.id] = cell.state, cell.version
    wrong += [f"cell {cell}: it never ended" for cell, state in states.items() if state not in ENDS]
    return wrong


def check_reports(job: job_pb2.Job, reports: Sequence[report_pb2.Report]) -> list[str]:
    """Return what is wrong with the reports of a terminal job: each cell has one, which is the one that it names."""
    expected, actual = Counter(cell.report_id for cell in job.cells), Counter(report.id for report in reports)
    wrong = [] if expected == actual else [f"job {job.id}: its cells name the reports {expected}, and it has {actual}"]
    for cell in job.cells:
        if cell.state != model.SUCCEEDED and not cell.error.reason:
            wrong.append(f"cell {cell.id}: it ended in {common_pb2.CellState.Name(cell.state)} without a reason")
        if cell.state == model.SUCCEEDED and cell.attempts and cell.attempts[-1].HasField("error"):
            wrong.append(f"cell {cell.id}: it succeeded by an attempt that failed: {cell.attempts[-1].error.reason}")
    return wrong


def check_attempts(jobs: Iterable[job_pb2.Job]) -> list[str]:
    """Return the attempts of jobs without interleaving that several cells share."""
    counts = Counter(attempt.id for job in jobs for cell in job.cells for attempt in cell.attempts)
    return [f"attempt {attempt}: {count} cells share it" for attempt, count in counts.items() if count > 1]


_ROWS: Final = {
    "cells of ended jobs that are live": "SELECT cells.id FROM cells JOIN jobs ON jobs.id = job_id"
    " WHERE finished_at IS NOT NULL AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')",
    "ended cells without a report": "SELECT id FROM cells WHERE state IN ('SUCCEEDED', 'FAILED', 'CANCELLED')"
    " AND id NOT IN (SELECT cell_id FROM reports)",
    "cells with two reports": "SELECT cell_id FROM reports GROUP BY cell_id HAVING count(*) > 1",
    "gaps in events": "SELECT job_id FROM events GROUP BY job_id HAVING count(*) != max(sequence) OR min(sequence) != 1",
    "counts of events": "SELECT id FROM jobs WHERE last_sequence != (SELECT count(*) FROM events WHERE job_id = jobs.id)",
}
"""Queries of rows that are wrong, of each database."""
_SQLITE: Final = {
    "integrity": "SELECT * FROM pragma_integrity_check WHERE integrity_check != 'ok'",
    "foreign keys": "SELECT * FROM pragma_foreign_key_check",
}


def check_database(path: Path) -> list[str]:
    """Return what is wrong with the SQLite database of a server that has stopped."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
    try:
        results = {what: database.execute(query).fetchall() for what, query in (_SQLITE | _ROWS).items()}
    finally:
        database.close()
    return [f"{what}: {rows[:3]}" for what, rows in results.items() if rows]


def check_postgres(url: str) -> list[str]:
    """Return what is wrong with the PostgreSQL database of servers that have stopped."""
    with psycopg.connect(url) as connection:
        results = {what: connection.execute(query.encode()).fetchall() for what, query in _ROWS.items()}
    return [f"{what}: {rows[:3]}" for what, rows in results.items() if rows]


async def check_store(calls: FarmCalls) -> list[str]:
    """Return the damaged artifacts of the store."""
    damaged: list[str] = []
    done = total = 0
    async for progress in calls.artifacts.Verify(artifact_pb2.VerifyArtifactsRequest()):
        damaged += [artifact.digest for artifact in progress.damaged]
        done, total = progress.done, progress.total
    return [f"damaged artifacts: {damaged}"] * bool(damaged) + [f"verified {done} of {total}"] * (done != total)


async def check_devices(calls: FarmCalls) -> list[str]:
    """Return the connected devices that are not idle on a farm without live jobs."""
    answer = await calls.call(calls.devices.List, device_pb2.ListDevicesRequest(page_size=500))
    return [
        f"device {device.name}: {device_pb2.DeviceState.Name(device.state)}, attempt {device.attempt_id or 'none'}"
        for device in answer.devices
        if device.state != device_pb2.DEVICE_STATE_IDLE or device.attempt_id
    ]
