"""Backups of farms in SQLite and files, and in PostgreSQL and S3, each restored to both."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER, owner_of
from etfarm.server.artifacts.s3.errors import BlobsUnusable
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.commands import restore_main
from etfarm.server.backup.errors import BackupDamaged
from etfarm.server.backup.restore import restore
from etfarm.server.main import main as serve_main
from etfarm.server.migrate.migration import Place
from etfarm.server.state import identity, schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.folder import RESTORING, require_restored
from etfarm.server.state.identity import farm_id
from etfarm.server.state.revisions import HEAD
from etfarm.server.transfer.database import FarmDatabase
from tests.support.full_farm import LARGE, LOCAL, SIZES, blobs_of, committed, contents, interrupted_at, move, new_farm, objects_of
from tests.support.leases import begin_to_lead, claim, end_in_order, try_to_lead
from tests.support.refusals import refuses
from tests.support.s3 import S3Server, reach
from tests.support.s3_proxy import proxy_to


@pytest.fixture
def new_place(new_postgres: Callable[[], DatabaseUrl], s3_server: S3Server) -> Callable[[], Place]:
    """Create an empty PostgreSQL database and an empty folder of a bucket."""
    return lambda: Place(new_postgres(), s3_server.new_location())


@pytest.fixture
def sizes() -> Sequence[int]:
    return SIZES


@pytest.fixture
def farm(tmp_path: Path, sizes: Sequence[int]) -> FarmDatabase:
    """A farm in SQLite and files."""
    return new_farm(tmp_path / "data", sizes=sizes)


@pytest.fixture(params=["local", "scaled"])
def place(request: pytest.FixtureRequest, farm: FarmDatabase, new_place: Callable[[], Place]) -> Place:
    """Where the farm is, once here and once there."""
    if request.param == "local":
        return LOCAL
    there = new_place()
    move(farm, LOCAL, there)
    return there


@pytest.mark.parametrize("sizes", [LARGE], ids=["large"])
def test_a_backup_of_each_engine_is_restored_on_both(
    farm: FarmDatabase, place: Place, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    before, artifacts = contents(FarmDatabase(farm.path, place.database)), set(_digests(farm, place))
    backup = tmp_path / "backup"
    done = back_up(farm.path.parent, backup, database=place.database, blobs=place.blobs)
    assert (done.copied, done.lost) == (len(artifacts), ())
    assert blobs_of(backup / "artifacts" / "blobs") == {digest: digest for digest in artifacts}
    for number, target in enumerate((LOCAL, new_place())):
        data = tmp_path / f"restored-{number}"
        manifest = restore(backup, data, database=target.database, blobs=target.blobs, keep_identity=True)
        assert manifest.artifacts == len(artifacts)
        restored = FarmDatabase(data / "farm.sqlite", target.database)
        restored.open()
        assert contents(restored) == before
        stored = blobs_of(data / "artifacts" / "blobs") if target.blobs is None else objects_of(target.blobs)
        assert stored == {digest: digest for digest in artifacts}
        assert restored.path.exists() == (target.database is None)
        assert not list(data.glob("*.part*"))


def test_credentials_for_a_prefix_suffice_to_move_and_to_restore(
    farm: FarmDatabase, s3_server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 refuses to read a missing object if the credentials may not list the whole bucket."""
    digests = {digest: digest for digest in _digests(farm, LOCAL)}
    back_up(farm.path.parent, tmp_path / "backup")
    with proxy_to(s3_server.address) as proxy:
        proxy.deny_missing()
        moved, restored = s3_server.new_location(proxy.address), s3_server.new_location(proxy.address)
        move(farm, LOCAL, Place(None, moved))
        restore(tmp_path / "backup", tmp_path / "restored", blobs=restored)
        assert objects_of(moved) == objects_of(restored) == digests
        reach(moved, monkeypatch)
        options = ["--listen", "127.0.0.1:0", "--data", str(farm.path.parent), "--blobs", moved.url]
        assert serve_main([*options, "--check"]) == 0, capsys.readouterr().out


def test_a_restored_farm_is_another_one_unless_it_keeps_the_identity(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    before, ids = contents(farm), set[str]()
    back_up(farm.path.parent, tmp_path / "backup")
    for number, target in enumerate((LOCAL, new_place())):
        data = tmp_path / f"restored-{number}"
        restore(tmp_path / "backup", data, database=target.database)
        with committed(FarmDatabase(data / "farm.sqlite", target.database)) as connection:
            ids.add(farm_id(connection))
        after = contents(FarmDatabase(data / "farm.sqlite", target.database))
        assert [name for name in before if before[name] != after[name]] == ["farm"]
    assert len(ids) == 2 and not any(own in str(before["farm"]) for own in ids)


def test_a_trial_is_not_restored_to_the_folder_of_the_farm(
    farm: FarmDatabase, place: Place, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    there = place.blobs or new_place().blobs
    assert there is not None
    back_up(farm.path.parent, tmp_path / "backup", database=place.database, blobs=place.blobs)
    restore(tmp_path / "backup", tmp_path / "moved", blobs=there, keep_identity=True)
    before = objects_of(there)
    with pytest.raises(BlobsUnusable, match="has the artifacts of another farm") as refused:
        restore(tmp_path / "backup", tmp_path / "trial", blobs=there)
    assert "name a folder of the farm's own" in refused.value.remedy.lower()
    other = new_place().blobs
    restore(tmp_path / "backup", tmp_path / "trial", blobs=other)  # it continues, with another folder as the remedy says
    # That of an earlier release, which claimed none.
    asyncio.run(Bucket(there).delete(OWNER))
    with refuses("TARGET_NOT_EMPTY"):
        restore(tmp_path / "backup", tmp_path / "second trial", blobs=there)
    restore(tmp_path / "backup", tmp_path / "again", blobs=there, keep_identity=True)
    assert objects_of(there) == before


@pytest.mark.parametrize("to_postgresql", [False, True])
def test_a_farm_that_is_restored_as_itself_takes_the_bucket_from_the_one_that_still_runs(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path, *, to_postgresql: bool
) -> None:
    with committed(farm) as connection:
        connection.execute(update(schema.farm).values(created_at=datetime.now(UTC) + timedelta(hours=1)))  # its clock is wrong
    running, target = new_place(), new_place().database if to_postgresql else None
    there = running.blobs
    assert there is not None
    move(farm, LOCAL, running)
    back_up(farm.path.parent, tmp_path / "backup", database=running.database, blobs=there)
    restore(tmp_path / "backup", tmp_path / "new", database=target, blobs=there, keep_identity=True)
    with committed(FarmDatabase(tmp_path / "new" / "farm.sqlite", target)) as connection:
        restored = identity.read(connection)
    assert asyncio.run(owner_of(Bucket(there))) == restored
    require_known(tmp_path / "new", tmp_path / "new" / "farm.sqlite", target, 5.0, there)
    with pytest.raises(BlobsUnusable, match="was restored to another database") as refused:
        require_known(farm.path.parent, farm.path, running.database, 5.0, there)
    assert refused.value.remedy.startswith("Stop this server")


def test_an_interrupted_restore_of_a_trial_continues_in_its_own_folder(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    target, trial = new_place(), tmp_path / "trial"
    back_up(farm.path.parent, tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path / "backup", trial, database=target.database, blobs=target.blobs, on_progress=interrupted_at())
    restore(tmp_path / "backup", trial, database=target.database, blobs=target.blobs)
    with committed(FarmDatabase(trial / "farm.sqlite", target.database)) as connection:
        own = identity.read(connection)
    assert target.blobs is not None and asyncio.run(owner_of(Bucket(target.blobs))) == own


def _digests(farm: FarmDatabase, place: Place) -> list[str]:
    with committed(FarmDatabase(farm.path, place.database)) as connection:
        return list(connection.execute(select(schema.artifacts.c.digest)).scalars())


def test_a_backup_is_brought_up_to_date(farm: FarmDatabase, place: Place, tmp_path: Path) -> None:
    database, backup = FarmDatabase(farm.path, place.database), tmp_path / "backup"
    first = back_up(farm.path.parent, backup, database=place.database, blobs=place.blobs)
    with committed(database) as connection:
        connection.execute(
            schema.artifacts.delete().where(schema.artifacts.c.digest == min(blobs_of(backup / "artifacts/blobs")))
        )
        connection.execute(insert(schema.trusted_times).values(name="later", at=func.now()))
    second = back_up(farm.path.parent, backup, database=place.database, blobs=place.blobs)
    assert (first.copied, second.copied) == (5, 0)
    assert len(blobs_of(backup / "artifacts" / "blobs")) == second.manifest.artifacts == 4
    restore(backup, tmp_path / "restored", keep_identity=True)
    assert contents(FarmDatabase(tmp_path / "restored" / "farm.sqlite")) == contents(database)


def test_lost_artifacts_of_each_engine_are_named(farm: FarmDatabase, place: Place, tmp_path: Path) -> None:
    digest = min(_digests(farm, place))
    if place.blobs is None:
        (farm.path.parent / "artifacts" / "blobs" / digest[:2] / digest).unlink()
    else:
        asyncio.run(Bucket(place.blobs).put(key_of(digest), b"other bytes"))
    done = back_up(farm.path.parent, tmp_path / "backup", database=place.database, blobs=place.blobs)
    assert done.lost == done.manifest.missing == (digest,)


@pytest.mark.remedy("RESTORE_UNFINISHED", "COPY_UNFINISHED")
def test_an_interrupted_restore_to_postgresql_continues(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    before, target = contents(farm), new_place()
    backup, data = tmp_path / "backup", tmp_path / "restored"
    back_up(farm.path.parent, backup)
    interrupt = interrupted_at("rows copied", 1 / 2)
    with pytest.raises(KeyboardInterrupt):
        restore(backup, data, database=target.database, on_progress=interrupt, keep_identity=True)
    with refuses("RESTORE_UNFINISHED"):
        require_restored(data)
    with refuses("COPY_UNFINISHED", match="unfinished copy of the backup"):
        FarmDatabase(data / "farm.sqlite", target.database).open()
    with refuses("COPY_UNFINISHED"):
        back_up(farm.path.parent, tmp_path / "other", database=target.database)
    restore(backup, data, database=target.database, keep_identity=True)
    require_restored(data)
    assert contents(FarmDatabase(data / "farm.sqlite", target.database)) == before


@pytest.mark.remedy("SERVERS_RUNNING")
@pytest.mark.slow(reason="starts a server beside a restore")
def test_no_server_leads_nor_opens_the_database_of_a_restore_from_its_beginning_on(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    target, led = new_place(), dict[str, bool]()
    assert target.database is not None and target.blobs is not None
    restored = FarmDatabase(tmp_path / "elsewhere" / "farm.sqlite", target.database)
    back_up(farm.path.parent, tmp_path / "backup")

    def interrupt(what: str, done: int, total: int) -> None:
        led[what] = try_to_lead(restored.url)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(
            tmp_path / "backup",
            tmp_path / "restored",
            database=target.database,
            blobs=target.blobs,
            on_progress=interrupt,
            keep_identity=True,
        )
    assert led == {"artifacts copied": False}, "before any row"
    with refuses("COPY_UNFINISHED", match="unfinished copy of the backup") as refused:
        restored.open()
    assert "etfarm restore" in refused.value.remedy
    assert claim(target.database, "folder 1") == target.blobs.url

    token = begin_to_lead(target.database)
    with refuses("SERVERS_RUNNING", match="farm-a:7433"):
        restore(tmp_path / "backup", tmp_path / "restored", database=target.database, blobs=target.blobs, keep_identity=True)
    end_in_order(target.database, token)
    restore(tmp_path / "backup", tmp_path / "restored", database=target.database, blobs=target.blobs, keep_identity=True)
    restored.open()
    assert contents(restored) == contents(farm) and try_to_lead(target.database)


@pytest.mark.remedy("BACKUP_DAMAGED")
def test_a_damaged_backup_leaves_the_database_for_another_one(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    target = new_place()
    for name in ("damaged", "whole"):
        back_up(farm.path.parent, tmp_path / name)
    next((tmp_path / "damaged" / "artifacts" / "blobs").glob("??/*")).unlink()
    with pytest.raises(BackupDamaged, match="is missing"):
        restore(tmp_path / "damaged", tmp_path / "first", database=target.database, keep_identity=True)
    assert target.database is not None and claim(target.database, "elsewhere") == "elsewhere", "its lease names no place"
    restore(tmp_path / "whole", tmp_path / "second", database=target.database, keep_identity=True)
    assert contents(FarmDatabase(farm.path, target.database)) == contents(farm)


@pytest.mark.remedy("BACKUP_REFUSED")
@pytest.mark.parametrize("keep_identity", [False, True])
def test_a_damaged_backup_leaves_the_bucket_for_another_one(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path, *, keep_identity: bool
) -> None:
    target, data = new_place(), tmp_path / "restored"
    assert target.blobs is not None
    back_up(farm.path.parent, tmp_path / "damaged")
    with committed(farm) as connection:
        connection.execute(insert(schema.projects).values(name="new", created_at=datetime.now(UTC), created_by="ann"))
    back_up(farm.path.parent, tmp_path / "whole")
    next((tmp_path / "damaged" / "artifacts" / "blobs").glob("??/*")).unlink()

    def run(name: str) -> None:
        restore(tmp_path / name, data, database=target.database, blobs=target.blobs, keep_identity=keep_identity)

    with pytest.raises(BackupDamaged, match="is missing") as damaged:
        run("damaged")
    assert damaged.value.remedy.startswith("Use another backup")
    if not keep_identity:
        assert objects_of(target.blobs) == {} and asyncio.run(owner_of(Bucket(target.blobs))) is None
    with refuses("BACKUP_REFUSED", match="of another backup") as refused:
        run("whole")
    assert refused.value.remedy.startswith("Delete it")
    shutil.rmtree(data)
    run("whole")
    assert len(objects_of(target.blobs)) == len(_digests(farm, LOCAL))


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_damaged_backup_does_not_keep_the_farm_from_its_bucket(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path, *, is_claimed: bool
) -> None:
    there = new_place().blobs
    assert there is not None
    with committed(farm) as connection:
        connection.execute(update(schema.farm).values(created_at=datetime(2026, 1, 1, tzinfo=UTC)))
    move(farm, LOCAL, Place(None, there))
    back_up(farm.path.parent, tmp_path / "backup", blobs=there)
    path = next((tmp_path / "backup" / "artifacts" / "blobs").glob("??/*"))
    path.unlink()
    asyncio.run(Bucket(there).delete(key_of(path.name)))
    if not is_claimed:
        asyncio.run(Bucket(there).delete(OWNER))
    former = asyncio.run(owner_of(Bucket(there)))
    with pytest.raises(BackupDamaged):
        restore(tmp_path / "backup", tmp_path / "restored", blobs=there, keep_identity=True)
    assert asyncio.run(owner_of(Bucket(there))) == former
    require_known(farm.path.parent, farm.path, None, 5.0, there)


def test_a_restore_overwrites_no_other_farm(farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path) -> None:
    target = new_place()
    back_up(farm.path.parent, tmp_path / "backup")
    move(new_farm(tmp_path / "other"), LOCAL, Place(target.database, None))
    before = contents(FarmDatabase(farm.path, target.database))
    with refuses("TARGET_NOT_EMPTY", match="is not empty"):
        restore(tmp_path / "backup", tmp_path / "restored", database=target.database, keep_identity=True)
    assert contents(FarmDatabase(farm.path, target.database)) == before


def test_a_restore_that_was_killed_late_continues_at_its_own_database_only(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path
) -> None:
    target, other, data = new_place(), new_place(), tmp_path / "restored"
    done = back_up(farm.path.parent, tmp_path / "backup")
    move(new_farm(tmp_path / "other"), LOCAL, Place(other.database, None))
    restore(tmp_path / "backup", data, database=target.database, keep_identity=True)
    # What a restore leaves that is killed before its last step.
    (data / RESTORING).write_text(f"{done.manifest.database_sha256} copied to {target.database}")
    with refuses("TARGET_NOT_EMPTY", match="is not empty"):
        restore(tmp_path / "backup", data, database=other.database, keep_identity=True)
    with refuses("RESTORE_UNFINISHED"):
        require_restored(data)
    restore(tmp_path / "backup", data, database=target.database, keep_identity=True)
    require_restored(data)
    assert contents(FarmDatabase(data / "farm.sqlite", target.database)) == contents(farm)


def test_a_backup_says_which_options_are_missing(farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path) -> None:
    there = new_place()
    move(farm, LOCAL, there)
    farm.path.with_name("farm.sqlite.moved").unlink()
    with refuses("BACKUP_REFUSED", match="has a PostgreSQL database") as refused:
        back_up(farm.path.parent, tmp_path / "backup")
    assert "--database" in refused.value.remedy
    with refuses("BACKUP_REFUSED", match="in a bucket"):
        back_up(farm.path.parent, tmp_path / "backup", database=there.database)


@pytest.mark.remedy("OTHER_VERSION")
@pytest.mark.parametrize("revision", ["0001", "9999"])
def test_a_server_of_another_version_is_backed_up_by_its_own(
    farm: FarmDatabase, new_place: Callable[[], Place], tmp_path: Path, revision: str
) -> None:
    there = new_place()
    move(farm, LOCAL, Place(there.database, None))
    with committed(FarmDatabase(farm.path, there.database)) as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{revision}'")
    with refuses("OTHER_VERSION", match=f"revision {revision}, this etfarm copies revision {HEAD}"):
        back_up(farm.path.parent, tmp_path / "backup", database=there.database)
    with committed(FarmDatabase(farm.path, there.database)) as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{HEAD}'")
    assert back_up(farm.path.parent, tmp_path / "backup", database=there.database)  # by the command of this version


def test_the_command_says_how_to_start_the_restored_farm(
    farm: FarmDatabase,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    back_up(farm.path.parent, tmp_path / "backup")
    location = s3_server.new_location()
    reach(location, monkeypatch)
    restored = tmp_path / "restored"
    assert restore_main([str(tmp_path / "backup"), "--data", str(restored), "--blobs", location.url]) == 0
    options = f"--blobs {location.url} --blobs-region {location.region} --blobs-endpoint {location.endpoint}"
    assert f"Start it: etfarm serve --data {restored} {options}\n" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"keep_identity": True}, {}, {"keep_identity": True, "without_tokens": True}])
def test_an_interrupted_restore_does_not_continue_with_other_options(
    farm: FarmDatabase, tmp_path: Path, options: dict[str, Any]
) -> None:
    backup, data = tmp_path / "backup", tmp_path / "restored"
    back_up(farm.path.parent, backup)
    with pytest.raises(KeyboardInterrupt):
        restore(backup, data, on_progress=interrupted_at(), **options)
    with refuses("RESTORE_UNFINISHED") as unfinished:
        require_restored(data)
    assert [f"--{name.replace('_', '-')}" in unfinished.value.remedy for name in options] == [True] * len(options)
    other = options | {"keep_identity": not options.get("keep_identity", False)}
    with refuses("BACKUP_REFUSED", match="interrupted restore with"):
        restore(backup, data, **other)
    restore(backup, data, **options)
    require_restored(data)
