"""The tables of etfarm 0.3.0, the first release.

They are those of `etfarm.server.state.schema` until a migration changes these: it first replaces this call by what the call does.
"""

from alembic import op

from etfarm.server.state import sqlite_tables

revision = "0020"
down_revision = None


def upgrade() -> None:
    sqlite_tables.create_baseline(op.get_bind())
