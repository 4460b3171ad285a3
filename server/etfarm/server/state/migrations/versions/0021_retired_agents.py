"""When agents were retired."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("agents", sa.Column("retired_at", sa.DateTime))
