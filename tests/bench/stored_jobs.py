"""What 100,000 stored jobs cost: latency of submitting, listing and finding jobs, beside a server without any.

Two servers take turns, so that both see the same load of the machine. The first jobs are written with the journal's own
functions, and their rows are then copied with other ids and times. Also prints the time of reading a job's references, of its
deletion and of a dry run of the retention.

python -m tests.bench.stored_jobs [JOBS]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import grpc
from sqlalchemy import Connection, delete, select

from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.retention.references import References
from etfarm.server.state import schema
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import artifact_pb2_grpc, farm_pb2, farm_pb2_grpc, job_pb2, job_pb2_grpc
from etfarm.v1.job_pb2 import Job, JobState
from etfarm.v1.report_pb2 import Report
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from tests.support.contract import address_of
from tests.support.farm import Daemon
from tests.support.programs import program

LIMIT: Final = 1.5
CALLS: Final = 60
_WRITTEN: Final = 200
"""Number of jobs that the journal writes; the others are copies."""

_READ: Final = 2_000
"""Number of jobs whose references are read again."""

_START: Final = datetime(2025, 1, 1, tzinfo=UTC)
_STATES: Final = (model.COMPILING, model.WAITING, model.RUNNING, model.ANALYZING, model.SUCCEEDED)

Call = Callable[["job_pb2_grpc.JobServiceAsyncStub"], Awaitable[object]]


def new_job(number: int) -> Job:
    job = Job(id=f"{number:016x}", name=f"nightly {number % 500}", owner=f"user {number % 20}", project="default")
    job.spec.labels["commit"] = f"{number:040x}"
    candidate = job.spec.candidates.add(name=f"model {number % 100}")
    candidate.program.pte.CopyFrom(artifact_of(f"program {number % 1000}".encode()))
    job.create_time.FromDatetime(_START + timedelta(seconds=number))
    job.cells.add(id=f"{number:015x}c", job_id=job.id, state=model.QUEUED, version=1, candidate_name=candidate.name)
    return job


def new_report(job: Job) -> Report:
    report = Report(id=f"{job.id}r", cell=job.cells[0].id)
    report.model.name, report.model.digest = job.cells[0].candidate_name, artifact_of(job.id.encode()).digest
    report.create_time.CopyFrom(job.create_time)
    report.samples.CopyFrom(artifact_of(f"samples of {job.id}".encode()))
    for index in range(20):
        report.operators.add(index=index, name=f"aten.convolution.{index}", p50_ns=1000.0 * index, module="features.0.conv" * 3)
    return report


async def fill(path: Path, count: int) -> None:
    """Write terminal jobs, each with a cell, its changes and a report."""
    path.parent.mkdir(parents=True)
    database, now = SqliteDatabase(path), _START

    def write(connection: Connection) -> None:
        nonlocal now
        for number in range(_WRITTEN):
            now = _START + timedelta(seconds=number)
            job, _ = journal.write_new(connection, new_job(number), f"request {number}")
            cell = job.cells[0]
            for state in _STATES:
                cell = model.advance(cell, state, at=now)
                journal.write_change(connection, cell, new_report(job) if state == model.SUCCEEDED else None, None)

    journal = Journal(database, Announcer(), lambda: now)
    await database.open()
    await database.write(write)
    references = References(database, MeasurementLock().work)
    await references.update()
    await database.write(lambda connection: copy(connection, count // _WRITTEN - 1))
    some = select(schema.referrers.c.id).limit(_READ)
    await database.write(lambda c: c.execute(delete(schema.referrers).where(schema.referrers.c.id.in_(some))))
    began = time.monotonic()
    await references.update()
    print(f"references of a job are read in {1e3 * (time.monotonic() - began) / _READ:.2f} ms", flush=True)
    database.close()


def copy(connection: Connection, times: int) -> None:
    """Copy all rows of jobs some times. Ids get a suffix, and numbers and times continue; the messages keep their ids."""
    of_jobs = (schema.jobs, schema.cells, schema.attempts, schema.events, schema.reports)
    tables = (*of_jobs, schema.referrers, schema.artifact_references)
    rows = {table.name: [column.name for column in table.columns] for table in tables}
    names = {name: ", ".join(f'"{column}"' for column in columns) for name, columns in rows.items()}
    for name in rows:
        connection.exec_driver_sql(f"CREATE TEMP TABLE first_{name} AS SELECT {names[name]} FROM {name}")
    for number in range(1, times + 1):
        changed = {column: f"\"{column}\" || 'x{number:x}'" for column in ("id", "job_id", "cell_id", "request_id")}
        changed["number"] = f'"number" + {number * _WRITTEN}'
        for column in ("submitted_at", "finished_at", "created_at"):
            changed[column] = f"strftime('%Y-%m-%d %H:%M:%f000', \"{column}\", '+{number * _WRITTEN} seconds')"
        for name, columns in rows.items():
            values = ", ".join(changed.get(column, f'"{column}"') for column in columns)
            connection.exec_driver_sql(f"INSERT INTO {name} ({names[name]}) SELECT {values} FROM first_{name}")


def serve(folder: Path) -> Daemon:
    server = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--no-prewarm", "--exit-with-stdin"],
        folder / "serve.log",
    )
    server.start()
    return server


async def submit(stub: job_pb2_grpc.JobServiceAsyncStub) -> Job:
    request = job_pb2.SubmitJobRequest(request_id=str(uuid.uuid4()))
    request.spec.candidates.add(name="add").program.pte.CopyFrom(artifact_of(program("add").bytes))
    return await stub.Submit(request)


CALLED: Final[dict[str, Call]] = {
    "submit": submit,
    "list": lambda stub: stub.List(job_pb2.ListJobsRequest()),
    "list of failed jobs": lambda stub: stub.List(job_pb2.ListJobsRequest(states=[JobState.JOB_STATE_FAILED])),
    "get latest": lambda stub: stub.Get(job_pb2.GetJobRequest(job_id="latest")),
}


async def measure(servers: dict[str, Daemon]) -> bool:
    """Call both servers in turns; print medians and ratios. Return whether submit and list keep the limit."""
    channels = {name: open_channel(Access(address_of(server))) for name, server in servers.items()}
    stubs = {name: job_pb2_grpc.JobServiceStub(channel) for name, channel in channels.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for channel in channels.values():
        data = program("add").bytes
        await upload(artifact_pb2_grpc.ArtifactServiceStub(channel), artifact_of(data), data)
    for stub in stubs.values():  # as many jobs on a page as the other server's
        for _ in range(50):
            await submit(stub)
    await asyncio.sleep(3)
    for _ in range(CALLS):
        for what, call in CALLED.items():
            for name, stub in stubs.items():
                began = time.perf_counter()
                answer = await call(stub)
                times.setdefault((what, name), []).append(1e3 * (time.perf_counter() - began))
                if what == "submit":
                    await stub.Cancel(job_pb2.CancelJobRequest(job_id=answer.id))  # type: ignore[attr-defined]
    print(f"{'':<22} {'empty':>9} {'full':>9} {'ratio':>6}")
    kept = True
    for what in CALLED:
        empty, full = (statistics.median(times[what, name]) for name in servers)
        print(f"{what:<22} {empty:>6.2f} ms {full:>6.2f} ms {full / empty:>6.2f}")
        kept &= what not in ("submit", "list") or full <= LIMIT * empty
    await _time_deletions(channels["full"], stubs["full"])
    for channel in channels.values():
        await channel.close()
    return kept


async def _time_deletions(channel: grpc.aio.Channel, stub: job_pb2_grpc.JobServiceAsyncStub) -> None:
    began = time.perf_counter()
    for number in range(20):
        await stub.Delete(job_pb2.DeleteJobRequest(job_id=f"{number:016x}"))
    print(f"deletion of a job: {1e3 * (time.perf_counter() - began) / 20:.1f} ms")
    began = time.perf_counter()
    request = farm_pb2.ApplyRetentionRequest(keep=["jobs=90d", "artifacts=1GiB"], dry_run=True)
    answer = await farm_pb2_grpc.FarmServiceStub(channel).ApplyRetention(request)
    counts = ", ".join(f"{row.name} {row.deleted_count}" for row in answer.results)
    print(f"dry run of a retention: {time.perf_counter() - began:.2f} s ({counts})")


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory(prefix="etfarm-stored-jobs-") as folder:
        servers: dict[str, Daemon] = {}
        try:
            (Path(folder) / "empty").mkdir()
            began = time.monotonic()
            asyncio.run(fill(Path(folder) / "full" / "data" / "farm.sqlite", count))
            size = (Path(folder) / "full" / "data" / "farm.sqlite").stat().st_size
            print(f"{count} jobs written in {time.monotonic() - began:.0f} s, {size / count / 1024:.1f} KiB each", flush=True)
            for name in ("empty", "full"):
                servers[name] = serve(Path(folder) / name)
            return 0 if asyncio.run(measure(servers)) else 1
        finally:
            for server in servers.values():
                server.stop()


if __name__ == "__main__":
    sys.exit(main())
