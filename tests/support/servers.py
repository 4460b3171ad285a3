"""Several servers of one farm as processes: one PostgreSQL database, one folder of blobs, and a verb for each fault."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.support.credentials import Credentials
from tests.support.farm import START_S, Daemon

LEADING, LISTENING = "leading the farm", "listening on"


class Server:
    """One server, which keeps its port and data folder over restarts.

    Args:
        url: of the database, as this server reaches it.
        environment: variables of the process.
        arguments: further options of `etfarm serve`.
        blobs: folder of the artifacts, which the servers share; None if a bucket has them.
    """

    def __init__(self, folder: Path, blobs: Path | None, url: str, environment: dict[str, str], arguments: Sequence[str]) -> None:
        folder.mkdir(mode=0o700)
        if blobs is not None:
            (folder / "artifacts").symlink_to(blobs)
        self.folder = folder
        self.address = ""
        self._url = url
        self._environment = environment
        self._arguments = arguments
        self.daemon: Daemon | None = None

    def start(self) -> Server:
        """Start it; it listens when this returns."""
        arguments = [
            "serve", "--listen", self.address or "127.0.0.1:0", "--data", str(self.folder), "--database", self._url,
            "--exit-with-stdin", "--no-bundle", "--no-prewarm", *self._arguments,
        ]  # fmt: skip
        self.daemon = Daemon(arguments, self.folder / "serve.log", self._environment)
        self.daemon.start()
        self.address = self.daemon.expect(LISTENING).rpartition(" ")[2]
        return self

    def wait_until_leading(self, timeout_s: float = START_S) -> None:
        """Wait until it says that it leads."""
        assert self.daemon is not None
        self.daemon.expect(LEADING, timeout_s)

    def kill9(self) -> None:
        """It is gone at once."""
        assert self.daemon is not None
        self.daemon.kill9()

    def signal(self, number: int) -> None:
        """Send a signal to its process."""
        assert self.daemon is not None
        self.daemon.signal(number)

    def stop(self) -> None:
        """End it in order."""
        if self.daemon is not None:
            self.daemon.stop()

    @property
    def log(self) -> str:
        """Its stderr."""
        return (self.folder / "serve.log").read_text()


class Servers:
    """The servers of one farm, which ask for the credentials that are in use when it is created.

    Args:
        url: of the database, which is the tests' own.
        arguments: options of each server, such as those of a bucket, which then has the artifacts instead of one shared folder.
        environment: variables of each server.
    """

    def __init__(self, folder: Path, url: str, arguments: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.url = url
        self._arguments = arguments
        self._environment = environment or {}
        self.blobs = None if "--blobs" in arguments else folder / "blobs"
        if self.blobs is not None:
            self.blobs.mkdir()
        self.servers: list[Server] = []
        self._credentials = Credentials.in_use

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add(self, *arguments: str, url: str = "", environment: dict[str, str] | None = None) -> Server:
        """Start another server. The first one leads when this returns."""
        name = f"server-{len(self.servers)}"
        variables = self._environment | (environment or {})
        secured = () if self._credentials is None else self._credentials.serve
        server = Server(self.folder / name, self.blobs, url or self.url, variables, [*self._arguments, *arguments, *secured])
        self.servers.append(server)
        server.start()
        if len(self.servers) == 1:
            server.wait_until_leading()
            if self._credentials is not None:
                self._credentials.create_projects(server.address)
        return server

    @property
    def addresses(self) -> str:
        """The addresses of all, as clients and agents take them."""
        return ",".join(server.address for server in self.servers)

    def query(self, statement: str) -> list[Any]:
        """Return the rows of a query of the database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(statement).fetchall()  # type: ignore[arg-type]

    def stop(self) -> None:
        """End all that still run."""
        for server in self.servers:
            if server.daemon is not None and server.daemon.process is not None and server.daemon.process.poll() is None:
                server.signal(signal.SIGCONT)
                server.stop()
