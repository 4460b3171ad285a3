"""What a job's request was, so that its id is refused for another one; earlier jobs have none. Jobs are measured again."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("request_digest", sa.LargeBinary))
    op.execute("DELETE FROM referrers WHERE kind = 'job'")
