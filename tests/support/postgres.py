"""PostgreSQL servers of tests: on a socket in a folder of their own, as a user that is not root, and ended by their owner."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

import psutil
import psycopg
import pytest
from psycopg import sql

BIN = Path("/usr/lib/postgresql/15/bin")
_USER = "postgres"
_START_S = 60.0

QUICK = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off", "shared_buffers": "32MB", "max_wal_size": "256MB"}
"""Settings of a server whose data need not survive."""


class PostgresServer:
    """One server, which is ended with the process that started it.

    Args:
        settings: of postgresql.conf.
        port: it only names the socket.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, port: int = 5432) -> None:
        if not (BIN / "postgres").exists():
            pytest.skip("needs PostgreSQL: apt-get install postgresql")
        self.folder = Path(tempfile.mkdtemp(prefix="etfarm-pg-"))
        self.data = self.folder / "data"
        self.port = port
        self.settings = dict(settings or {})
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            entry = pwd.getpwnam(_USER)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
            self._as_user = [f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]

    def initialize(self) -> PostgresServer:
        """Make an empty cluster."""
        self.run("initdb", "-D", str(self.data), "-A", "trust", "--no-locale", "-E", "UTF8", "--no-sync", "-U", _USER)
        return self

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs as the server's user."""
        command = ["setpriv", *self._as_user, "--", BIN / program, *arguments] if self._as_user else [BIN / program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        assert done.returncode == 0, done.stderr

    def start(self) -> PostgresServer:
        """Start it, and wait until it accepts connections."""
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.folder), "port": str(self.port), **self.settings}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        # SIGQUIT ends it at once, with its children, when the thread that starts it ends.
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "QUIT", *self._as_user, "--", BIN / "postgres", "-D", self.data, *options],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=self.folder,
        )  # fmt: skip
        is_ready: Queue[bool] = Queue()
        threading.Thread(target=self._read, args=(self.process, is_ready), daemon=True).start()
        assert is_ready.get(timeout=_START_S), "\n".join(self.lines[-20:])
        return self

    def _read(self, process: subprocess.Popen[str], is_ready: Queue[bool]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.lines.append(line.rstrip())
                if "ready to accept" in line:
                    is_ready.put(True)
        is_ready.put(False)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT ends it in order, SIGQUIT as a crash, after which it recovers."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def freeze(self) -> None:
        """It stands still with all its processes: connections stay open, new ones are accepted by the kernel, nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self.process is not None
        # The postmaster first, so that it starts no further process.
        postmaster = psutil.Process(self.process.pid)
        postmaster.send_signal(number)
        for child in postmaster.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    def remove(self) -> None:
        """End it, and delete its files."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{_USER}@/{database}?host={self.folder}&port={self.port}"

    @contextmanager
    def new_database(self, template: str = "template1") -> Iterator[str]:
        """Yield the URL of a database that is dropped at the end of the block."""
        name = f"farm_{uuid.uuid4().hex}"
        self.execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            yield self.url(name)
        finally:
            self.execute("DROP DATABASE {} WITH (FORCE)", name)

    def execute(self, statement: str, *names: str, database: str = _USER) -> None:
        """Execute a statement whose {} are names, outside of a transaction."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def postgres_server(settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """Run a server for the time of the context."""
    server = PostgresServer(settings)
    try:
        yield server.initialize().start()
    finally:
        server.remove()
