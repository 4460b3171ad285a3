"""Backups and restores that are killed at each of their steps: only complete ones count, and the others can be repeated."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from etfarm.server.artifacts.blobs import write_blob
from etfarm.server.backup import manifest as manifests
from etfarm.server.backup.backup import back_up
from etfarm.server.config import DATABASE
from etfarm.server.state.folder import LOCK, require_restored
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.wire import digest as digests
from etfarm.wire.errors import UserError
from tests.support.deaths import Deaths

pytestmark = pytest.mark.slow(reason="kills a backup and a restore at each of their steps")

KILLED = -signal.SIGKILL

KEEP = "--keep-identity"


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """A server's data folder with two artifacts."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    database = SqliteDatabase(folder / DATABASE)
    await database.open()
    database.close()
    add(folder, b"a file")
    add(folder, b"another file")
    return folder


def add(data: Path, content: bytes) -> None:
    with closing(sqlite3.connect(data / DATABASE)) as connection, connection:
        row = [write_blob(data, content).digest, len(content), "ann", "2026-01-01 00:00:00"]
        connection.execute("INSERT INTO artifacts (digest, size_bytes, owner, stored_at) VALUES (?, ?, ?, ?)", row)


def contents(data: Path) -> dict[str, str]:
    """Return the digest of each file of a data folder, of its database that of tables and rows.

    Without the time of the farm's row, which a restore sets.
    """
    with closing(sqlite3.connect(data / DATABASE)) as connection:  # its end merges the log of a process that was killed
        # Tables get their constraints and indexes in the order of a set.
        lines = sorted(line.rstrip(", ") for statement in connection.iterdump() for line in statement.splitlines())
        lines = [line.partition(",")[0] if line.startswith('INSERT INTO "farm"') else line for line in lines]
    files = {str(path.relative_to(data)): path for path in data.rglob("*") if path.is_file() and path.name != LOCK}
    digest_by_name = {name: digests.of_file(path) for name, path in files.items() if name != DATABASE}
    return digest_by_name | {DATABASE: digests.of_value(lines)}


def is_restored(data: Path) -> bool:
    """Return whether a server starts on a data folder with a database."""
    try:
        require_restored(data)
    except UserError as error:
        assert error.reason == "RESTORE_UNFINISHED" and "etfarm restore" in error.remedy
        return False
    return (data / DATABASE).exists()


def state(folder: Path) -> str:
    """Return the digest of all that a command finds in a folder: names, modes and bytes."""
    paths = [path for path in (folder, *folder.rglob("*")) if path.exists() and path.name != LOCK]  # which has a process id
    return digests.of_value(
        sorted([str(path), path.stat().st_mode, digests.of_file(path) if path.is_file() else ""] for path in paths)
    )


def killed_runs(command: Deaths, *arguments: str | Path) -> Iterator[int]:
    """Yield the number of a step after the command was killed before it; end once the command lives through all."""
    for step in count(1):
        code = command.call(*arguments, step=step)
        if code == 0:
            assert step > 20
            return
        assert code == KILLED
        yield step


def test_a_killed_restore_is_refused_by_servers_and_can_be_repeated(data: Path, tmp_path: Path) -> None:
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    back_up(data, backup)
    with Deaths("etfarm.server.backup.commands:restore_main") as command:
        assert command.call(backup, "--data", tmp_path / "whole", KEEP) == 0
        expected, seen = contents(tmp_path / "whole"), set[str]()
        for step in killed_runs(command, backup, "--data", restored, KEEP):
            if (left := state(restored)) in seen:
                shutil.rmtree(restored, ignore_errors=True)  # many steps change nothing: what would be repeated has been
                continue
            seen.add(left)
            if not is_restored(restored):
                assert command.call(backup, "--data", restored, KEEP) == 0, step
            assert contents(restored) == expected, step
            shutil.rmtree(restored)
        assert contents(restored) == expected


def files(backup: Path) -> dict[str, str]:
    """Return the digest of each file of a backup but for its manifest, which has the time."""
    paths = [path for path in backup.rglob("*") if path.is_file() and path.name != manifests.NAME]
    return {str(path.relative_to(backup)): digests.of_file(path) for path in paths}


def test_a_killed_backup_leaves_the_former_one_or_is_complete_and_can_be_repeated(data: Path, tmp_path: Path) -> None:
    former, latter, backup = (tmp_path / name for name in ("former", "latter", "backup"))
    back_up(data, former)
    add(data, b"a third file")
    back_up(data, latter)
    complete = [files(former), files(latter)]
    shutil.copytree(former, backup)
    with Deaths("etfarm.server.backup.commands:backup_main") as command:
        for step in killed_runs(command, backup, "--data", data):
            # Files of another backup than that of the manifest may be there, too.
            needed = complete[manifests.read(backup).artifacts - 2]
            assert needed.items() <= files(backup).items(), step
            assert command.call(backup, "--data", data) == 0, step
            assert files(backup) == complete[1], step
            shutil.rmtree(backup)
            shutil.copytree(former, backup)
