"""`etfarm projects`: list and create projects, change their members and storage limits."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.admin.projects import AsyncProjects
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import Project

Answer = TypeVar("Answer")

_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)\Z", re.ASCII)

Name = Annotated[str, typer.Argument(metavar="PROJECT", help="The project's name.")]
Storage = Annotated[
    str, typer.Option("--storage", metavar="SIZE", help="Limit of all its artifacts together, such as 20GiB, or default.")
]


def main(argv: list[str]) -> int:
    """Run `etfarm projects`."""
    commands: dict[str, Command] = {"list": list_, "create": create, "add": add, "remove": remove, "limit": limit}
    return execute(
        commands,
        argv,
        "projects",
        "List and create projects, and change their members and limits. Only admins change anything.",
    )


def list_(listing: Annotated[JsonListing, Key("projects")], connection: Connection) -> None:
    """List your projects; an admin sees all."""
    projects = listing.record(connection.call(lambda farm: farm.projects.list()))
    if not listing.is_on_stdout:
        _show(projects)


def create(
    connection: Connection,
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Lower-case letters, digits, dots, dashes, underscores.")],
    member: Annotated[list[str] | None, typer.Option("--member", metavar="NAME", help="A token's name; repeatable.")] = None,
    storage: Storage = "",
) -> None:
    """Create a project."""
    limit_bytes = size_of(storage)
    created = connection.call(lambda farm: farm.projects.create(project, member or (), storage_limit_bytes=limit_bytes))
    _show([created])


def add(
    connection: Connection,
    project: Name,
    members: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of tokens.")],
) -> None:
    """Add members to a project. A member's first project replaces `default`, unless you add the member there as well."""
    _show([_each(members, lambda projects, name: projects.add_member(project, name), connection)])


def remove(
    connection: Connection,
    project: Name,
    members: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of tokens.")],
) -> None:
    """Remove members from a project. Someone without any project is a member of `default`; to lock them out, revoke the token."""
    _show([_each(members, lambda projects, name: projects.remove_member(project, name), connection)])


def limit(connection: Connection, project: Name, storage: Storage) -> None:
    """Change the storage limit of a project's artifacts."""
    limit_bytes = size_of(storage)
    _show([connection.call(lambda farm: farm.projects.limit(project, limit_bytes))])


def size_of(text: str) -> int | None:
    """Return the bytes of `20GiB` or `1048576`; None for the server's default.

    Raises:
        USAGE: the text is not a size.
    """
    if text in ("", "default"):
        return None
    match = _SIZE.match(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise error_for(
            "USAGE", f"--storage must be a size or default, got {text!r}.", "Give for example --storage 20GiB.", value=text
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def _each(names: Sequence[str], do: Callable[[AsyncProjects, str], Awaitable[Project]], connection: Connection) -> Project:
    async def change(farm: AsyncFarm) -> Project:
        return [await do(farm.projects, name) for name in names][-1]

    return connection.call(change)


def _show(projects: Sequence[Project]) -> None:
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    if not projects:
        tell("You are not a member of any project.")
        return
    rows = [
        (
            project.name,
            ", ".join(project.members) or "-",
            str(project.live_jobs),
            units.size(project.storage_bytes),
            "default" if project.storage_limit_bytes is None else units.size(project.storage_limit_bytes),
        )
        for project in projects
    ]
    output.show_table(
        ("PROJECT", "MEMBERS", "LIVE JOBS", "STORED", "LIMIT"), rows, right=("LIVE JOBS", "STORED"), shrink=("MEMBERS",)
    )
