"""What admins have set for devices: labels and drains."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "device_settings",
        sa.Column("device_id", sa.String, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
