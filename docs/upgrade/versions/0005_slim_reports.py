"""Beside each report what a history tells of it: without samples, operators, numeric gap and series."""

import sqlalchemy as sa
from alembic import op
from release_0_1.messages import message_class

revision = "0005"
down_revision = "0004"

_LARGE = (("latency", "samples_ns"), ("profile", "times_ns"), ("telemetry", "series"), ("interleaved", "ratios"))


def upgrade() -> None:
    op.add_column("reports", sa.Column("slim", sa.LargeBinary))
    reports = sa.table("reports", *(sa.column(name) for name in ("id", "body", "slim")))
    connection = op.get_bind()
    # One body at a time: each may have a million samples.
    for report_id in connection.execute(sa.select(reports.c.id)).scalars().all():
        body = connection.execute(sa.select(reports.c.body).where(reports.c.id == report_id)).scalar_one()
        report = message_class("Report").FromString(body)
        for name in ("operators", "numeric_gap"):
            report.ClearField(name)
        for holder, name in _LARGE:
            if report.HasField(holder):
                getattr(report, holder).ClearField(name)
        connection.execute(sa.update(reports).where(reports.c.id == report_id).values(slim=report.SerializeToString()))
