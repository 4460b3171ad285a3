"""What 100,000 stored jobs on 1,000 devices cost: submitting, lists and history, beside a server without any jobs.

Two servers take turns, so that both see the same load of the machine. The first jobs are written with the journal's own
functions, and their rows are then copied with other ids, times and devices. Half of the devices is known to the farm, the
others were forgotten, so that the history has only their reports. Also prints what each table stores for a job, and the time of
reading a job's references, of its deletion and of a dry run of the retention.

python -m tests.bench.stored_jobs [--jobs 100000] [--devices 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc
from sqlalchemy import Connection, delete, insert, select

from etfarm.server.devices.records import DeviceRecords
from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.requests import Request
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.retention.references import References
from etfarm.server.state import schema
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import (
    artifact_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    report_pb2,
    report_service_pb2_grpc,
)
from etfarm.v1.job_pb2 import Job, JobState
from etfarm.v1.report_pb2 import Report
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.contract import address_of
from tests.support.farm import Daemon
from tests.support.programs import program

LIMIT: Final = 1.5
HISTORY_LIMIT_MS: Final = 500.0
CALLS: Final = 60
_WRITTEN: Final = 200
"""Number of jobs that the journal writes; the others are copies."""

_READ: Final = 2_000
"""Number of jobs whose references are read again."""

_START: Final = datetime(2025, 1, 1, tzinfo=UTC)
_STATES: Final = (model.COMPILING, model.WAITING, model.RUNNING, model.ANALYZING, model.SUCCEEDED)

_RACKS: Final = 50

_OPERATORS: Final = 84
"""Rows of a report, as many as mobilenet_v1_025 has nodes."""

Call = Callable[[grpc.aio.Channel], Awaitable[object]]


def new_job(number: int) -> Job:
    job = Job(id=f"{number:016x}", name=f"nightly {number % 500}", owner=f"user {number % 20}", project="default")
    job.spec.labels["commit"] = f"{number:040x}"
    candidate = job.spec.candidates.add(name=f"model {number % 100}" if number % 2 else "main")
    candidate.program.pte.CopyFrom(artifact_of(f"program {number % 1000}".encode()))
    job.create_time.FromDatetime(_START + timedelta(seconds=number))
    job.cells.add(id=f"{number:015x}c", job_id=job.id, state=model.QUEUED, version=1, candidate_name=candidate.name)
    return job


def new_report(job: Job) -> Report:
    report = Report(id=f"{job.id}r", cell=job.cells[0].id)
    report.model.name, report.model.digest = job.cells[0].candidate_name, artifact_of(job.id.encode()).digest
    report.create_time.CopyFrom(job.create_time)
    report.device.id, report.device.arch, report.device.cores = "device-00000", "aarch64", 4
    report.samples.CopyFrom(artifact_of(f"samples of {job.id}".encode()))
    for index in range(_OPERATORS):
        operator = report.operators.add(index=index, name=f"aten.convolution.{index}", p50_ns=1000.0 * index)
        operator.module, operator.source.file, operator.source.line = f"features.{index}.conv", "models/mobilenet.py", index
        operator.source.code = "return self.activation(self.norm(self.conv(inputs)))"
        operator.delegated, operator.backend, operator.share, operator.mean_ns = True, "XnnpackBackend", 0.01, 1001.0 * index
    return report


def known_device(number: int) -> device_pb2.Device:
    """Return a device that has been connected, of which every second one is forgotten later."""
    device = device_pb2.Device(id=f"device-{number:05}", name=f"pi-{number:05}", arch="aarch64", cores=4)
    device.labels["rack"] = str(number % _RACKS)
    device.last_seen_time.FromDatetime(_START)
    return device


async def fill(path: Path, count: int, devices: int) -> None:
    """Write terminal jobs, each with a cell, its changes, an attempt and a report."""
    path.parent.mkdir(parents=True)
    database, now = SqliteDatabase(path), _START

    def write(connection: Connection) -> None:
        nonlocal now
        for number in range(_WRITTEN):
            now = _START + timedelta(seconds=number)
            job, _ = journal.write_new(connection, new_job(number), Request(f"request {number}", b""))
            cell = job.cells[0]
            for state in _STATES:
                cell = model.advance(cell, state, at=now)
                journal.write_change(connection, cell, new_report(job) if state == model.SUCCEEDED else None, None)
            attempt = {
                "id": f"{cell.id}a",
                "cell_id": cell.id,
                "device_id": "device-00000",
                "started_at": now,
                "finished_at": now,
            }
            connection.execute(insert(schema.attempts).values(attempt))

    journal = Journal(database, Announcer(), lambda: now)
    await database.open()
    await database.write(write)
    references = References(database, MeasurementLock().work)
    await references.update()
    await database.write(lambda connection: copy(connection, count // _WRITTEN - 1, devices))
    await DeviceRecords(database).save([known_device(number) for number in range(0, devices, 2)])
    some = select(schema.referrers.c.id).limit(_READ)
    await database.write(lambda c: c.execute(delete(schema.referrers).where(schema.referrers.c.id.in_(some))))
    began = time.monotonic()
    await references.update()
    print(f"references of a job are read in {1e3 * (time.monotonic() - began) / _READ:.2f} ms", flush=True)
    await database.read(print_sizes)
    database.close()


def print_sizes(connection: Connection) -> None:
    """Print what the tables store for a job, with their indexes."""
    jobs = connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar_one()
    sizes = connection.exec_driver_sql("SELECT name, pgsize FROM dbstat WHERE aggregate = TRUE")
    owners = {row.name: row.tbl_name for row in connection.exec_driver_sql("SELECT name, tbl_name FROM sqlite_master")}
    bytes_of: dict[str, int] = {}
    for name, size in sizes:
        bytes_of[owners.get(name, name)] = bytes_of.get(owners.get(name, name), 0) + size
    print("table                     rows/job  bytes/job, with indexes")
    for name, size in sorted(bytes_of.items(), key=lambda item: -item[1]):
        if size / jobs >= 50:
            rows = connection.exec_driver_sql(f'SELECT count(*) FROM "{name}"').scalar_one()
            print(f"{name:<22} {rows / jobs:>11.2f} {size / jobs:>10.0f}", flush=True)


def copy(connection: Connection, times: int, devices: int) -> None:
    """Copy all rows of jobs some times. Ids get a suffix, numbers and times continue, and devices take turns.

    The messages keep their ids.
    """
    of_jobs = (schema.jobs, schema.job_models, schema.cells, schema.attempts, schema.events, schema.reports)
    tables = (*of_jobs, schema.referrers, schema.artifact_references)
    rows = {table.name: [column.name for column in table.columns] for table in tables}
    names = {name: ", ".join(f'"{column}"' for column in columns) for name, columns in rows.items()}
    for name in rows:
        connection.exec_driver_sql(f"CREATE TEMP TABLE first_{name} AS SELECT {names[name]} FROM {name}")
    for number in range(1, times + 1):
        changed = {column: f"\"{column}\" || 'x{number:x}'" for column in ("id", "job_id", "cell_id", "request_id")}
        changed["number"] = f'"number" + {number * _WRITTEN}'
        changed["device_id"] = f"printf('device-%05d', ({number} * {_WRITTEN} + first.rowid) / 100 * 7 % {devices})"
        for column in ("submitted_at", "finished_at", "created_at"):
            changed[column] = f"strftime('%Y-%m-%d %H:%M:%f000', \"{column}\", '+{number * _WRITTEN} seconds')"
        for name, columns in rows.items():
            values = ", ".join(changed.get(column, f'"{column}"') for column in columns)
            connection.exec_driver_sql(f"INSERT INTO {name} ({names[name]}) SELECT {values} FROM first_{name} AS first")


def serve(folder: Path) -> Daemon:
    server = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--no-prewarm", "--exit-with-stdin"],
        folder / "serve.log",
    )
    server.start()
    return server


async def submit(channel: grpc.aio.Channel) -> Job:
    request = job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=str(uuid.uuid4()))
    request.spec.candidates.add(name="add").program.pte.CopyFrom(artifact_of(program("add").bytes))
    return await job_pb2_grpc.JobServiceStub(channel).Submit(request)


def list_jobs(**wanted: Any) -> Call:
    return lambda channel: job_pb2_grpc.JobServiceStub(channel).List(job_pb2.ListJobsRequest(**wanted))


def list_history(**wanted: Any) -> Call:
    return lambda channel: report_service_pb2_grpc.ReportServiceStub(channel).ListHistory(report_pb2.ListHistoryRequest(**wanted))


CALLED: Final[dict[str, Call]] = {
    "submit": submit,
    "list": list_jobs(),
    "list of failed jobs": list_jobs(states=[JobState.JOB_STATE_FAILED]),
    "list of a model's jobs": list_jobs(model="model 7"),
    "get latest": lambda channel: job_pb2_grpc.JobServiceStub(channel).Get(job_pb2.GetJobRequest(job_id="latest")),
    "list of devices": lambda channel: device_pb2_grpc.DeviceServiceStub(channel).List(device_pb2.ListDevicesRequest()),
}

HISTORY: Final[dict[str, Call]] = {
    "history of a model": list_history(model="model 7"),
    "history of a digest": list_history(model=artifact_of(new_job(7).id.encode()).digest[:12]),
    "history on a device": list_history(model="model 7", device="id=device-00098"),
    "history on a rack": list_history(model="model 7", device="label.rack=14"),
    "history of no model": list_history(model="model"),
}
"""Calls that only the full server can answer; the last is refused with the names of the models that there are."""


async def measure(servers: dict[str, Daemon]) -> dict[str, Any]:
    """Call both servers in turns; print and return the medians in milliseconds."""
    channels = {name: open_channel(Access(address_of(server))) for name, server in servers.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for channel in channels.values():
        data = program("add").bytes
        await upload(artifact_pb2_grpc.ArtifactServiceStub(channel), artifact_of(data), data)
        for _ in range(50):  # as many jobs on a page as the other server's
            await submit(channel)
    await asyncio.sleep(3)
    for _ in range(CALLS):
        for what, call in CALLED.items():
            for name, channel in channels.items():
                began = time.perf_counter()
                answer = await call(channel)
                times.setdefault((what, name), []).append(1e3 * (time.perf_counter() - began))
                if what == "submit":
                    cancel = job_pb2.CancelJobRequest(job_id=answer.id)  # type: ignore[attr-defined]
                    await job_pb2_grpc.JobServiceStub(channel).Cancel(cancel)
        for what, call in HISTORY.items():
            began = time.perf_counter()
            try:
                await call(channels["full"])
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND or what != "history of no model":
                    raise
            times.setdefault((what, "full"), []).append(1e3 * (time.perf_counter() - began))
    medians = {
        what: {name: statistics.median(times[what, name]) for name in servers if (what, name) in times} for what, _ in times
    }
    print(f"{'':<22} {'empty':>9} {'full':>9} {'ratio':>6}")
    for what, of in medians.items():
        empty = f"{of['empty']:>6.2f} ms" if "empty" in of else f"{'':>9}"
        ratio = f"{of['full'] / of['empty']:>6.2f}" if "empty" in of else ""
        print(f"{what:<22} {empty} {of['full']:>6.2f} ms {ratio}", flush=True)
    await _time_deletions(channels["full"], job_pb2_grpc.JobServiceStub(channels["full"]))
    for channel in channels.values():
        await channel.close()
    return medians


def keeps_limits(medians: dict[str, Any]) -> bool:
    """Return whether submissions and lists keep their ratio, and history its time."""
    return all(medians[what]["full"] <= LIMIT * medians[what]["empty"] for what in ("submit", "list")) and all(
        medians[what]["full"] <= HISTORY_LIMIT_MS for what in HISTORY
    )


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--devices", type=int, default=1_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etfarm-stored-jobs-") as folder:
        servers: dict[str, Daemon] = {}
        try:
            (Path(folder) / "empty").mkdir()
            began = time.monotonic()
            asyncio.run(fill(Path(folder) / "full" / "data" / "farm.sqlite", options.jobs, options.devices))
            size = (Path(folder) / "full" / "data" / "farm.sqlite").stat().st_size
            print(
                f"{options.jobs} jobs written in {time.monotonic() - began:.0f} s, {size / options.jobs / 1024:.1f} KiB each",
                flush=True,
            )
            for name in ("empty", "full"):
                servers[name] = serve(Path(folder) / name)
            medians = asyncio.run(measure(servers))
        finally:
            for server in servers.values():
                server.stop()
    if options.json is not None:
        options.json.write_text(json.dumps(medians, indent=2) + "\n")
    return 0 if keeps_limits(medians) else 1


if __name__ == "__main__":
    sys.exit(main())
