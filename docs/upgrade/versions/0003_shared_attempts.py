"""An attempt may be several cells': each has a row of its own, with its own result."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_KEPT = "id, cell_id, device_id, started_at, finished_at, error, result"


def upgrade() -> None:
    # SQLite cannot change a primary key, so the rows move to a new table.
    op.rename_table("attempts", "attempts_of_one_cell")
    op.drop_index("ix_attempts_cell_id")
    op.create_table(
        "attempts",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("cell_id", sa.String, sa.ForeignKey("cells.id"), primary_key=True, index=True),
        sa.Column("device_id", sa.String, nullable=False),
        sa.Column("started_at", sa.DateTime, nullable=False),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("error", sa.LargeBinary),
        sa.Column("result", sa.LargeBinary),
    )
    op.execute(f"INSERT INTO attempts ({_KEPT}) SELECT {_KEPT} FROM attempts_of_one_cell")
    op.drop_table("attempts_of_one_cell")
