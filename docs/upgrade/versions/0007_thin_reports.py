"""Thin reports: all stored messages become those of etfarm 0.2, and the series of reports become artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa
import structlog
from alembic import context, op
from google.protobuf.message import DecodeError, Message
from release_0_1.convert import converted, is_wire_compatible
from release_0_1.reports import converted_report

from etfarm.server.artifacts.blobs import write_blob
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, device_pb2, job_pb2
from etfarm.wire import series

log = structlog.get_logger()

revision = "0007"
down_revision = "0006"

_BODIES: tuple[tuple[str, str, type[Message]], ...] = (
    ("jobs", "spec", job_pb2.JobSpec),
    ("cells", "body", job_pb2.Cell),
    ("attempts", "error", common_pb2.Error),
    ("attempts", "result", agent_pb2.CandidateResult),
    ("events", "body", job_pb2.JobEvent),
    ("compilations", "body", compile_pb2.Compilation),
    ("stage_results", "body", compile_pb2.Compilation),
    ("devices", "body", device_pb2.Device),
    ("bundles", "body", agent_pb2.RunnerBundle),
)
"""Columns with serialized messages, apart from reports."""

_ROWS = 20
"""Number of rows in memory: a job's spec may have a hundred thousand calibration samples."""

_PROGRESS = 100
"""Number of reports between two log lines."""


def upgrade() -> None:
    connection = op.get_bind()
    # Their keys contain the code of the analysis, so none would be used again.
    connection.execute(sa.text("DELETE FROM analyses"))
    for table, column, kind in _BODIES:
        if not is_wire_compatible(kind):
            for rowid, body in _rows(connection, table, column, _ROWS):
                _convert(connection, table, column, kind, rowid, body)
    total = connection.execute(sa.text("SELECT count(*) FROM reports WHERE body IS NOT NULL")).scalar_one()
    for done, (rowid, body) in enumerate(_rows(connection, "reports", "body", 1), 1):
        _convert_report(connection, rowid, body)
        if done % _PROGRESS == 0:
            log.info("converting reports", done=done, total=total)
    with op.batch_alter_table("reports") as batch:
        batch.drop_column("slim")


def _rows(connection: sa.Connection, table: str, column: str, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield the id and the value of every row that has a value, `count` rows at a time."""
    query = sa.text(
        f"SELECT rowid, {column} FROM {table} WHERE rowid > :after AND {column} IS NOT NULL ORDER BY rowid LIMIT {count}"
    )
    after = -(1 << 63)
    while rows := connection.execute(query, {"after": after}).all():
        yield from ((row[0], row[1]) for row in rows)
        after = rows[-1][0]


def _convert(connection: sa.Connection, table: str, column: str, kind: type[Message], rowid: int, body: bytes) -> None:
    try:
        new = converted(kind, body)
    except DecodeError:
        log.warning("a stored message cannot be read and stays as it is", table=table, column=column, row=rowid)
        return
    _write(connection, table, column, rowid, new.SerializeToString())


def _convert_report(connection: sa.Connection, rowid: int, body: bytes) -> None:
    try:
        report, samples, times = converted_report(body)
    except DecodeError:
        log.warning("a report cannot be read and stays as it is", row=rowid)
        return
    if samples is not None:
        report.samples.CopyFrom(_keep(connection, rowid, samples))
    if times is not None and len(times) == series.trace_times_bytes(report):
        report.trace_times.CopyFrom(_keep(connection, rowid, times))
    _write(connection, "reports", "body", rowid, report.SerializeToString())


def _write(connection: sa.Connection, table: str, column: str, rowid: int, body: bytes) -> None:
    connection.execute(sa.text(f"UPDATE {table} SET {column} = :body WHERE rowid = :row"), {"body": body, "row": rowid})


def _keep(connection: sa.Connection, rowid: int, data: bytes) -> common_pb2.Artifact:
    """Store a file of a report; the project of the report's job holds it."""
    data_folder: Path = context.config.attributes["data"]
    artifact = write_blob(data_folder, data)
    job = sa.text("SELECT jobs.project, jobs.owner FROM jobs JOIN reports ON reports.job_id = jobs.id WHERE reports.rowid = :row")
    project, owner = connection.execute(job, {"row": rowid}).one()
    values = {
        "digest": artifact.digest, "size_bytes": artifact.size_bytes, "owner": owner, "holder": project,
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    }  # fmt: skip
    connection.execute(sa.text("INSERT OR IGNORE INTO artifacts VALUES (:digest, :size_bytes, :owner, :at)"), values)
    connection.execute(sa.text("INSERT OR IGNORE INTO holdings VALUES (:holder, :digest, :owner, :at)"), values)
    return artifact
