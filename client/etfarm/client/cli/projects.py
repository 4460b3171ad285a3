"""Step 1, command line: `etfarm projects`, whose jobs, artifacts, tags and reports are whose."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, Usage, execute, run_async
from etfarm.client.cli.terminal import tell

if TYPE_CHECKING:
    from etfarm.client.models import Project
    from etfarm.client.projects import AsyncProjects

Answer = TypeVar("Answer")

_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)\Z", re.ASCII)

Name = Annotated[str, typer.Argument(metavar="PROJECT", help="The project's name.")]
Storage = Annotated[
    str, typer.Option("--storage", metavar="SIZE", help="What its artifacts may take together, 20GiB or default.")
]


def main(argv: list[str]) -> int:
    """Runs `etfarm projects`."""
    commands: dict[str, Command] = {"list": list_, "create": create, "add": add, "remove": remove, "limit": limit}
    return execute(commands, argv, "projects", "Lists projects, makes them and changes their members. Changes are for admins.")


def list_(server: options.Server = None, tls_ca: options.TlsCa = None) -> None:
    """Your projects; all of them for an admin."""
    _show(_call(lambda projects: projects.list(), server, tls_ca))


def create(
    project: Annotated[str, typer.Argument(metavar="PROJECT", help="Lower-case letters, digits, dots, dashes, underscores.")],
    member: Annotated[list[str] | None, typer.Option("--member", metavar="NAME", help="A token's name. Again for more.")] = None,
    storage: Storage = "",
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Makes a project."""
    limit_bytes = size_of(storage)
    made = _call(
        lambda projects: projects.create(project, member or (), storage_limit_bytes=limit_bytes), server, tls_ca
    )  # fmt: skip
    _show([made])


def add(
    project: Name,
    members: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of tokens.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Makes principals members. They leave `default` with their first project, unless they are added to it as well."""
    _show([_each(members, lambda projects, name: projects.add_member(project, name), server, tls_ca)])


def remove(
    project: Name,
    members: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of tokens.")],
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> None:
    """Ends memberships. Who is a member of no project any more is one of `default`: revoke the token to lock somebody out."""
    _show([_each(members, lambda projects, name: projects.remove_member(project, name), server, tls_ca)])


def limit(project: Name, storage: Storage, server: options.Server = None, tls_ca: options.TlsCa = None) -> None:
    """Changes what a project's artifacts may take together."""
    limit_bytes = size_of(storage)
    _show([_call(lambda projects: projects.limit(project, limit_bytes), server, tls_ca)])


def size_of(text: str) -> int | None:
    """Return the bytes of `20GiB` or `1048576`; None for the server's default.

    Raises:
        Usage: it is not a size.
    """
    if text in ("", "default"):
        return None
    match = _SIZE.match(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise Usage(f"--storage must be a size or default, got {text!r}.", "Give for example --storage 20GiB.", value=text)
    return int(match[1]) * _UNITS[match[2].upper()]


def _call(do: Callable[[AsyncProjects], Awaitable[Answer]], server: str | None, tls_ca: str | None) -> Answer:
    from etfarm.client.aio import AsyncFarm

    async def call() -> Answer:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await do(farm.projects)

    return run_async(call)


def _each(
    names: Sequence[str], do: Callable[[AsyncProjects, str], Awaitable[Project]], server: str | None, tls_ca: str | None
) -> Project:
    async def all_of_them(projects: AsyncProjects) -> Project:
        return [await do(projects, name) for name in names][-1]

    return _call(all_of_them, server, tls_ca)


def _show(projects: Sequence[Project]) -> None:
    from etfarm.client import units
    from etfarm.client.cli import output

    if not projects:
        tell("There is no project that you are a member of.")
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
