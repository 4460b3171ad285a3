"""Artifacts beside an empty database, which is not the farm's: another one was named, or the farm's is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from etfarm.server.artifacts.blobs import ARTIFACTS, write_blob
from etfarm.server.artifacts.folder_claim import OWNER, claim, owner_of
from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import BlobsUnusable
from etfarm.server.artifacts.store import Store
from etfarm.server.bootstrap import main
from etfarm.server.state import identity
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import create_database, identity_of
from etfarm.server.state.engine import Database
from etfarm.server.transfer.database import FarmDatabase
from tests.support.databases import new_postgres as new_postgres
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.s3 import S3Server, reach

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
    FarmDatabase(path, url).open()
    require_known(tmp_path, path, url, WAIT_S)
    assert (tmp_path / ARTIFACTS / "blobs" / blob.digest[:2] / blob.digest).exists()


@pytest.fixture
def shared(tmp_path: Path, new_postgres: Callable[[], DatabaseUrl]) -> Iterator[Callable[[], tuple[Path, DatabaseUrl, Store]]]:
    """Create farms in PostgreSQL, whose servers' data folders have one folder of artifacts."""
    (tmp_path / ARTIFACTS).mkdir()
    stores, databases = list[Store](), list[Database]()

    def create() -> tuple[Path, DatabaseUrl, Store]:
        data, url = tmp_path / f"server-{len(stores)}", new_postgres()
        data.mkdir()
        (data / ARTIFACTS).symlink_to(tmp_path / ARTIFACTS)
        databases.append(create_database(data / "farm.sqlite", url))
        asyncio.run(databases[-1].open())
        asyncio.run(databases[-1].write(identity.renew))  # that of a test's database is the template's
        stores.append(Store(data / ARTIFACTS, databases[-1]))
        return data, url, stores[-1]

    yield create
    for store in stores:
        store.close()
    for database in databases:
        database.close()


def test_a_shared_folder_of_artifacts_is_one_farms(
    tmp_path: Path, shared: Callable[[], tuple[Path, DatabaseUrl, Store]], golden: Golden
) -> None:
    (data, url, store), (_, _, other) = (first, second) = shared(), shared()
    asyncio.run(store.open())
    asyncio.run(store.open())  # as that of another server of the farm
    require_known(data, data / "farm.sqlite", url, WAIT_S)
    own = owner_of(tmp_path / ARTIFACTS)
    with pytest.raises(BlobsUnusable) as refused:
        require_known(second[0], second[0] / "farm.sqlite", second[1], WAIT_S)
    with pytest.raises(BlobsUnusable) as at_open:
        asyncio.run(other.open())
    assert str(at_open.value) == str(refused.value) and owner_of(tmp_path / ARTIFACTS) == own is not None
    theirs = identity_of(second[0] / "farm.sqlite", second[1], WAIT_S)
    assert theirs is not None
    texts = {str(tmp_path): "FOLDER", own.farm_id: "FIRST", theirs.farm_id: "SECOND"}
    sentence = str(refused.value)
    for text, name in texts.items():
        sentence = sentence.replace(text, name)
    golden.check(sentence)
    # Both remedies: a folder of its own, and the file of one that is gone for good.
    (second[0] / ARTIFACTS).unlink()
    require_known(second[0], second[0] / "farm.sqlite", second[1], WAIT_S)
    (second[0] / ARTIFACTS).symlink_to(tmp_path / ARTIFACTS)
    (second[0] / ARTIFACTS / OWNER).unlink()
    asyncio.run(other.open())
    with pytest.raises(BlobsUnusable):
        require_known(first[0], first[0] / "farm.sqlite", url, WAIT_S)
    claim(tmp_path / ARTIFACTS, theirs._replace(since=theirs.since + timedelta(seconds=1)))
    with pytest.raises(BlobsUnusable, match="was restored to another database"):
        asyncio.run(other.open())
    assert not list((tmp_path / ARTIFACTS).glob("owner.id.*"))


@pytest.mark.remedy("DATABASE_LOST")
def test_an_empty_database_takes_a_shared_folder_after_its_claim_is_deleted(
    tmp_path: Path, shared: Callable[[], tuple[Path, DatabaseUrl, Store]], new_postgres: Callable[[], DatabaseUrl]
) -> None:
    data, _, store = shared()
    asyncio.run(store.open())
    write_blob(data, b"of the farm")
    with refuses("DATABASE_LOST") as lost:
        require_known(data, data / "farm.sqlite", url := new_postgres(), WAIT_S)
    assert f"delete the file {data / ARTIFACTS / OWNER}, and start `etfarm serve` once with --begin-empty" in lost.value.remedy
    with pytest.raises(BlobsUnusable, match="this is a new one"):
        require_known(data, data / "farm.sqlite", url, WAIT_S, begin_empty=True)
    (data / ARTIFACTS / OWNER).unlink()
    require_known(data, data / "farm.sqlite", url, WAIT_S, begin_empty=True)


def test_the_first_token_is_refused_beside_a_bucket_of_a_farm(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, data = s3_server.new_location(), tmp_path / "data"
    asyncio.run(Bucket(location).put(key_of("ab" * 32), b"of the farm"))
    reach(location, monkeypatch)
    config = tmp_path / "farm.toml"
    config.write_text(f'blobs = "{location.url}"\n')
    with refuses("DATABASE_LOST") as refused:
        main(["ann", "--config", str(config), "--data", str(data)])
    assert location.place in refused.value.message
    assert not (data / "farm.sqlite").exists()
