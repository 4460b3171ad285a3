"""The farm's id, by which agents recognize it."""

import uuid
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    farm = op.create_table(
        "farm",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("created_at", sa.DateTime, nullable=False),
    )
    op.bulk_insert(farm, [{"id": str(uuid.uuid4()), "created_at": datetime.now(UTC).replace(tzinfo=None)}])
