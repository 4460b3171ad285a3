"""The folder of a backup: what it may contain before, and what a restore takes from it."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from etfarm.server.artifacts.blobs import write_blob
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.errors import BackupDamaged
from etfarm.server.backup.manifest import read
from etfarm.server.backup.restore import restore
from etfarm.server.transfer.database import FarmDatabase
from etfarm.wire import digest as digests
from tests.support.refusals import refuses


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    FarmDatabase(folder / "farm.sqlite").open()
    add(folder / "farm.sqlite", write_blob(folder, b"a file").digest)
    return folder


def add(database: Path, digest: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        row = [digest, 6, "ann", "2026-01-01 00:00:00"]
        connection.execute("INSERT INTO artifacts (digest, size_bytes, owner, stored_at) VALUES (?, ?, ?, ?)", row)


@pytest.mark.parametrize("name", ["farm.sqlite", "farm-2025.sqlite", "farm.toml"])
def test_a_folder_with_files_that_no_backup_writes_is_refused(data: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    blob = write_blob(target, b"of another farm").digest
    (target / name).touch()
    with refuses("BACKUP_REFUSED", match=name):
        back_up(data, target)
    assert (target / name).exists() and (target / "artifacts" / "blobs" / blob[:2] / blob).exists()


def test_a_killed_restore_leaves_nothing_that_harms_the_next_one(data: Path, tmp_path: Path) -> None:
    target, restored = tmp_path / "target", tmp_path / "restored"
    blob = write_blob(data, b"a file").digest
    back_up(data, target)
    folder = restored / "artifacts" / "blobs" / blob[:2]
    folder.mkdir(parents=True)
    (restored / "restoring").touch()
    # Logs of a database whose migration had begun belong to that database only.
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("CREATE TABLE strange (number INTEGER)")
        (restored / "farm.sqlite-wal").write_bytes((tmp_path / "other-wal").read_bytes())
    # What a killed copy left is replaced: it may not be writable.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"kept")
    (folder / f"{blob}.part").hardlink_to(elsewhere)
    assert restore(target, restored).artifacts == 1
    assert elsewhere.read_bytes() == b"kept" and [path.name for path in folder.iterdir()] == [blob]
    with closing(sqlite3.connect(restored / "farm.sqlite")) as connection:
        assert connection.execute("SELECT digest FROM artifacts").fetchall() == [(blob,)]
        assert not connection.execute("SELECT name FROM sqlite_master WHERE name = 'strange'").fetchall()


@pytest.mark.remedy("BACKUP_FAILED")
def test_a_restore_that_ran_out_of_disk_continues_once_there_is_some(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(data, tmp_path / "backup")
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        with refuses("BACKUP_FAILED", match="0 are free"):
            restore(tmp_path / "backup", tmp_path / "restored")
    assert restore(tmp_path / "backup", tmp_path / "restored")


def test_a_backup_of_no_farm_is_damaged(data: Path, tmp_path: Path) -> None:
    for name in ("whole", "target"):
        back_up(data, tmp_path / name)
    target = tmp_path / "target"
    manifest = read(target)
    database = target / manifest.database
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DELETE FROM farm")
        connection.commit()
    dataclasses.replace(manifest, database_sha256=digests.of_file(database)).write(target)
    with pytest.raises(BackupDamaged, match="does not say of which farm it is") as refused:
        restore(target, tmp_path / "restored")
    assert refused.value.remedy == "Use another backup."
    restore(tmp_path / "whole", tmp_path / "again")


def test_a_database_cannot_name_files_outside_of_the_data_folder(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    back_up(data, target)
    manifest = read(target)
    database = target / manifest.database
    add(database, "../../../../victim")
    dataclasses.replace(manifest, database_sha256=digests.of_file(database)).write(target)
    victim = tmp_path / "victim.part"
    victim.write_text("kept")
    with pytest.raises(BackupDamaged, match=r"a .digest. that etfarm does not write"):
        restore(target, tmp_path / "restored")
    assert victim.read_text() == "kept"
