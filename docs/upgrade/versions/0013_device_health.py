"""The health of devices, and the events that changed it."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "device_health",
        sa.Column("device_id", sa.String, primary_key=True),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("since", sa.DateTime, nullable=False),
        sa.Column("score", sa.Float, nullable=False),
        sa.Column("scored_at", sa.DateTime),
        sa.Column("faults", sa.Integer, nullable=False),
        sa.Column("fault", sa.String, nullable=False),
        sa.Column("slower", sa.String, nullable=False),
        sa.Column("good_runs", sa.Integer, nullable=False),
        sa.Column("failed_runs", sa.Integer, nullable=False),
        sa.Column("last_run_at", sa.DateTime),
        sa.Column("probe_at", sa.DateTime),
        sa.Column("cleared_at", sa.DateTime),
    )
    op.create_table(
        "health_events",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("device_id", sa.String, nullable=False),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("kind", sa.Integer, nullable=False),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("series", sa.String, nullable=False),
        sa.Column("p50_ns", sa.Float),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("health_events_of_a_device", "health_events", ["device_id", "number"])
    op.create_index("health_runs_of_a_series", "health_events", ["device_id", "series", "number"])
