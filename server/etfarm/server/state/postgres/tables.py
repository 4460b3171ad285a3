"""What a PostgreSQL database has besides the tables of the schema: triggers, and the record of its last commits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from sqlalchemy import BigInteger, Column, Connection, DateTime, MetaData, Table, Text, func, insert, text

from etfarm.server.state import copies, identity, revisions, schema

_OWN: Final = MetaData()

# The number of each server's last committed transaction. It says whether a transaction was committed whose answer was lost, also
# after a standby has taken over, where transaction ids may be those of other transactions.
commits: Final = Table(
    "commits", _OWN,
    Column("writer", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at", DateTime, nullable=False, server_default=func.timezone("utc", func.now())),
)  # fmt: skip

_CACHES: Final = (("compilation", "compilations"), ("stages", "stage_results"), ("analysis", "analyses"))

_FUNCTIONS: Final = {
    "refuse_change_of_audit": "RAISE integrity_constraint_violation USING MESSAGE = TG_ARGV[0];",
    "outdate_job": "DELETE FROM referrers WHERE kind = 'job' AND id = NEW.job_id; RETURN NULL;",
    "forget_job": "DELETE FROM referrers WHERE kind = 'job' AND id = OLD.id; "
    "DELETE FROM artifact_references WHERE kind = 'job' AND id = OLD.id; RETURN NULL;",
    "outdate_result": "DELETE FROM referrers WHERE kind = TG_ARGV[0] AND id = NEW.key; RETURN NULL;",
    "forget_result": "DELETE FROM referrers WHERE kind = TG_ARGV[0] AND id = OLD.key; "
    "DELETE FROM artifact_references WHERE kind = TG_ARGV[0] AND id = OLD.key; "
    "DELETE FROM uses WHERE kind = TG_ARGV[0] AND id = OLD.key; RETURN NULL;",
}
"""Bodies of the trigger functions by name."""


def create(connection: Connection) -> None:
    """Create everything in an empty database, in the transaction of the connection."""
    schema.metadata.create_all(connection, checkfirst=False)
    _OWN.create_all(connection, checkfirst=False)
    for name, body in _FUNCTIONS.items():
        connection.exec_driver_sql(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} END$$")
    for statement in _triggers():
        connection.exec_driver_sql(statement)
    project = {"name": "default", "created_at": datetime.now(UTC), "created_by": "farm"}
    connection.execute(insert(schema.projects), project)
    identity.renew(connection)
    connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": revisions.HEAD})


def drop(connection: Connection) -> None:
    """Drop everything that `create` creates, in the transaction of the connection."""
    copies.MARKS.drop_all(connection)
    schema.metadata.drop_all(connection)
    _OWN.drop_all(connection)
    for name in _FUNCTIONS:
        connection.exec_driver_sql(f"DROP FUNCTION IF EXISTS {name}()")
    connection.exec_driver_sql("DROP TABLE IF EXISTS alembic_version")


def _triggers() -> list[str]:
    def on(when: str, name: str, call: str, each: str = "ROW", condition: str = "") -> str:
        return f"CREATE TRIGGER {name} {when} FOR EACH {each} {condition} EXECUTE FUNCTION {call}"

    refused, young = "the audit log is append-only", "(now() AT TIME ZONE 'utc') - interval '30 days'"
    statements = [
        on("BEFORE UPDATE ON audit", "audit_no_update", f"refuse_change_of_audit('{refused}')"),
        on("BEFORE TRUNCATE ON audit", "audit_no_truncate", f"refuse_change_of_audit('{refused}')", "STATEMENT"),
        on(
            "BEFORE DELETE ON audit", "audit_no_delete", f"refuse_change_of_audit('{refused} for 30 days')",
            condition=f"WHEN (OLD.at > {young})",
        ),
        on("AFTER UPDATE ON cells", "references_after_a_cell", "outdate_job()"),
        on("AFTER INSERT ON reports", "references_after_a_report", "outdate_job()"),
        on("AFTER UPDATE ON reports", "references_after_a_revision", "outdate_job()"),
        on("AFTER DELETE ON jobs", "references_after_a_job", "forget_job()"),
    ]  # fmt: skip
    for kind, table in _CACHES:
        statements += [
            on(f"AFTER UPDATE ON {table}", f"references_after_{table}", f"outdate_result('{kind}')"),
            on(f"AFTER DELETE ON {table}", f"references_without_{table}", f"forget_result('{kind}')"),
        ]
    return statements
