"""What a new SQLite database has: the tables of the schema, triggers, and the project of everybody.

The migrations would make the same from nothing in several times the time, most of which is Alembic's import.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, insert, text
from sqlalchemy.schema import CreateIndex, CreateTable

from etfarm.server.state import identity, revisions, schema

_CACHES: Final = (("compilation", "compilations"), ("stages", "stage_results"), ("analysis", "analyses"))
_LATER: Final = (
    "ix_audit_action", "ix_cells_state", "deliveries_of_a_job", "health_runs_of_a_series",
    "jobs_of_a_name", "jobs_of_a_time", "jobs_finished_of_an_owner", "jobs_finished_of_a_project",
    "reports_of_a_model", "reports_of_a_model_digest", "reports_of_an_execution", "reports_of_a_device_kind",
    "reports_of_a_device", "reports_of_a_model_on_a_device",
)  # fmt: skip
"""The indexes behind the first one of their table, in order. Of two that fit a query equally, SQLite takes the later one."""


def create(connection: Connection) -> None:
    """Create everything in an empty database, in the transaction of the connection."""
    create_baseline(connection)
    connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": revisions.HEAD})


def create_baseline(connection: Connection) -> None:
    """Create what a database has besides the record of its revision."""
    for table in schema.metadata.sorted_tables:
        connection.execute(CreateTable(table))
        for index in sorted(table.indexes, key=lambda index: _LATER.index(index.name) if index.name in _LATER else -1):
            connection.execute(CreateIndex(index))
    for statement in _triggers():
        connection.exec_driver_sql(statement)
    project = {"name": "default", "created_at": datetime.now(UTC), "created_by": "farm"}
    connection.execute(insert(schema.projects), project)
    identity.renew(connection)


def _triggers() -> list[str]:
    """The texts are those of the migrations, to which a database from outside is compared."""

    def after(event: str, table: str, name: str, *statements: str) -> str:
        return f"CREATE TRIGGER {name} AFTER {event} ON {table} BEGIN {' '.join(f'{text};' for text in statements)} END"

    def outdate(kind: str, row: str) -> str:
        return f"DELETE FROM referrers WHERE kind = '{kind}' AND id = {row}"

    def forget(kind: str, row: str) -> tuple[str, str]:
        return outdate(kind, row), f"DELETE FROM artifact_references WHERE kind = '{kind}' AND id = {row}"

    refused, young = "the audit log is append-only", "strftime('%Y-%m-%d %H:%M:%S', 'now', '-30 days')"
    statements = [
        f"CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, '{refused}'); END",
        f"CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN OLD.at > {young} "
        f"BEGIN SELECT RAISE(ABORT, '{refused} for 30 days'); END",
        after("UPDATE", "cells", "references_after_a_cell", outdate("job", "NEW.job_id")),
        after("INSERT", "reports", "references_after_a_report", outdate("job", "NEW.job_id")),
        after("UPDATE", "reports", "references_after_a_revision", outdate("job", "NEW.job_id")),
        after("DELETE", "jobs", "references_after_a_job", *forget("job", "OLD.id")),
    ]
    for kind, table in _CACHES:
        unused = f"DELETE FROM uses WHERE kind = '{kind}' AND id = OLD.key"
        statements += [
            after("UPDATE", table, f"references_after_{table}", outdate(kind, "NEW.key")),
            after("DELETE", table, f"references_without_{table}", *forget(kind, "OLD.key"), unused),
        ]
    return statements
