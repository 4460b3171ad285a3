"""When a device's last scheduled health run ended, and the last time that retention trusted."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    # The last run of any kind no longer stands for it.
    op.add_column("device_health", sa.Column("scheduled_at", sa.DateTime))
    op.execute("UPDATE device_health SET scheduled_at = last_run_at")
    op.create_table(
        "trusted_times",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("at", sa.DateTime, nullable=False),
    )
