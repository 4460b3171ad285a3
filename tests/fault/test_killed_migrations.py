"""Moves of a farm that are killed at many of their steps: the farm is at one place only, and the command goes on."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.migrate.migration import Migration, Place
from etfarm.server.state.copies import CopyUnfinished, FarmMoved
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.transfer.database import FarmDatabase
from tests.support.databases import PostgresDatabases
from tests.support.deaths import Deaths
from tests.support.full_farm import blobs_of, contents, new_farm
from tests.support.s3 import S3Server, environment_of

pytestmark = pytest.mark.slow(reason="kills moves of a farm at many of their steps")

KILLED = -signal.SIGKILL
SERVED = ("_write", "do_commit", "put", "delete", "begin", "finish")
"""Functions that change a database or a bucket."""
STRIDE = 11
LOCAL = Place(None, None)


@pytest.fixture
def database(postgres_databases: PostgresDatabases) -> DatabaseUrl:
    """The name of a database that each attempt creates anew."""
    server = postgres_databases.server
    server.folder.chmod(0o711)  # the killed processes are not the server's user
    return DatabaseUrl.parse(server.url("killed"))


@contextmanager
def created(postgres_databases: PostgresDatabases) -> Iterator[None]:
    server = postgres_databases.server
    server.execute("CREATE DATABASE {}", "killed")
    try:
        yield
    finally:
        server.execute("DROP DATABASE {} WITH (FORCE)", "killed")


def is_farm(database: FarmDatabase) -> bool:
    """Return whether a server would open a database, and has the farm then."""
    if database.url is None and not database.path.exists() and not database.path.with_name("farm.sqlite.moved").exists():
        return False
    try:
        database.open()
    except (CopyUnfinished, FarmMoved) as error:
        assert error.remedy
        return False
    return len(contents(database)["jobs"]) > 0


def count_objects(location: BucketLocation) -> int:
    async def read() -> int:
        return sum([len(page) async for page in Bucket(location).list("blobs")])

    return asyncio.run(read())


@pytest.mark.parametrize("direction", ["out", "back"])
def test_a_killed_move_is_repeated_and_the_farm_is_whole(
    postgres_databases: PostgresDatabases,
    database: DatabaseUrl,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    first = new_farm(tmp_path / "first" / "data")
    expected, files = contents(first), blobs_of(first.path.parent / "artifacts" / "blobs")
    for name, value in environment_of(s3_server.new_location()).items():
        monkeypatch.setenv(name, value)
    with Deaths("etfarm.server.migrate.commands:main", *SERVED) as command:
        for step in count(1, STRIDE):
            with created(postgres_databases):
                location, data = s3_server.new_location(), tmp_path / "data"
                shutil.copytree(first.path.parent, data)
                local, scaled = FarmDatabase(data / "farm.sqlite"), FarmDatabase(data / "farm.sqlite", database)
                arguments = ["--data", data, "--to-database", database.text, "--to-blobs", location.url]
                if direction == "back":
                    Migration(data, LOCAL, Place(database, location), lambda what, done, total: None).run()
                    arguments = ["--data", data, "--database", database.text, "--blobs", location.url,
                                 "--to-database", "sqlite", "--to-blobs", "files"]  # fmt: skip
                    (data / "farm.sqlite.moved").unlink()
                code = command.call(*arguments, step=step)
                assert code in (0, KILLED), step
                assert not (is_farm(local) and is_farm(scaled)), step
                if code == KILLED and not is_farm(local if direction == "out" else scaled):
                    repeated = command.call(*arguments)
                    assert repeated == 0 or is_farm(scaled if direction == "out" else local), step
                elif code == KILLED:
                    assert command.call(*arguments) == 0, step
                assert contents(scaled if direction == "out" else local) == expected, step
                if direction == "out":
                    assert count_objects(location) == len(files), step
                else:
                    assert blobs_of(data / "artifacts" / "blobs") == files, step
                shutil.rmtree(data)
            if code == 0:
                assert step > 20 * STRIDE
                return
