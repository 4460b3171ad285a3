"""Tags of jobs, what analyses found, and of reports what a history is searched by."""

import sqlalchemy as sa
from alembic import op
from release_0_1.messages import message_class

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "tags",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False, index=True),
        sa.Column("tagged_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "analyses",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("made_at", sa.DateTime, nullable=False),
    )
    for column in (
        sa.Column("model_digest", sa.String, nullable=False, server_default=""),
        sa.Column("recipe", sa.String),
        sa.Column("method", sa.String),
        sa.Column("threads", sa.Integer),
    ):
        op.add_column("reports", column)
    op.create_index("reports_of_a_model_digest", "reports", ["model_digest", "created_at"])
    reports = sa.table("reports", *(sa.column(name) for name in ("id", "body", "model_digest", "recipe", "method", "threads")))
    connection = op.get_bind()
    # One body at a time: each may have a million samples.
    for report_id in connection.execute(sa.select(reports.c.id)).scalars().all():
        body = connection.execute(sa.select(reports.c.body).where(reports.c.id == report_id)).scalar_one()
        report = message_class("Report").FromString(body)
        connection.execute(
            sa.update(reports)
            .where(reports.c.id == report_id)
            .values(
                model_digest=report.model.digest,
                recipe=report.recipe if report.HasField("recipe") else None,
                method=report.method if report.HasField("method") else None,
                threads=report.threads if report.HasField("threads") else None,
            )
        )
