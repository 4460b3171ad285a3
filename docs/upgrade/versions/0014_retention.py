"""What refers to which artifact, when it was last used, and entries of the audit log that may be deleted once they are old.

The references are a cache: the server reads them from jobs, reports and cached results after the upgrade, in the background.
Triggers drop what is out of date, whichever code changes a row.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_CACHES = (("compilation", "compilations"), ("stages", "stage_results"), ("analysis", "analyses"))


def upgrade() -> None:
    op.create_table(
        "referrers",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("size_bytes", sa.Integer),
        sa.Column("log_bytes", sa.Integer),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "artifact_references",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("references_of_a_referrer", "artifact_references", ["kind", "id"])
    op.create_table(
        "uses",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("used_at", sa.DateTime, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("jobs_finished_of_an_owner", "jobs", ["finished_at", "owner"])
    op.create_index("jobs_finished_of_a_project", "jobs", ["finished_at", "project"])
    _create_triggers()
    op.execute("DROP TRIGGER audit_no_delete")
    op.execute(
        "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN OLD.at > strftime('%Y-%m-%d %H:%M:%S', 'now', '-30 days') "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only for 30 days'); END"
    )


def _create_triggers() -> None:
    def create(name: str, event: str, table: str, *statements: str) -> None:
        op.execute(f"CREATE TRIGGER {name} AFTER {event} ON {table} BEGIN {' '.join(f'{text};' for text in statements)} END")

    outdate = "DELETE FROM referrers WHERE kind = '{}' AND id = {}"
    forget = "DELETE FROM artifact_references WHERE kind = '{}' AND id = {}"
    create("references_after_a_cell", "UPDATE", "cells", outdate.format("job", "NEW.job_id"))
    create("references_after_a_report", "INSERT", "reports", outdate.format("job", "NEW.job_id"))
    create("references_after_a_revision", "UPDATE", "reports", outdate.format("job", "NEW.job_id"))
    create("references_after_a_job", "DELETE", "jobs", outdate.format("job", "OLD.id"), forget.format("job", "OLD.id"))
    for kind, table in _CACHES:
        create(f"references_after_{table}", "UPDATE", table, outdate.format(kind, "NEW.key"))
        of_row = (text.format(kind, "OLD.key") for text in (outdate, forget, "DELETE FROM uses WHERE kind = '{}' AND id = {}"))
        create(f"references_without_{table}", "DELETE", table, *of_row)
