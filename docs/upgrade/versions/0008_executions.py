"""What reports of the same execution and jobs of a name are found by.

Earlier reports have no runs, so nothing is filled in for them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name in ("execution", "device_kind"):
        op.add_column("reports", sa.Column(name, sa.String, nullable=False, server_default=""))
    for index, column in (("reports_of_an_execution", "execution"), ("reports_of_a_device_kind", "device_kind")):
        op.create_index(index, "reports", [column, "created_at"])
    op.create_index("jobs_of_a_name", "jobs", ["name", "number"])
