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
    op.bulk_insert(farm, [{"id": str(_new_id()), "created_at": datetime.now(UTC).replace(tzinfo=None)}])


def _new_id() -> uuid.UUID:
    """Return an id that depends on the oldest token only: a backup of before gets the id that the farm itself has got."""
    tokens = sa.table("tokens", sa.column("id"), sa.column("secret_hash", sa.LargeBinary), sa.column("created_at"))
    oldest = sa.select(tokens.c.id, tokens.c.secret_hash).order_by(tokens.c.created_at, tokens.c.id).limit(1)
    row = op.get_bind().execute(oldest).first()
    if row is None:  # no agent has enrolled
        return uuid.uuid4()
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{row.id} {bytes(row.secret_hash).hex()}")
