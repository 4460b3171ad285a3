"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, nullable=False, unique=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("request_id", sa.String, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.Column("submitted_at", sa.DateTime, nullable=False),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("last_sequence", sa.Integer, nullable=False),
        sa.UniqueConstraint("owner", "request_id"),
    )
    op.create_table(
        "cells",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False, index=True),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False, index=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("cell_id", sa.String, sa.ForeignKey("cells.id"), nullable=False, index=True),
        sa.Column("device_id", sa.String, nullable=False),
        sa.Column("started_at", sa.DateTime, nullable=False),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("error", sa.LargeBinary),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("sequence", sa.Integer, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "log_lines",
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("cell_id", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
    )
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("stored_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "compilations",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("compiled_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "devices",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("last_seen_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "bundles",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("arch", sa.String, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("added_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "reports",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("cell_id", sa.String, sa.ForeignKey("cells.id"), nullable=False, unique=True),
        sa.Column("model_name", sa.String, nullable=False),
        sa.Column("recipe_digest", sa.String, nullable=False),
        sa.Column("device_id", sa.String, nullable=False),
        sa.Column("p50_ns", sa.Float),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("reports_of_a_job", "reports", ["job_id"])
    op.create_index("reports_of_a_model", "reports", ["model_name", "created_at"])
