"""Projects and their members: the projects that a caller sees, and the project that owns what a call creates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, delete, func, select, update

from etfarm.server.access.scope import DEFAULT_PROJECT, FARM_HOLDER, Scope
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.common_pb2 import Principal, Role
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.names import PROJECT_VARIABLE, is_project_name

MAX_STORAGE_BYTES: Final = 1 << 62
"""Maximum storage limit of a project. It fits a 64-bit integer of the database, with headroom for sums."""

MAX_PRINCIPAL: Final = 200
"""Maximum length of a principal's name, in characters."""

_RESERVED: Final = frozenset({FARM_HOLDER})
"""Names of artifact holders that are not projects, and which no project may use."""


def project_not_found(name: str) -> EtfarmError:
    """Return the error of a project that does not exist, or that the caller is not a member of."""
    return error_for(
        "PROJECT_NOT_FOUND", f"There is no project {name[:80]!r}.", "`etfarm projects list` shows yours.", project=name[:80]
    )


def project_ambiguous(projects: Sequence[str]) -> EtfarmError:
    """Return the error of a call that names no project, from a member of several projects other than `default`."""
    listed = ", ".join(projects)
    return error_for(
        "PROJECT_AMBIGUOUS",
        f"You are a member of {len(projects)} projects: {listed}.",
        f"Name one with --project (project=) or {PROJECT_VARIABLE}.", projects=listed,
    )  # fmt: skip


@dataclass(frozen=True)
class Project:
    """A project with its current members and usage."""

    name: str
    created_at: datetime
    created_by: str
    members: tuple[str, ...]
    storage_limit_bytes: int | None
    """Storage limit; None for the server's default."""
    storage_bytes: int = 0
    live_jobs: int = 0


class Projects:
    """The projects of a farm. Names and members are cached in memory, since each call looks them up."""

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database = database
        self._now = now
        self._limits: dict[str, int | None] = {DEFAULT_PROJECT: None}
        self._of_principal: dict[str, frozenset[str]] = {}

    async def load(self) -> None:
        """Load names, limits and members. Call it once before the server starts serving."""

        def read(connection: Connection) -> tuple[dict[str, int | None], list[tuple[str, str]]]:
            limits = connection.execute(select(schema.projects.c.name, schema.projects.c.storage_limit_bytes)).all()
            members = connection.execute(select(schema.members.c.principal, schema.members.c.project)).all()
            return {row.name: row.storage_limit_bytes for row in limits}, [(row.principal, row.project) for row in members]

        self._limits, members = await self._database.read(read)
        self._of_principal = {}
        for principal, project in members:
            self._of_principal[principal] = self._of_principal.get(principal, frozenset()) | {project}

    def names(self) -> Sequence[str]:
        """Return the names of all projects, sorted."""
        return sorted(self._limits)

    def membership(self, principal: str) -> frozenset[str]:
        """Return the projects of a principal; `default` for a principal without projects."""
        return self._of_principal.get(principal) or frozenset({DEFAULT_PROJECT})

    def storage_limit_bytes(self, project: str) -> int | None:
        """Return the storage limit of a project's artifacts; None for the server's default."""
        return self._limits.get(project)

    def resolve(self, principal: Principal, requested: str = "") -> Principal:
        """Return the principal with the projects that it sees and the project that owns what the call creates.

        `project` is empty if the caller must choose one (`require_active` then raises), and for agents, which create nothing.

        Args:
            requested: the project that the call names; empty if it names none.

        Raises:
            PROJECT_NOT_FOUND: there is no such project, or the caller is not a member.
        """
        resolved = Principal()
        resolved.CopyFrom(principal)
        del resolved.projects[:]
        resolved.project = ""
        if principal.role == Role.ROLE_AGENT:
            return resolved
        if principal.role == Role.ROLE_ADMIN:
            if requested and requested not in self._limits:
                raise project_not_found(requested)
            resolved.project = requested or DEFAULT_PROJECT
            return resolved
        memberships = self.membership(principal.name)
        if requested and requested not in memberships:
            raise project_not_found(requested)
        resolved.projects.extend(sorted(memberships))
        if requested or len(memberships) == 1:
            resolved.project = requested or next(iter(memberships))
        elif DEFAULT_PROJECT in memberships:
            resolved.project = DEFAULT_PROJECT
        return resolved

    def require(self, name: str) -> str:
        """Return `name` if a project of this name exists.

        Raises:
            PROJECT_NOT_FOUND: no project has this name.
        """
        if name not in self._limits:
            raise project_not_found(name)
        return name

    async def create(self, name: str, members: Iterable[str], storage_limit_bytes: int | None, *, by: str) -> Project:
        """Create a project.

        Raises:
            BAD_PROJECT: the name, the limit or a member's name is not allowed.
            PROJECT_EXISTS: another project has the name.
        """
        if not is_project_name(name):
            raise error_for(
                "BAD_PROJECT",
                f"{name[:80]!r} cannot be a project's name.",
                "Use lower-case letters, digits, dots, dashes and underscores, at most 64, a letter or digit first.",
            )
        if name in _RESERVED:
            raise error_for(
                "BAD_PROJECT", f"The name {name!r} is reserved for the server's own artifacts.", "Choose another name."
            )
        _validate_limit(storage_limit_bytes)
        principals = sorted({_validated(member) for member in members})
        at = self._now()
        project = {"name": name, "created_at": at, "created_by": by, "storage_limit_bytes": storage_limit_bytes}
        rows = [{"project": name, "principal": principal, "added_at": at} for principal in principals]

        def write(connection: Connection) -> None:
            added = insert(schema.projects).values(project).on_conflict_do_nothing().returning(schema.projects.c.name)
            if connection.execute(added).first() is None:
                raise error_for("PROJECT_EXISTS", f"Project {name!r} already exists.", "Choose another name.", project=name)
            if rows:
                connection.execute(schema.members.insert(), rows)

        await self._write(write)
        return await self.get(name)

    async def update(self, name: str, storage_limit_bytes: int | None) -> Project:
        """Set a project's storage limit; None selects the server's default.

        Raises:
            PROJECT_NOT_FOUND: no project has this name.
            BAD_PROJECT: the limit is not allowed.
        """
        _validate_limit(storage_limit_bytes)
        table = schema.projects
        self.require(name)
        change = update(table).where(table.c.name == name).values(storage_limit_bytes=storage_limit_bytes)
        await self._write(lambda connection: connection.execute(change))
        return await self.get(name)

    async def add_member(self, name: str, principal: str) -> Project:
        """Add a member; do nothing if the principal is already a member.

        Raises:
            PROJECT_NOT_FOUND: no project has this name.
            BAD_PROJECT: `principal` is not a valid name.
        """
        self.require(name)
        row = {"project": name, "principal": _validated(principal), "added_at": self._now()}
        added = insert(schema.members).values(row).on_conflict_do_nothing()
        await self._write(lambda connection: connection.execute(added))
        return await self.get(name)

    async def remove_member(self, name: str, principal: str) -> Project:
        """Remove a member, effective from the principal's next call.

        Raises:
            PROJECT_NOT_FOUND: no project has this name.
            MEMBER_NOT_FOUND: the principal is not a member.
        """
        self.require(name)
        table = schema.members

        def write(connection: Connection) -> None:
            removed = delete(table).where(table.c.project == name, table.c.principal == principal)
            if connection.execute(removed).rowcount != 1:
                raise error_for(
                    "MEMBER_NOT_FOUND",
                    f"{principal[:80]!r} is not a member of {name}.", "`etfarm projects list` shows the members.",
                    project=name, principal=principal[:80],
                )  # fmt: skip

        await self._write(write)
        return await self.get(name)

    async def get(self, name: str) -> Project:
        """Return one project.

        Raises:
            PROJECT_NOT_FOUND: no project has this name.
        """
        projects = await self._database.read(lambda connection: _read(connection, [name]))
        if not projects:
            raise project_not_found(name)
        return projects[0]

    async def page(self, scope: Scope, after: str, size: int) -> tuple[Sequence[Project], str]:
        """Return a page of the scope's projects with names after `after`, sorted, and its last name if more follow."""
        names = [name for name in self.names() if scope.allows(name) and name > after]
        projects = await self._database.read(lambda connection: _read(connection, names[:size]))
        return projects, names[size - 1] if len(names) > size else ""

    async def _write(self, do: Callable[[Connection], object]) -> None:
        """Change the database and then the cache, so that a change is in force before its caller gets an answer."""
        await self._database.write(do, durable=True)
        await self.load()


def _read(connection: Connection, names: Sequence[str]) -> list[Project]:
    projects, members, holdings = schema.projects, schema.members, schema.holdings.c
    of_project: dict[str, list[str]] = {}
    query = select(members.c.project, members.c.principal).where(members.c.project.in_(names)).order_by(members.c.principal)
    for row in connection.execute(query):
        of_project.setdefault(row.project, []).append(row.principal)
    size = func.sum(schema.artifacts.c.size_bytes)
    held = select(holdings.holder, size.label("bytes")).join(schema.artifacts, schema.artifacts.c.digest == holdings.digest)
    of_projects = held.where(holdings.holder.in_(names)).group_by(holdings.holder)
    stored = {row.holder: int(row.bytes or 0) for row in connection.execute(of_projects)}
    jobs = schema.jobs.c
    live = (
        select(jobs.project, func.count().label("jobs"))
        .where(jobs.project.in_(names), jobs.finished_at.is_(None))
        .group_by(jobs.project)
    )
    live_counts = {row.project: row.jobs for row in connection.execute(live)}
    return [
        Project(
            row.name, row.created_at, row.created_by, tuple(of_project.get(row.name, ())), row.storage_limit_bytes,
            stored.get(row.name, 0), live_counts.get(row.name, 0),
        )
        for row in connection.execute(select(projects).where(projects.c.name.in_(names)).order_by(projects.c.name))
    ]  # fmt: skip


def require_active(principal: Principal) -> str:
    """Return the project that owns what a resolved caller creates.

    Raises:
        PROJECT_AMBIGUOUS: the caller has to choose a project.
    """
    if not principal.project:
        raise project_ambiguous(list(principal.projects))
    return principal.project


def _validated(principal: str) -> str:
    if not principal or len(principal) > MAX_PRINCIPAL or not principal.isprintable() or principal != "".join(principal.split()):
        raise error_for(
            "BAD_PROJECT",
            f"{principal[:80]!r} cannot be a principal's name.",
            f"Give the name of a token: at most {MAX_PRINCIPAL} printable characters without blanks.",
        )
    return principal


def _validate_limit(storage_limit_bytes: int | None) -> None:
    if storage_limit_bytes is not None and not 0 <= storage_limit_bytes <= MAX_STORAGE_BYTES:
        raise error_for(
            "BAD_PROJECT",
            f"storage_limit_bytes must be 0 to {MAX_STORAGE_BYTES}, got {storage_limit_bytes}.",
            "Leave it out for the default.",
        )
