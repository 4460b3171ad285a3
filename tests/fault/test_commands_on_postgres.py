"""Moves, backups and restores whose PostgreSQL restarts or stands still, and a server that is started beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from etfarm.server.backup.backup import back_up
from etfarm.server.backup.restore import restore
from etfarm.server.migrate.migration import Migration, Place
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import DatabaseUnavailable
from etfarm.server.state.postgres.connections import Connections
from etfarm.server.state.postgres.writer import Writer
from etfarm.server.transfer.database import FarmDatabase
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire.errors import FarmError
from tests.support.farm import PROMPTLY_S, FarmProcess
from tests.support.full_farm import contents, new_farm
from tests.support.postgres import PostgresServer, postgres_server

pytestmark = pytest.mark.slow(reason="restarts and freezes the database of moves, backups and restores")

LOCAL = Place(None, None)
FROZEN_S = 25.0
"""Time after which a database that stands still is given up while it may take long: two attempts of it, and some."""
Command = Callable[[Path, DatabaseUrl, OnProgress], object]


def move_there(folder: Path, database: DatabaseUrl, on_progress: OnProgress) -> None:
    Migration(folder / "data", LOCAL, Place(database, None), on_progress).run()


def move_back(folder: Path, database: DatabaseUrl, on_progress: OnProgress) -> None:
    Migration(folder / "data", Place(database, None), LOCAL, on_progress).run()


def save(folder: Path, database: DatabaseUrl, on_progress: OnProgress) -> None:
    back_up(folder / "data", folder / "backup", database=database, on_progress=on_progress)


def bring_back(folder: Path, database: DatabaseUrl, on_progress: OnProgress) -> None:
    restore(folder / "backup", folder / "restored", database=database, keep_identity=True, on_progress=on_progress)


def ignore(what: str, done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server({"shared_buffers": "32MB", "max_wal_size": "256MB"}) as running:
        yield running


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[DatabaseUrl]:
    postgres.execute("CREATE DATABASE {}", "farm")
    yield DatabaseUrl.parse(postgres.url("farm"))
    postgres.execute("DROP DATABASE {} WITH (FORCE)", "farm")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        *((command, what) for command in (move_there, move_back, save, bring_back) for what in ("rows copied", "rows compared")),
        *((command, "artifacts copied") for command in (save, bring_back)),
    ],
)
def test_a_restart_of_the_database_ends_a_command_which_is_repeated(
    postgres: PostgresServer, database: DatabaseUrl, tmp_path: Path, command: Command, what: str
) -> None:
    farm = new_farm(tmp_path / "data", sizes=(0, 10, 100))
    expected, scaled = contents(farm), FarmDatabase(farm.path, database)
    if command is bring_back:
        back_up(farm.path.parent, tmp_path / "backup")
    elif command is not move_there:
        move_there(tmp_path, database, ignore)
        farm.path.with_name("farm.sqlite.moved").unlink()
    has_restarted = False

    def restart(happening: str, done: int, total: int) -> None:
        nonlocal has_restarted
        if happening == what and not has_restarted:
            has_restarted = True
            postgres.stop()
            postgres.start()

    with pytest.raises(FarmError, match="was lost: ") as ended:
        command(tmp_path, database, restart)
    assert "again" in ended.value.remedy
    command(tmp_path, database, ignore)
    if command is save:
        restore(tmp_path / "backup", tmp_path / "restored", keep_identity=True)
        assert contents(FarmDatabase(tmp_path / "restored" / "farm.sqlite")) == expected
    else:
        assert contents(farm if command is move_back else scaled) == expected


def test_a_server_ends_if_its_database_stands_still_during_a_migration(postgres: PostgresServer, database: DatabaseUrl) -> None:
    connections = Connections(database, 1.0)
    writer = Writer(connections, lambda: None)

    def migrate(connection: Connection) -> None:
        postgres.freeze()
        connection.execute(text("SELECT 1"))

    began_s = time.monotonic()
    try:
        with pytest.raises(DatabaseUnavailable, match="was lost: the database server does not answer"):
            writer.open(migrate)
        assert time.monotonic() - began_s < FROZEN_S
    finally:
        postgres.thaw()
        writer.close()
        connections.close()


def test_a_server_that_is_started_during_a_restore_leads_the_restored_farm(database: DatabaseUrl, tmp_path: Path) -> None:
    farm = new_farm(tmp_path / "data", sizes=(0, 10), count=0)
    back_up(farm.path.parent, tmp_path / "backup")
    shared = tmp_path / "server" / "artifacts"
    shared.parent.mkdir()
    shared.symlink_to(tmp_path / "restored" / "artifacts")
    is_running, go_on = threading.Event(), threading.Event()

    def wait(what: str, done: int, total: int) -> None:
        is_running.set()
        assert go_on.wait(PROMPTLY_S * 4)

    server = FarmProcess(tmp_path, bundle=False, serve=["--database", database.text])
    with ThreadPoolExecutor(1) as thread:
        restoring = thread.submit(bring_back, tmp_path, database, wait)
        try:
            assert is_running.wait(PROMPTLY_S)
            server.restart()
            assert server.server is not None
            server.server.expect("forwarding calls to the server that will lead")
            wait_for(lambda: "`etfarm restore` holds it" in (tmp_path / "serve.log").read_text())
            assert not restoring.done()
            go_on.set()
            restoring.result()
            server.server.expect("leading the farm")
            scaled = FarmDatabase(farm.path, database)
            assert contents(scaled)["artifacts"] == contents(farm)["artifacts"]
        finally:
            go_on.set()
            server.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PROMPTLY_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.05)
