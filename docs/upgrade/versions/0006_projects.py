"""Projects own jobs, tags and artifacts; tokens, agent identities and an audit log. All that exists belongs to `default`."""

import sqlalchemy as sa
from alembic import op
from release_0_1.messages import message_class

revision = "0006"
down_revision = "0005"

_DEFAULT = "default"


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("storage_limit_bytes", sa.Integer),
    )
    op.execute(f"INSERT INTO projects VALUES ('{_DEFAULT}', strftime('%Y-%m-%d %H:%M:%f000', 'now'), 'farm', NULL)")
    op.create_table(
        "members",
        sa.Column("project", sa.String, sa.ForeignKey("projects.name"), primary_key=True),
        sa.Column("principal", sa.String, primary_key=True, index=True),
        sa.Column("added_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("principal", sa.String, nullable=False, index=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("enrolment", sa.Boolean, nullable=False),
        sa.Column("agent_id", sa.String),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("expires_at", sa.DateTime),
        sa.Column("revoked_at", sa.DateTime),
        sa.Column("last_used_at", sa.DateTime),
    )
    op.create_table(
        "agents",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("principal", sa.String, nullable=False),
        sa.Column("bound_at", sa.DateTime, nullable=False),
        sa.Column("bound_by", sa.String, nullable=False),
    )
    op.create_table(
        "device_projects",
        sa.Column("device_id", sa.String, primary_key=True),
        sa.Column("project", sa.String, sa.ForeignKey("projects.name"), primary_key=True),
    )
    _create_audit()
    _create_holdings()
    _create_project_compilations()
    _move_jobs_and_tags()


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("principal", sa.String, nullable=False, index=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("peer", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False, index=True),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )


def _create_holdings() -> None:
    op.create_table(
        "holdings",
        sa.Column("holder", sa.String, primary_key=True),
        sa.Column("digest", sa.String, primary_key=True, index=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("held_at", sa.DateTime, nullable=False),
    )
    op.execute(f"INSERT INTO holdings SELECT '{_DEFAULT}', digest, owner, stored_at FROM artifacts")
    of_farm = "artifacts.digest IN (SELECT digest FROM bundles)"
    op.execute(f"INSERT INTO holdings SELECT 'farm', digest, owner, stored_at FROM artifacts WHERE {of_farm}")


def _create_project_compilations() -> None:
    op.create_table(
        "project_compilations",
        sa.Column("project", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
    )
    connection = op.get_bind()
    cells = sa.table("cells", sa.column("body"))
    keys = set()
    for body in connection.execute(sa.select(cells.c.body)).scalars():
        cell = message_class("Cell").FromString(body)
        keys |= {cell.compilation_key, cell.numerics_compilation_key}
    table = sa.table("project_compilations", sa.column("project"), sa.column("key"))
    for key in sorted(keys - {""}):
        connection.execute(table.insert().values(project=_DEFAULT, key=key))


def _move_jobs_and_tags() -> None:
    op.add_column("jobs", sa.Column("project", sa.String, nullable=False, server_default=_DEFAULT))
    op.add_column("jobs", sa.Column("takeups", sa.Integer, nullable=False, server_default="0"))
    op.create_index("jobs_of_a_project", "jobs", ["project", "number"])
    op.rename_table("tags", "tags_before")
    op.drop_index("ix_tags_job_id", "tags_before")
    op.create_table(
        "tags",
        sa.Column("project", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False, index=True),
        sa.Column("tagged_at", sa.DateTime, nullable=False),
    )
    op.execute(f"INSERT INTO tags SELECT '{_DEFAULT}', name, owner, job_id, tagged_at FROM tags_before")
    op.drop_table("tags_before")
