"""Artifacts beside an empty database, which is not the farm's: another one was named, or the farm's is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from etfarm.server.artifacts.blobs import ARTIFACTS, write_blob
from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.bootstrap import main
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import create_database
from tests.support.databases import new_postgres as new_postgres
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.refusals import refuses
from tests.support.s3 import S3Server, environment_of

WAIT_S = 60.0


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_an_empty_database_beside_artifacts_is_refused_and_the_farms_own_is_not(
    tmp_path: Path, engine: str, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "farm.sqlite"
    url: DatabaseUrl | None = None
    if engine == "postgresql":
        create: Callable[[], DatabaseUrl] = request.getfixturevalue("new_postgres")
        url = create()
    require_known(tmp_path, path, url, WAIT_S)  # a new farm
    blob = write_blob(tmp_path, b"of the farm")
    with refuses("DATABASE_LOST", match="--begin-empty") as refused:
        require_known(tmp_path, path, url, WAIT_S)
    assert str(tmp_path / ARTIFACTS) in refused.value.message
    assert not path.exists(), "nothing is created"
    database = create_database(path, url)
    try:
        asyncio.run(database.open())
    finally:
        database.close()
    require_known(tmp_path, path, url, WAIT_S)
    assert (tmp_path / ARTIFACTS / "blobs" / blob.digest[:2] / blob.digest).exists()


def test_objects_of_a_bucket_count_as_well(tmp_path: Path, s3_server: S3Server) -> None:
    location = s3_server.new_location()
    require_known(tmp_path, tmp_path / "farm.sqlite", None, WAIT_S, location)
    asyncio.run(Bucket(location).put(key_of("ab" * 32), b"of the farm"))
    with refuses("DATABASE_LOST") as refused:
        require_known(tmp_path, tmp_path / "farm.sqlite", None, WAIT_S, location)
    assert location.place in refused.value.message


def test_the_first_token_is_refused_beside_a_bucket_of_a_farm(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, data = s3_server.new_location(), tmp_path / "data"
    asyncio.run(Bucket(location).put(key_of("ab" * 32), b"of the farm"))
    for name, value in environment_of(location).items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "farm.toml"
    config.write_text(f'blobs = "{location.url}"\n')
    with refuses("DATABASE_LOST") as refused:
        main(["ann", "--config", str(config), "--data", str(data)])
    assert location.place in refused.value.message
    assert not (data / "farm.sqlite").exists()
