"""When agents were retired."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("agents", sa.Column("retired_at", sa.DateTime))
