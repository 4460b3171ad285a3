"""Step 10: names that people give jobs, as baselines. A tag is the farm's, unique, and stands for its job wherever an id does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.wire.errors import Kind, UserError

LATEST = "latest"
"""What stands for the newest job; no tag."""

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_JOB_ID = re.compile(r"[0-9a-f]{16}\Z")


class BadTag(UserError):
    """A tag has other characters than tags have, or would be taken for a job's id."""

    reason = "BAD_TAG"


class TagNotFound(UserError):
    """No job has the tag, or another one than was named."""

    reason = "TAG_NOT_FOUND"
    kind = Kind.NOT_FOUND


class TagNotYours(UserError):
    """Somebody else gave the tag."""

    reason = "NOT_YOURS"
    kind = Kind.PERMISSION_DENIED


class Tags:
    """Gives jobs tags and takes them away. Who gave a tag first owns it, whichever job it moves to."""

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now

    async def put(self, tag: str, job_id: str, *, caller: str, is_admin: bool) -> str:
        """The tag names this job from now on.

        Returns:
            The id of the job that had it before; empty where none had.

        Raises:
            BadTag: it is no name for a job.
            TagNotYours: it is another caller's.
        """
        _check(tag)

        def write(connection: Connection) -> str:
            known = _row(connection, tag, caller, is_admin)
            row = {
                "project": DEFAULT_PROJECT,
                "name": tag,
                "owner": known[1] if known else caller,
                "job_id": job_id,
                "tagged_at": self._now(),
            }
            again = insert(schema.tags).values(row).on_conflict_do_update(index_elements=["project", "name"], set_=row)
            connection.execute(again)
            return known[0] if known else ""

        return await self._database.write(write, durable=True)

    async def remove(self, tag: str, job_id: str, *, caller: str, is_admin: bool) -> str:
        """The tag names no job any more.

        Args:
            job_id: of the job that has it; whichever one has it where empty.

        Returns:
            The id of the job that had it.

        Raises:
            TagNotFound: no job has it, or another one than `job_id`.
            TagNotYours: it is another caller's.
        """

        def write(connection: Connection) -> str:
            known = _row(connection, tag, caller, is_admin)
            if known is None or (job_id and known[0] != job_id):
                whose = f"Job {known[0]} has the tag {tag!r}, not {job_id}." if known else f"No job has the tag {tag!r}."
                raise TagNotFound(whose, "`etfarm jobs list` shows the tags.", tag=tag)
            connection.execute(delete(schema.tags).where(schema.tags.c.name == tag))
            return known[0]

        return await self._database.write(write, durable=True)


def tagged(connection: Connection, tag: str) -> str | None:
    """The id of the job that has the tag."""
    return connection.execute(select(schema.tags.c.job_id).where(schema.tags.c.name == tag)).scalar()


def tags_of(connection: Connection, job_id: str) -> Sequence[str]:
    """A job's tags, by name."""
    query = select(schema.tags.c.name).where(schema.tags.c.job_id == job_id).order_by(schema.tags.c.name)
    return connection.execute(query).scalars().all()


def _check(tag: str) -> None:
    if not _TAG.match(tag):
        raise BadTag(
            f"{tag[:80]!r} is no tag.", "Use letters, digits, dots, dashes and underscores, 64 at most, a letter or digit first.",
            tag=tag[:80],
        )  # fmt: skip
    if tag == LATEST or _JOB_ID.match(tag):
        raise BadTag(f"{tag!r} stands for a job already.", "Choose another tag, for example baseline.", tag=tag)


def _row(connection: Connection, tag: str, caller: str, is_admin: bool) -> tuple[str, str] | None:
    """The job and the owner of a tag that the caller may change."""
    query = select(schema.tags.c.job_id, schema.tags.c.owner).where(schema.tags.c.name == tag)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    if row.owner != caller and not is_admin:
        raise TagNotYours(
            f"The tag {tag!r} belongs to {row.owner}.", "Ask them or an admin, or choose another.", tag=tag, owner=row.owner
        )
    return row.job_id, row.owner
