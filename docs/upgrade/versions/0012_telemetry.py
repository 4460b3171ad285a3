"""Stored readings of devices."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "device_telemetry",
        sa.Column("device_id", sa.String, primary_key=True),
        sa.Column("minute", sa.Integer, primary_key=True, index=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
