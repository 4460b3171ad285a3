"""Farms that are moved between SQLite with files and PostgreSQL with S3: row by row and blob by blob, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import trustme

from etfarm.server.artifacts.blobs import place_of
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.cluster.shared_blobs import identify_folder
from etfarm.server.cluster.stopped import stopped
from etfarm.server.migrate.commands import main
from etfarm.server.migrate.migration import Place
from etfarm.server.state.database_url import BadDatabaseUrl, DatabaseUrl
from etfarm.server.state.engine import DatabaseUnavailable
from etfarm.server.transfer.artifacts import BucketArtifacts
from etfarm.server.transfer.database import FarmDatabase
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire.errors import UserError
from tests.support.full_farm import LARGE, LOCAL, blobs_of, committed, contents, interrupted_at, move, new_farm, objects_of
from tests.support.leases import begin_to_lead, claim, end_in_order, try_to_lead, wait_to_lead
from tests.support.refusals import refuses
from tests.support.s3 import S3Server, reach
from tests.support.stores import damage


@pytest.fixture
def farm(tmp_path: Path) -> FarmDatabase:
    """A farm in SQLite and files."""
    return new_farm(tmp_path / "data")


@pytest.fixture
def large(tmp_path: Path) -> FarmDatabase:
    """One with a large artifact."""
    return new_farm(tmp_path / "data", sizes=LARGE)


@pytest.fixture
def database(new_postgres: Callable[[], DatabaseUrl]) -> DatabaseUrl:
    """An empty PostgreSQL database."""
    return new_postgres()


@pytest.fixture
def location(s3_server: S3Server) -> BucketLocation:
    """An empty folder of a bucket."""
    return s3_server.new_location()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def blobs(farm: FarmDatabase, name: str = "blobs") -> Path:
    return farm.path.parent / "artifacts" / name


@pytest.mark.remedy("FARM_MOVED")
def test_a_farm_is_moved_to_postgresql_and_s3_and_back(
    large: FarmDatabase, database: DatabaseUrl, location: BucketLocation
) -> None:
    farm, before, files = large, contents(large), blobs_of(blobs(large))
    scaled = Place(database, location)
    moved = move(farm, LOCAL, scaled)
    assert moved.row_count == sum(map(len, before.values()))
    assert (moved.artifacts.count, moved.artifacts.lost) == (len(files), [])
    assert contents(FarmDatabase(farm.path, database)) == before
    assert objects_of(location) == files
    assert names(farm.path.parent) == {"artifacts", "farm.sqlite.moved"}
    assert names(farm.path.parent / "artifacts") == {"blobs.moved", "cache", "uploads"}
    assert blobs_of(blobs(farm, "blobs.moved")) == files, "the way back"

    (farm.path.parent / "farm.sqlite.moved").unlink()
    (blobs(farm, "cache") / "ab").mkdir()
    move(farm, scaled, LOCAL)
    assert contents(farm) == before
    assert blobs_of(blobs(farm)) == files
    assert names(farm.path.parent) == {"artifacts", "farm.sqlite"}
    assert names(farm.path.parent / "artifacts") == {"blobs", "blobs.moved", "uploads"}
    assert farm.path.stat().st_mode & 0o777 == 0o600
    with refuses("FARM_MOVED", match="was moved to"):
        FarmDatabase(farm.path, database).open()
    farm.open()


@pytest.mark.parametrize("scaled", ["database", "blobs"])
def test_rows_and_artifacts_are_moved_alone(
    farm: FarmDatabase, database: DatabaseUrl, location: BucketLocation, scaled: str
) -> None:
    before, files = contents(farm), blobs_of(blobs(farm))
    target = Place(database, None) if scaled == "database" else Place(None, location)
    move(farm, LOCAL, target)
    assert contents(FarmDatabase(farm.path, target.database)) == before
    assert farm.path.exists() == (scaled == "blobs")
    assert (blobs_of(blobs(farm)) if scaled == "database" else objects_of(location)) == files
    move(farm, target, LOCAL)
    assert contents(farm) == before and blobs_of(blobs(farm)) == files


def test_a_farm_is_moved_to_other_servers_of_the_same_kind(
    farm: FarmDatabase, new_postgres: Callable[[], DatabaseUrl], s3_server: S3Server
) -> None:
    before, files = contents(farm), blobs_of(blobs(farm))
    first, second = (Place(new_postgres(), s3_server.new_location()) for _ in range(2))
    move(farm, LOCAL, first)
    (farm.path.parent / "migrating").mkdir()
    (farm.path.parent / "migrating" / "of-a-killed-move.part").touch()
    move(farm, first, second)
    assert contents(FarmDatabase(farm.path, second.database)) == before
    assert second.blobs is not None and objects_of(second.blobs) == files
    assert "migrating" not in names(farm.path.parent)


def test_what_is_moved_cannot_be_mistaken_for_the_farm(
    farm: FarmDatabase, database: DatabaseUrl, location: BucketLocation
) -> None:
    move(farm, LOCAL, Place(database, location))
    with refuses("FARM_MOVED", match=r"rename farm\.sqlite\.moved to farm\.sqlite"):
        farm.open()
    assert not farm.path.exists()


@pytest.mark.remedy("ARTIFACTS_LOST")
def test_a_damaged_artifact_ends_a_move_or_is_left_behind(farm: FarmDatabase, location: BucketLocation) -> None:
    files = blobs_of(blobs(farm))
    rotten, missing, *whole = sorted(files)
    damage(place_of(blobs(farm), rotten))
    place_of(blobs(farm), missing).unlink()
    target = Place(None, location)
    with refuses("ARTIFACTS_LOST", match="2 of its artifacts") as error:
        move(farm, LOCAL, target)
    assert all(digest in error.value.metadata["digests"] for digest in (rotten, missing))
    assert blobs(farm).exists() and not blobs(farm, "cache").exists()
    moved = move(farm, LOCAL, target, skip_lost=True)
    assert sorted(moved.artifacts.lost) == [rotten, missing]
    assert objects_of(location) == {digest: files[digest] for digest in whole}


def test_a_move_that_ends_before_its_last_step_names_what_it_left_behind(
    farm: FarmDatabase, database: DatabaseUrl, location: BucketLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, *whole = sorted(blobs_of(blobs(farm)))
    place_of(blobs(farm), missing).unlink()

    async def interrupt(artifacts: BucketArtifacts) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(BucketArtifacts, "finish", interrupt)
        move(farm, LOCAL, Place(database, location), skip_lost=True)
    moved = move(farm, LOCAL, Place(database, location), skip_lost=True)
    assert (moved.artifacts.lost, moved.artifacts.count) == ([missing], len(whole))


@pytest.mark.parametrize("is_of_another_size", [False, True])
def test_a_damaged_object_of_a_bucket_is_not_taken(
    farm: FarmDatabase, location: BucketLocation, is_of_another_size: bool
) -> None:
    files = blobs_of(blobs(farm))
    move(farm, LOCAL, Place(None, location))
    rotten = sorted(files)[0]
    asyncio.run(Bucket(location).put(key_of(rotten), bytes(len(files[rotten]) + is_of_another_size)))
    with refuses("ARTIFACTS_LOST", match=rotten[:12]):
        move(farm, Place(None, location), LOCAL)
    assert rotten not in blobs_of(blobs(farm, "blobs.copying"))


@pytest.mark.remedy("NOTHING_TO_MOVE")
def test_what_something_else_uses_is_no_target(
    farm: FarmDatabase, database: DatabaseUrl, s3_server: S3Server, tmp_path: Path
) -> None:
    other = new_farm(tmp_path / "other")
    move(other, LOCAL, Place(database, None))
    with refuses("TARGET_NOT_EMPTY", match="is not empty"):
        move(farm, LOCAL, Place(database, None))
    with refuses("NOTHING_TO_MOVE", match="where it is"):
        move(farm, LOCAL, LOCAL)
    with refuses("FARM_MOVED"):
        move(other, LOCAL, Place(None, s3_server.new_location()))
    move(farm, LOCAL, Place(None, s3_server.new_location()))
    with refuses("NOTHING_TO_MOVE", match="are in a bucket"):
        move(farm, LOCAL, Place(None, s3_server.new_location()))


def test_a_refused_move_changes_nothing(farm: FarmDatabase, location: BucketLocation) -> None:
    asyncio.run(Bucket(location).put(key_of("ab" * 32), b"of another farm"))
    with refuses("TARGET_NOT_EMPTY", match="has artifacts already"):
        move(farm, LOCAL, Place(None, location))
    assert list(objects_of(location)) == ["ab" * 32]
    farm.open()
    assert farm.path.exists() and blobs(farm).exists()


def test_the_unfinished_copy_of_another_farm_is_no_target(farm: FarmDatabase, database: DatabaseUrl, tmp_path: Path) -> None:
    other = new_farm(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        move(other, LOCAL, Place(database, None), interrupted_at())
    with refuses("COPY_UNFINISHED", match=str(other.path)):
        move(farm, LOCAL, Place(database, None))


@pytest.mark.remedy("TARGET_NOT_EMPTY")
def test_what_an_earlier_move_left_is_not_overwritten(farm: FarmDatabase, new_postgres: Callable[[], DatabaseUrl]) -> None:
    first = Place(new_postgres(), None)
    move(farm, LOCAL, first)
    move(farm, first, LOCAL)
    with refuses("TARGET_NOT_EMPTY", match=r"farm\.sqlite\.moved is left over from an earlier move"):
        move(farm, LOCAL, Place(new_postgres(), None))
    farm.path.with_name("farm.sqlite.moved").unlink()
    move(farm, LOCAL, Place(new_postgres(), None))


def test_the_database_of_another_farm_in_the_folder_is_not_replaced(
    farm: FarmDatabase, database: DatabaseUrl, tmp_path: Path
) -> None:
    move(farm, LOCAL, Place(database, None))
    other = new_farm(tmp_path / "other")
    before = contents(other)
    with refuses("TARGET_NOT_EMPTY", match=r"farm\.sqlite is there already"):
        move(other, Place(database, None), LOCAL)
    assert contents(other) == before
    FarmDatabase(farm.path, database).open()


def test_logs_that_another_database_has_left_are_not_applied(farm: FarmDatabase, database: DatabaseUrl) -> None:
    before, logs = contents(farm), [farm.path.with_name(f"farm.sqlite{suffix}") for suffix in ("-wal", "-journal")]
    move(farm, LOCAL, Place(database, None))
    for log in logs:
        log.touch()
    move(farm, Place(database, None), LOCAL)
    assert not any(log.exists() for log in logs)
    assert contents(farm) == before


def test_a_folder_or_a_database_without_a_farm_is_refused(tmp_path: Path, new_postgres: Callable[[], DatabaseUrl]) -> None:
    nothing = FarmDatabase(tmp_path / "farm.sqlite")
    with refuses("NOTHING_TO_MOVE", match="has no farm"):
        move(nothing, LOCAL, Place(new_postgres(), None))
    with refuses("NOTHING_TO_MOVE", match="has no farm"):
        move(nothing, Place(new_postgres(), None), LOCAL)


def test_a_farm_of_a_newer_etfarm_is_refused(farm: FarmDatabase, database: DatabaseUrl) -> None:
    with committed(farm) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with refuses("DATABASE_TOO_NEW", match="revision 9999"):
        move(farm, LOCAL, Place(database, None))


def leading_once(database: DatabaseUrl, led: list[bool]) -> OnProgress:
    """Let a server try to lead at the first progress of a move."""

    def lead(happening: str, done: int, total: int) -> None:
        if not led:
            led.append(try_to_lead(database))

    return lead


def test_a_farm_with_a_server_is_not_moved_and_none_leads_meanwhile(farm: FarmDatabase, database: DatabaseUrl) -> None:
    before, scaled = contents(farm), Place(database, None)
    move(farm, LOCAL, scaled)
    token = begin_to_lead(database)
    with refuses("SERVERS_RUNNING", match="farm-a:7433"):
        move(farm, scaled, LOCAL)
    end_in_order(database, token)
    led = list[bool]()
    move(farm, scaled, LOCAL, leading_once(database, led))
    assert led == [False] and contents(farm) == before


def test_none_leads_an_unused_database_while_a_farm_is_moved_to_it(farm: FarmDatabase, database: DatabaseUrl) -> None:
    led = list[bool]()
    move(farm, LOCAL, Place(database, None), leading_once(database, led))
    assert led == [False] and try_to_lead(database)


def test_a_farm_is_not_moved_if_a_server_waits_for_the_end(farm: FarmDatabase, database: DatabaseUrl) -> None:
    before, scaled, announced = contents(farm), Place(database, None), list[bool]()
    move(farm, LOCAL, scaled)
    end_in_order(database, begin_to_lead(database))

    def begin_to_wait(happening: str, done: int, total: int) -> None:
        if not announced:
            wait_to_lead(database)
            announced.append(True)

    with refuses("SERVERS_RUNNING", match="started meanwhile, at farm-c:7433"):
        move(farm, scaled, LOCAL, begin_to_wait)
    FarmDatabase(farm.path, database).open()
    assert contents(FarmDatabase(farm.path, database)) == before and not farm.path.exists()


def test_the_password_of_a_url_that_cannot_be_read_is_not_shown(farm: FarmDatabase) -> None:
    with pytest.raises(BadDatabaseUrl) as error:
        move(farm, LOCAL, Place(DatabaseUrl.parse("postgresql://etfarm:100%zzsecret@localhost/farm"), None))
    assert "secret" not in str(error.value) and error.value.__cause__ is None


def test_a_database_that_stands_still_is_not_waited_for(database: DatabaseUrl) -> None:
    end_in_order(database, begin_to_lead(database))
    with psycopg.connect(database.text) as other:
        # The lock is waited for longer than an answer may take.
        other.execute("SELECT 1 FROM etfarm_cluster.lease FOR UPDATE")
        with pytest.raises(DatabaseUnavailable, match="does not answer"), stopped(database, answer_s=0.2):
            pass


def test_the_farm_forgets_where_its_blobs_were(farm: FarmDatabase, database: DatabaseUrl, location: BucketLocation) -> None:
    move(farm, LOCAL, Place(database, None))
    token = begin_to_lead(database)

    assert claim(database, "folder 1") == "folder 1"
    end_in_order(database, token)
    move(farm, Place(database, None), Place(database, location))
    assert claim(database, "folder 1") == location.url, "a server with the former configuration is refused"
    assert claim(database, location.url) == location.url
    move(farm, Place(database, location), Place(database, None))
    assert claim(database, location.url) == identify_folder(farm.path.parent / "artifacts")


@pytest.mark.remedy("MOVE_FAILED")
def test_a_file_that_cannot_be_written_is_named_and_the_move_goes_on(farm: FarmDatabase, location: BucketLocation) -> None:
    files, there = blobs_of(blobs(farm)), Place(None, location)
    move(farm, LOCAL, there)
    blobs(farm, "blobs.copying").touch()
    with refuses("MOVE_FAILED", match="Not a directory"):
        move(farm, there, LOCAL)
    blobs(farm, "blobs.copying").unlink()
    move(farm, there, LOCAL)
    assert blobs_of(blobs(farm)) == files


def test_the_command_says_what_to_change_and_what_it_left_behind(
    farm: FarmDatabase,
    location: BucketLocation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reach(location, monkeypatch)
    data = str(farm.path.parent)
    with pytest.raises(UserError, match="does not say where"):
        main(["--data", data])
    with pytest.raises(UserError, match="cannot be combined with --to-blobs-region") as twice:
        main(["--data", data, "--to-config", "farm.toml", "--to-blobs-region", "eu-1"])
    assert twice.value.remedy == "Leave out --to-blobs-region."
    with pytest.raises(UserError, match="A bucket is required for --to-blobs-endpoint"):
        main(["--data", data, "--to-database", "sqlite", "--to-blobs-endpoint", "https://s3.example"])
    with pytest.raises(BadDatabaseUrl):
        main(["--data", data, "--to-database", "mysql://host/farm"])
    with refuses("BAD_BLOBS", match=r"^--to-blobs must be s3://"):
        main(["--data", data, "--to-blobs", "http://host/bucket"])
    with refuses("BAD_BLOBS", match=r"^--to-blobs-endpoint is plain http to another machine"):
        main(["--data", data, "--to-blobs", location.url, "--to-blobs-endpoint", "http://s3.example"])
    with refuses("BAD_BLOBS", match="nowhere") as missing:
        main(["--data", data, "--to-blobs", location.url, "--to-blobs-credentials", f"{data}/nowhere"])
    assert "--to-blobs-credentials" in missing.value.remedy
    with pytest.raises(UserError, match="is not a server's data folder"):
        main(["--data", f"{data}/elsewhere", "--to-blobs", location.url])
    rotten = min(blobs_of(blobs(farm)))
    damage(place_of(blobs(farm), rotten))
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(trustme.CA().cert_pem.bytes())
    to_blobs = ["--to-blobs", location.url, "--to-blobs-ca", str(authorities)]
    assert main(["--data", data, *to_blobs, "--skip-damaged"]) == 1
    printed = capsys.readouterr()
    assert f'blobs = "{location.url}"' in printed.out and f'blobs-endpoint = "{location.endpoint}"' in printed.out
    assert f'blobs-ca = "{authorities}"' in printed.out
    assert "blobs.moved" in printed.out and rotten in printed.err


def test_the_command_shows_no_password(farm: FarmDatabase, database: DatabaseUrl, capsys: pytest.CaptureFixture[str]) -> None:
    with_password = database.text.replace("@", ":a-secret@", 1)
    assert main(["--data", str(farm.path.parent), "--to-database", with_password]) == 0
    printed = capsys.readouterr()
    assert "a-secret" not in printed.out + printed.err
    assert "# with the password instead of ***" in printed.out
