"""Tags: names for jobs, such as baselines. A tag is unique in its project and can be used wherever a job id can."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select

from etfarm.server.access.ownership import require_owner
from etfarm.server.access.scope import Scope
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.wire.errors import error_for

LATEST = "latest"
"""Reserved name of the newest job; not a tag."""

MAX_TAGS: Final = 100
"""Maximum number of tags of one job."""

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_JOB_ID = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True)
class Tag:
    """A tag of a project."""

    project: str
    job_id: str
    owner: str


class Tags:
    """The tags of jobs. The first user of a tag owns it, whichever job it is moved to."""

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now

    async def put(self, tag: str, job_id: str, *, project: str, caller: str, is_admin: bool) -> str:
        """Assign a tag to a job, moving it if another job has it.

        Args:
            project: the job's project.

        Returns:
            The id of the job that had the tag before; empty if no job had it.

        Raises:
            BAD_TAG: the tag is not a valid name.
            TOO_MANY_TAGS: the job already has the maximum number of tags.
            NotYours: the tag belongs to another user.
        """
        _check(tag)

        def write(connection: Connection) -> str:
            known = find_tag(connection, tag, Scope(frozenset({project})))
            _validate_owner(tag, known, caller, is_admin)
            if len(set(tags_of(connection, job_id)) - {tag}) >= MAX_TAGS:
                raise error_for(
                    "TOO_MANY_TAGS",
                    f"Job {job_id} has {MAX_TAGS} tags.",
                    "Remove one with `etfarm report tag NAME --remove`.",
                    limit=MAX_TAGS,
                )
            row = {
                "project": project,
                "name": tag,
                "owner": known.owner if known else caller,
                "job_id": job_id,
                "tagged_at": self._now(),
            }
            upsert = insert(schema.tags).values(row).on_conflict_do_update(index_elements=["project", "name"], set_=row)
            connection.execute(upsert)
            return known.job_id if known else ""

        return await self._database.write(write, durable=True)

    async def remove(self, tag: str, job_id: str, *, scope: Scope, caller: str, is_admin: bool) -> str:
        """Remove a tag.

        Args:
            job_id: id of the job that must have the tag; empty for any job.
            scope: the caller's scope: the tag is the active project's, else that of the only project that has it.

        Returns:
            The id of the job that had the tag.

        Raises:
            TAG_NOT_FOUND: no job has the tag, or another job than `job_id` has it.
            NotYours: the tag belongs to another user.
            TAG_AMBIGUOUS: several projects have the tag.
        """

        def write(connection: Connection) -> str:
            known = find_tag(connection, tag, scope)
            if known is None or (job_id and known.job_id != job_id):
                message = f"Job {known.job_id} has the tag {tag!r}, not {job_id}." if known else f"No job has the tag {tag!r}."
                raise error_for("TAG_NOT_FOUND", message, "`etfarm jobs list` shows the tags.", tag=tag)
            _validate_owner(tag, known, caller, is_admin)
            connection.execute(delete(schema.tags).where(schema.tags.c.name == tag, schema.tags.c.project == known.project))
            return known.job_id

        return await self._database.write(write, durable=True)


def find_tag(connection: Connection, name: str, scope: Scope) -> Tag | None:
    """Return the tag with this name: the active project's, else that of the only project in the scope that has it.

    Raises:
        TAG_AMBIGUOUS: several projects of the scope have the tag.
    """
    tags = schema.tags.c
    query = select(tags.project, tags.job_id, tags.owner).where(tags.name == name, scope.clause(tags.project))
    rows = [Tag(row.project, row.job_id, row.owner) for row in connection.execute(query.order_by(tags.project))]
    of_active = [tag for tag in rows if tag.project == scope.active]
    if len(of_active or rows) > 1:
        projects = ", ".join(tag.project for tag in rows)
        raise error_for(
            "TAG_AMBIGUOUS", f"Several projects have the tag {name!r}: {projects}.", "Choose one with --project.", tag=name
        )
    return next(iter(of_active or rows), None)


_TAGS: Final = (
    select(schema.tags.c.name).where(schema.tags.c.job_id == bindparam("job")).order_by(schema.tags.c.name).limit(MAX_TAGS)
)


def tags_of(connection: Connection, job_id: str) -> Sequence[str]:
    """Return a job's tags sorted by name, at most MAX_TAGS."""
    return connection.execute(_TAGS, {"job": job_id}).scalars().all()


def _check(tag: str) -> None:
    if not _TAG.match(tag):
        raise error_for(
            "BAD_TAG",
            f"{tag[:80]!r} is not a valid tag.",
            "Use letters, digits, dots, dashes and underscores, 64 at most, a letter or digit first.",
            tag=tag[:80],
        )
    if tag == LATEST or _JOB_ID.match(tag):
        raise error_for(
            "BAD_TAG", f"{tag!r} is reserved: it already selects a job.", "Choose another tag, for example baseline.", tag=tag
        )


def _validate_owner(name: str, tag: Tag | None, caller: str, is_admin: bool) -> None:
    """Raise an error if the tag belongs to another user.

    Raises:
        NotYours: the tag belongs to another user.
    """
    if tag is not None:
        remedy = "Ask the owner or an admin, or choose another tag."
        require_owner(tag.owner, f"The tag {name!r}", caller, is_admin=is_admin, remedy=remedy, tag=name)
