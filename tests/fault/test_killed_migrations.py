"""Moves of a farm that are killed at many of their steps: the farm is at one place only, and the command goes on."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.backup.backup import back_up
from etfarm.server.migrate.migration import Migration, Place
from etfarm.server.state import schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.folder import require_restored
from etfarm.server.transfer.database import FarmDatabase
from etfarm.wire.errors import EtfarmError, UserError
from tests.support.databases import PostgresDatabases
from tests.support.deaths import Deaths
from tests.support.full_farm import blobs_of, contents, new_farm
from tests.support.s3 import S3Server, reach

pytestmark = pytest.mark.slow(reason="kills moves of a farm at many of their steps")

KILLED = -signal.SIGKILL
SERVED = ("do_commit", "put", "delete", "name_blobs")
"""Functions that change a database or a bucket."""
EARLY, LATE = 8, 20
"""Number of steps before which a move is killed while it copies, and of its last steps, each of which is tried."""
SIZES = (0, 10, 1_000, 100_000)
LOCAL = Place(None, None)


@pytest.fixture
def database(postgres_databases: PostgresDatabases) -> DatabaseUrl:
    """The name of a database that each attempt creates anew."""
    server = postgres_databases.server
    server.folder.chmod(0o711)  # the killed processes are not the server's user
    return DatabaseUrl.parse(server.url("killed"))


@pytest.fixture
def credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables by which commands reach the bucket."""
    reach(s3_server.new_location(), monkeypatch)


@contextmanager
def created(postgres_databases: PostgresDatabases, name: str = "killed", template: str = "template1") -> Iterator[None]:
    server = postgres_databases.server
    server.execute("CREATE DATABASE {} TEMPLATE {}", name, template)
    try:
        yield
    finally:
        server.execute("DROP DATABASE {} WITH (FORCE)", name)


def is_farm(database: FarmDatabase) -> bool:
    """Return whether a server would open a database, and has the farm then."""
    if database.url is None and not database.path.exists() and not database.path.with_name("farm.sqlite.moved").exists():
        return False
    try:
        database.open()
    except EtfarmError as error:
        assert error.reason in ("COPY_UNFINISHED", "FARM_MOVED") and error.remedy
        return False
    with database.connected() as connection, connection.begin():
        return connection.execute(select(schema.jobs.c.id).limit(1)).first() is not None


def objects_of(location: BucketLocation) -> set[str]:
    """Return the digests of the artifacts of a bucket, and the keys of everything else."""

    async def read() -> set[str]:
        return {each.key.rpartition("/")[2] async for page in Bucket(location).list("") for each in page}

    return asyncio.run(read())


def test_a_killed_move_is_repeated_and_the_farm_is_whole(
    postgres_databases: PostgresDatabases, database: DatabaseUrl, s3_server: S3Server, tmp_path: Path, credentials: None
) -> None:
    first = new_farm(tmp_path / "first" / "data", sizes=SIZES)
    expected, files = contents(first), blobs_of(first.path.parent / "artifacts" / "blobs")
    data = tmp_path / "data"
    source, target = FarmDatabase(data / "farm.sqlite"), FarmDatabase(data / "farm.sqlite", database)
    with Deaths("etfarm.server.migrate.commands:main", *SERVED) as command:
        for step in steps_of(command):
            with created(postgres_databases):
                location = s3_server.new_location()
                shutil.copytree(first.path.parent, data)
                arguments = ["--data", data, "--to-database", database.text, "--to-blobs", location.url]
                kill_and_repeat(command, arguments, step, source, target)
                assert contents(target) == expected, step
                assert objects_of(location) == files.keys() | {OWNER.rpartition("/")[2]}, step
                shutil.rmtree(data)


def test_a_killed_move_back_is_repeated_and_the_farm_is_whole(
    postgres_databases: PostgresDatabases, database: DatabaseUrl, s3_server: S3Server, tmp_path: Path, credentials: None
) -> None:
    first, data, location = new_farm(tmp_path / "first" / "data", sizes=SIZES), tmp_path / "data", s3_server.new_location()
    expected, files = contents(first), blobs_of(first.path.parent / "artifacts" / "blobs")
    source, target = FarmDatabase(data / "farm.sqlite", database), FarmDatabase(data / "farm.sqlite")
    moved = DatabaseUrl.parse(postgres_databases.server.url("moved"))
    with created(postgres_databases, "moved"), Deaths("etfarm.server.migrate.commands:main", *SERVED) as command:
        Migration(first.path.parent, LOCAL, Place(moved, location), lambda what, done, total: None).run()
        first.path.with_name("farm.sqlite.moved").unlink()
        objects = objects_of(location)
        for step in steps_of(command):
            with created(postgres_databases, template="moved"):
                shutil.copytree(first.path.parent, data)
                arguments = ["--data", data, "--database", database.text, "--blobs", location.url,
                             "--to-database", "sqlite", "--to-blobs", "files"]  # fmt: skip
                kill_and_repeat(command, arguments, step, source, target)
                assert contents(target) == expected, step
                assert blobs_of(data / "artifacts" / "blobs").keys() == files.keys(), step
                assert not (data / "artifacts" / "cache").exists(), step
                shutil.rmtree(data)
        assert objects_of(location) == objects, "the way back"


def kill_and_repeat(command: Deaths, arguments: list[str | Path], step: int, source: FarmDatabase, target: FarmDatabase) -> None:
    """Kill a move before a step: the farm is at one place at most, and the same command ends the move."""
    code = command.call(*arguments, step=step)
    assert code in (0, KILLED), step
    places = [is_farm(source), is_farm(target)]
    assert places in ([[False, True]] if code == 0 else [[True, False], [False, False], [False, True]]), step
    if code == KILLED:
        # Where nothing is left to do but to print what was done, it says that the farm is moved.
        assert command.call(*arguments) == 0 or places[1], step
    assert target.source_of_copy() is None, step


def test_a_killed_restore_to_postgresql_is_repeated(
    postgres_databases: PostgresDatabases, database: DatabaseUrl, tmp_path: Path
) -> None:
    farm = new_farm(tmp_path / "farm" / "data", sizes=(0, 10))
    back_up(farm.path.parent, tmp_path / "backup")
    expected, data = contents(farm), tmp_path / "restored"
    arguments = [tmp_path / "backup", "--data", data, "--database", database.text, "--keep-identity"]
    with Deaths("etfarm.server.backup.commands:restore_main", *SERVED) as command:
        for step in steps_of(command):
            with created(postgres_databases):
                restored = FarmDatabase(data / "farm.sqlite", database)
                if command.call(*arguments, step=step) == KILLED and not (is_farm(restored) and is_restored(data)):
                    assert command.call(*arguments) == 0, step
                assert contents(restored) == expected and is_restored(data), step
                shutil.rmtree(data)


def is_restored(data: Path) -> bool:
    try:
        require_restored(data)
    except UserError as error:
        assert error.reason == "RESTORE_UNFINISHED"
        return False
    return True


def steps_of(command: Deaths) -> Iterator[int]:
    """Yield 0, for a whole move, and then the steps before which it is killed."""
    yield 0
    total = command.steps
    assert total > EARLY + LATE
    yield from range(1, total - LATE, (total - LATE) // EARLY)
    yield from range(total - LATE, total + 1)
