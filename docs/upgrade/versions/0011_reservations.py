"""Reservations of devices; the models and times of jobs, which lists are filtered by."""

import sqlalchemy as sa
from alembic import op
from google.protobuf.message import DecodeError

from etfarm.v1.job_pb2 import Cell

revision = "0011"
down_revision = "0009"

_AT_ONCE = 1_000


def upgrade() -> None:
    op.create_table(
        "reservations",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("request_id", sa.String),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("ended_at", sa.DateTime, index=True),
        sa.Column("how", sa.String),
        sa.UniqueConstraint("owner", "request_id"),
    )
    models = op.create_table(
        "job_models",
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
    )
    op.create_index("jobs_of_a_time", "jobs", ["submitted_at", "number"])
    connection = op.get_bind()
    cells = connection.execute(sa.text("SELECT job_id, body FROM cells"))
    while rows := cells.fetchmany(_AT_ONCE):
        names = {(row.job_id, _name(row.body)) for row in rows}
        connection.execute(
            models.insert().prefix_with("OR IGNORE"), [{"job_id": job_id, "model": name} for job_id, name in sorted(names)]
        )


def _name(body: bytes) -> str:
    try:
        return Cell.FromString(body).candidate_name
    except DecodeError:  # the job is found without a filter by model
        return ""
