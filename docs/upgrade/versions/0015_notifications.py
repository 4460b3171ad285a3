"""Webhooks, the outbox of notices with its log, and the secrets that sign notices to the addresses of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("events", sa.String, nullable=False),
        sa.Column("secret", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("configured", sa.Boolean, nullable=False),
        sa.Column("dropped", sa.Integer, nullable=False),
    )
    op.create_table(
        "deliveries",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("event_id", sa.String, nullable=False),
        sa.Column("webhook_id", sa.String, nullable=False),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("event", sa.String, nullable=False),
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("due_at", sa.DateTime),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("error", sa.String, nullable=False),
        sa.Column("answer", sa.String, nullable=False),
        sa.Column("ended_at", sa.DateTime),
        sa.UniqueConstraint("event_id", "webhook_id", "url"),
    )
    op.create_index("deliveries_that_are_due", "deliveries", ["state", "due_at"])
    op.create_index("deliveries_of_a_job", "deliveries", ["job_id"])
    op.create_table(
        "notify_secrets",
        sa.Column("project", sa.String, primary_key=True),
        sa.Column("secret", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
    )
