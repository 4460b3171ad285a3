"""A database that cannot be used is refused at the start in one sentence; one that breaks later is not written again."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from etfarm.server.state import damage as damage_module
from etfarm.server.state.revisions import HEAD
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.wire.errors import EtfarmError, FarmError
from tests.support.databases import opened
from tests.support.refusals import refuses

PAGE = 4096


async def create_database(folder: Path, rows: int = 3000, prefix: str = "") -> Path:
    """Create a database with artifacts, and close it."""
    folder.mkdir(exist_ok=True)
    values = ", ".join(f"('{prefix}{number:064x}', 1, 'ann', '2025-01-02 03:04:05')" for number in range(rows))
    async with opened(SqliteDatabase(path := folder / "farm.sqlite")) as database:
        await database.write(lambda connection: connection.execute(text(f"INSERT INTO artifacts VALUES {values}")))
    return path


async def scalars(path: Path, query: str) -> list[Any]:
    """Open a database as a server does; return what a query finds."""
    async with opened(SqliteDatabase(path)) as database:
        return list(await database.read(lambda connection: connection.execute(text(query)).scalars()))


async def refusal(path: Path, reason: str = "DATABASE_DAMAGED") -> EtfarmError:
    with refuses(reason) as refused:
        async with opened(SqliteDatabase(path)):
            pass
    assert refused.value.remedy and str(path) in refused.value.message and "\n" not in str(refused.value)
    return refused.value


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def execute(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def zero_a_page_of_a_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'artifacts'").fetchone()[0]
    connection.close()
    overwrite(path, (root - 1) * PAGE, bytes(PAGE))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(zero_a_page_of_a_table, id="zeros in a table"),
        pytest.param(lambda path: overwrite(path, path.stat().st_size // 2, bytes(path.stat().st_size // 2)), id="half zeros"),
        pytest.param(lambda path: os.truncate(path, path.stat().st_size // 2), id="cut off"),
        pytest.param(lambda path: os.truncate(path, 1000), id="cut within a page"),
        pytest.param(lambda path: path.write_bytes(b"\x8f" * path.stat().st_size), id="garbage"),
        pytest.param(lambda path: overwrite(path, 16, b"\x00\x03"), id="another size of its pages"),
        pytest.param(lambda path: overwrite(path, 100, b"\x77" * 200), id="a damaged schema"),
        pytest.param(lambda path: execute(path, "DROP TABLE reports"), id="no table"),
        pytest.param(lambda path: execute(path, "ALTER TABLE holdings DROP COLUMN owner"), id="no column"),
        pytest.param(lambda path: execute(path, "DELETE FROM alembic_version"), id="no revision"),
    ],
)
async def test_a_damaged_database_is_refused_and_left_as_it_is(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = await create_database(tmp_path)
    damage(path)
    before = path.read_bytes()
    error = await refusal(path)
    assert "aside" in error.remedy and "copy" in error.remedy
    assert path.read_bytes() == before


@pytest.mark.remedy("DATABASE_DAMAGED")
async def test_a_log_of_another_database_is_refused_and_nothing_of_it_is_taken(tmp_path: Path) -> None:
    path = await create_database(tmp_path)
    other = await create_database(tmp_path / "other", rows=200, prefix="f")
    connection = sqlite3.connect(other)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute("CREATE TABLE strange (x)")
    connection.executemany("INSERT INTO strange VALUES (?)", [(os.urandom(2000),) for _ in range(300)])
    connection.execute("UPDATE artifacts SET owner = 'somebody else'")
    connection.commit()
    shutil.copyfile(f"{other}-wal", f"{path}-wal")
    connection.close()
    before = path.read_bytes()
    await refusal(path)
    assert path.read_bytes() == before
    path.with_name("farm.sqlite-wal").unlink()
    path.with_name("farm.sqlite-shm").unlink(missing_ok=True)
    assert await scalars(path, "SELECT count(*) FROM artifacts") == [3000]


async def test_a_log_that_is_its_own_is_taken(tmp_path: Path) -> None:
    path = await create_database(tmp_path / "source")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE artifacts SET owner = 'bob'")
    connection.commit()
    copy = tmp_path / "farm.sqlite"
    for end in ("", "-wal"):  # as after a server that was killed
        shutil.copyfile(f"{path}{end}", f"{copy}{end}")
    connection.close()
    assert await scalars(copy, "SELECT DISTINCT owner FROM artifacts") == ["bob"]


async def test_an_empty_file_with_a_log_and_a_directory_in_its_place_are_refused(tmp_path: Path) -> None:
    path, folder = tmp_path / "farm.sqlite", tmp_path / "folder.sqlite"
    path.touch()
    path.with_name("farm.sqlite-wal").write_bytes(b"something")
    await refusal(path)
    folder.mkdir()
    assert "is a directory" in (await refusal(folder, "DATABASE_UNUSABLE")).message


@pytest.mark.remedy("DATABASE_FOREIGN")
async def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "farm.sqlite"
    execute(path, "CREATE TABLE moz_places (id INTEGER)")
    before = path.read_bytes()
    assert "moz_places" in (await refusal(path, "DATABASE_FOREIGN")).message
    assert path.read_bytes() == before
    path.rename(tmp_path / "places.sqlite")
    assert await scalars(path, "SELECT count(*) FROM artifacts") == [0]


@pytest.mark.remedy("DATABASE_TOO_NEW")
@pytest.mark.parametrize(
    ("revision", "reason", "named"),
    [
        ("9999", "DATABASE_TOO_NEW", f"9999.*{HEAD}"),
        ("0001", "DATABASE_TOO_OLD", "0001, of an etfarm before 0.3.0.*docs/upgrade/convert.py"),
        ("0019", "DATABASE_TOO_OLD", "0019, of an etfarm before 0.3.0.*docs/upgrade/convert.py"),
        ("1975ea83b712", "DATABASE_FOREIGN", ""),
        ("", "DATABASE_FOREIGN", ""),
    ],
)
async def test_a_revision_of_another_etfarm_or_program_is_refused(tmp_path: Path, revision: str, reason: str, named: str) -> None:
    path = await create_database(tmp_path)
    execute(path, f"UPDATE alembic_version SET version_num = '{revision}'")
    with refuses(reason) as refused:
        async with opened(SqliteDatabase(path)):
            pass
    assert refused.value.remedy and re.search(named, str(refused.value))
    execute(path, f"UPDATE alembic_version SET version_num = '{HEAD}'")
    assert await scalars(path, "SELECT 1") == [1], "as by an etfarm of the version that wrote it"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_file_that_the_server_may_not_write_is_refused(tmp_path: Path) -> None:
    path = asyncio.run(create_database(tmp_path))
    path.chmod(0o400)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(folder.stat().st_mode | 0o011)
    pid = os.fork()
    if pid == 0:  # it only looks
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            damage_module.check(path, "0006", ["0006"])
        except FarmError as error:
            os._exit(42 if "may not read and write" in error.message else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


async def test_pages_that_break_while_the_server_runs_end_its_writes(tmp_path: Path) -> None:
    async with opened(SqliteDatabase(path := await create_database(tmp_path))) as database:
        ends: list[FarmError] = []
        database.on_damaged = ends.append
        zero_a_page_of_a_table(path)
        for _ in range(2):
            with refuses("DATABASE_DAMAGED", match="malformed"):
                await database.read(lambda c: c.execute(text("SELECT count(*) FROM artifacts WHERE owner = 'x'")).scalar())
        assert len(ends) == 1
        with refuses("DATABASE_DAMAGED"):
            await database.write(lambda c: c.execute(text("DELETE FROM jobs")))
