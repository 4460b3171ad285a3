"""`--config` of the commands that work on a server's data: the sources of `etfarm serve`, in its order."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from etfarm.server import bootstrap
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.commands import _options, backup_main, restore_main
from etfarm.server.migrate.commands import main as migrate_main
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.transfer.database import FarmDatabase
from tests.support.full_farm import contents, new_farm
from tests.support.refusals import refuses
from tests.support.s3 import S3Server

SIZES = (0, 10)


@pytest.fixture
def database(new_postgres: Callable[[], DatabaseUrl]) -> DatabaseUrl:
    return new_postgres()


@pytest.fixture
def config(tmp_path: Path, database: DatabaseUrl, s3_server: S3Server) -> Path:
    """The file of a server whose data is in PostgreSQL and S3, with options that only `etfarm serve` has."""
    location = s3_server.new_location()
    keys = tmp_path / "s3-credentials"
    keys.touch(mode=0o600)
    keys.write_text(f"{location.credentials.access_key} {location.credentials.secret_key}\n")
    path = tmp_path / "farm.toml"
    path.write_text(
        f'listen = "127.0.0.1:0"\ndata = "data"\ndatabase = "{database.text}"\nblobs = "{location.url}"\n'
        f'blobs-endpoint = "{location.endpoint}"\nblobs-credentials = "s3-credentials"\nworkers = 2\n'
    )
    return path


@pytest.mark.slow(reason="runs each command")
def test_a_farm_is_restored_backed_up_and_moved_by_its_configuration(
    tmp_path: Path, config: Path, database: DatabaseUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    farm = new_farm(tmp_path / "former", sizes=SIZES)
    back_up(farm.path.parent, tmp_path / "backup")
    assert restore_main([str(tmp_path / "backup"), "--config", str(config), "--keep-identity"]) == 0
    assert f"Start it: etfarm serve --config {config}\n" in capsys.readouterr().out
    assert contents(FarmDatabase(farm.path, database)) == contents(farm)
    assert not list((tmp_path / "data" / "artifacts").glob("blobs/??/*")), "in the bucket"

    assert backup_main([str(tmp_path / "again"), "--config", str(config)]) == 0
    assert "2 artifacts" in capsys.readouterr().out
    assert migrate_main(["--config", str(config), "--to-database", "sqlite", "--to-blobs", "files"]) == 0
    assert contents(FarmDatabase(tmp_path / "data" / "farm.sqlite")) == contents(farm)


@pytest.mark.slow(reason="runs commands for each source of a setting")
def test_options_win_then_variables_then_the_file(
    tmp_path: Path, config: Path, database: DatabaseUrl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    farm = new_farm(tmp_path / "former", sizes=SIZES)
    back_up(farm.path.parent, tmp_path / "backup")
    monkeypatch.setenv("ETFARM_SERVE_CONFIG", str(config))
    monkeypatch.setenv("ETFARM_SERVE_DATA", str(tmp_path / "of-the-variable"))
    assert restore_main([str(tmp_path / "backup"), "--keep-identity"]) == 0
    assert (tmp_path / "of-the-variable").exists() and not (tmp_path / "data").exists()
    assert f"Start it: etfarm serve --config {config}\n" in capsys.readouterr().out
    assert backup_main([str(tmp_path / "again"), "--data", str(farm.path.parent), "--blobs", ""]) == 0
    assert contents(FarmDatabase(farm.path, database)) == contents(farm)


def test_the_first_token_is_created_in_the_database_of_the_configuration(
    tmp_path: Path, config: Path, database: DatabaseUrl
) -> None:
    assert bootstrap.main(["ann", "--config", str(config)]) == 0
    assert len(contents(FarmDatabase(tmp_path / "data" / "farm.sqlite", database))["tokens"]) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("databse = 'postgresql://h/farm'", "there is no setting 'databse'. Did you mean 'database'"),
        ("link = true", "there is no setting 'link'"),
        ("workers = 0", "'workers' must be 1 or more"),
    ],
)
def test_a_mistake_in_the_configuration_is_refused_as_by_serve(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "farm.toml").write_text(line)
    with refuses("BAD_SETTING") as refused:
        backup_main([str(tmp_path / "backup"), "--config", str(tmp_path / "farm.toml")])
    assert why in str(refused.value)


def test_a_variable_that_names_no_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_SERVE_LINK", "true")
    with refuses("BAD_SETTING", match="ETFARM_SERVE_LINK"):
        backup_main([str(tmp_path / "backup")])


def test_a_move_to_the_places_of_a_configuration(
    tmp_path: Path, config: Path, database: DatabaseUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    farm = new_farm(tmp_path / "data", sizes=SIZES)
    before = contents(farm)
    assert migrate_main(["--data", str(farm.path.parent), "--to-config", str(config)]) == 0
    assert contents(FarmDatabase(farm.path, database)) == before
    printed = capsys.readouterr().out
    assert f"etfarm serve --config {config}" in printed
    with refuses("BAD_SETTING", match="no setting"):
        (tmp_path / "bad.toml").write_text("databse = 'x'")
        migrate_main(["--data", str(farm.path.parent), "--to-config", str(tmp_path / "bad.toml")])


def test_the_places_of_a_farm_are_options_that_a_shell_reads(tmp_path: Path) -> None:
    """What `etfarm restore` prints is copied: without quotes, a `&` ends the command, and a space begins another argument."""
    database = DatabaseUrl.parse("postgresql://farm@/farm?host=/run/postgres&port=5432")
    data = tmp_path / "data of the farm"
    printed = "etfarm serve" + _options(data, database, None, None, None, ())
    shell = subprocess.run(["sh", "-c", f'printf "%s\\n" {printed}'], capture_output=True, text=True, check=True)
    arguments = shell.stdout.splitlines()
    assert arguments == ["etfarm", "serve", "--data", str(data), "--database", str(database)]
    assert DatabaseUrl.parse(arguments[-1]) == database
