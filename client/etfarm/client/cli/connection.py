"""The farm of a command: the options that choose it, and calls of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from etfarm.client.cli.event_loop import run_async
from etfarm.client.transport.server_wait import CHOSEN_WAIT_S, read_server_wait_s
from etfarm.wire.errors import error_for
from etfarm.wire.names import SERVER_WAIT_VARIABLE
from etfarm.wire.options import option

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.outcome import Outcome
    from etfarm.client.transport.stubs import Stubs

Answer = TypeVar("Answer")


def _name_of(text: str) -> str:
    """Return the name of `--project`.

    Raises:
        USAGE: the name is empty, or it is another option.
    """
    if not text or text.startswith("-"):
        raise error_for("USAGE", "--project requires a project's name.", "`etfarm projects list` shows yours.")
    return text


@dataclass(frozen=True)
class Project:
    """The project of all farms that a command connects to."""

    project: str | None = option(
        "--project",
        "The project that owns what the command creates; else ETFARM_PROJECT, else your only project.",
        metavar="NAME",
        build=_name_of,
    )

    def __post_init__(self) -> None:
        """Select it."""
        if self.project is not None:
            from etfarm.client.transport.connection import CHOSEN_PROJECT

            CHOSEN_PROJECT.set(self.project)


@dataclass(frozen=True)
class Server:
    """The server of a command, without a project."""

    server: str | None = option(
        "--server", "HOST:PORT, several with commas, or unix:PATH; else ETFARM_SERVER, else a farm of its own.", metavar="ADDR"
    )
    tls_ca: str | None = option("--tls-ca", "PEM of the authority that signed the server's certificate.", metavar="FILE")
    server_wait_s: float | None = option(
        "--server-wait",
        f"As 10m, or 0: how long to wait while the server is away; else {SERVER_WAIT_VARIABLE}.",
        metavar="TIME",
        without="10m for jobs and sessions, else 30s",
        build=partial(read_server_wait_s, "--server-wait"),
    )

    def __post_init__(self) -> None:
        """Select the time for all farms that the command connects to."""
        if self.server_wait_s is not None:
            CHOSEN_WAIT_S.set(self.server_wait_s)

    def farm(self, on_status: Callable[[str], None] | None = None, *, prewarm: bool = True) -> AsyncFarm:
        """Return the farm, which `async with` connects to."""
        from etfarm.client.aio import AsyncFarm

        return AsyncFarm(self.server, tls_ca=self.tls_ca, on_status=on_status, prewarm=prewarm)

    def call(self, work: Callable[[AsyncFarm], Awaitable[Answer]], outcome: Outcome | None = None) -> Answer:
        """Return what the work returns for the connected farm.

        Args:
            outcome: as of `run_async`.
        """

        async def call() -> Answer:
            async with self.farm() as farm:
                return await work(farm)

        return run_async(call, outcome)

    def call_stubs(self, work: Callable[[Stubs], Awaitable[Answer]]) -> Answer:
        """Return what the work returns for the services of the connected farm."""
        from etfarm.client.transport.connection import open_stubs

        async def call() -> Answer:
            async with open_stubs(self.server, self.tls_ca) as stubs:
                return await work(stubs)

        return run_async(call)


@dataclass(frozen=True)
class Connection(Project, Server):
    """The server and the project of a command."""

    def __post_init__(self) -> None:
        """Select both."""
        Project.__post_init__(self)
        Server.__post_init__(self)
