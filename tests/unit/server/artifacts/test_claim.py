"""Two farms that name one folder of a bucket: the second is refused, and deletes nothing of the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER, Claim, claim, owner_of
from etfarm.server.artifacts.s3.errors import BlobsUnavailable, BlobsUnusable
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.artifacts.store import Store
from etfarm.server.state import identity
from etfarm.server.state.engine import Database
from etfarm.server.state.identity import NEVER, Identity
from etfarm.server.transfer.database import FarmDatabase
from etfarm.wire.chunks import artifact_of
from tests.support.databases import new_database, opened
from tests.support.full_farm import committed
from tests.support.golden import Golden
from tests.support.s3 import S3Server
from tests.support.s3_proxy import proxy_to
from tests.support.stores import Stores

DATA = b"of both farms"
DIGEST = artifact_of(DATA).digest
WAIT_S = 5.0
NOW = datetime(2026, 1, 2, 3, 4, 5, 600000, UTC)


@dataclass
class Farm:
    """A farm's database and its store."""

    database: Database
    store: Store

    async def id(self) -> str:
        return (await self.identity()).farm_id

    async def identity(self) -> Identity:
        return await self.database.read(identity.read)


def named(farm_id: str) -> Callable[[], Awaitable[Identity]]:
    """Return what asks a farm for its identity."""

    async def ask() -> Identity:
        return Identity(farm_id, NOW)

    return ask


@pytest.fixture
def location(s3_server: S3Server) -> BucketLocation:
    return s3_server.new_location()


@pytest.fixture
def stores(location: BucketLocation) -> Iterator[Stores]:
    created = Stores(location)
    yield created
    created.close()


@asynccontextmanager
async def running(stores: Stores, folder: Path) -> AsyncIterator[Farm]:
    """Yield a farm of the bucket's folder, whose server does its late work."""
    folder.mkdir()
    async with opened(new_database(folder / "farm.sqlite")) as database:
        await database.write(identity.renew)  # that of a test's database is the template's
        farm = Farm(database, stores.create(folder / "artifacts", database, patience_s=1.0))
        try:
            await farm.store.open()
            yield farm
        finally:
            farm.store.close()


async def test_a_second_farm_neither_stores_nor_deletes_in_the_folder_of_another(
    stores: Stores, location: BucketLocation, tmp_path: Path, golden: Golden
) -> None:
    bucket = Bucket(location)
    async with running(stores, tmp_path / "first") as first, running(stores, tmp_path / "second") as second:
        assert (await first.store.put(DATA, "ann")).digest == DIGEST
        assert await owner_of(bucket) == await first.identity()
        with pytest.raises(BlobsUnavailable) as refused:
            await second.store.put(b"other data", "bob")
        golden.check(
            str(refused.value)
            .replace(location.place, "PLACE")
            .replace(location.url, "URL")
            .replace(await first.id(), "FIRST")
            .replace(await second.id(), "SECOND")
        )
        assert refused.value.failure.is_lasting
        # As after a restore of the first farm's backup: the database names an artifact that the bucket has.
        await second.store.holdings.add("vision", [DIGEST], "bob", {DIGEST: len(DATA)})
        await second.store.holdings.forget([DIGEST])
        assert second.store.blobs.withdraw(DIGEST)
        await second.store.blobs.delete([DIGEST])
        assert await bucket.size(key_of(DIGEST)) == len(DATA)


async def test_a_folder_whose_claim_was_deleted_is_the_next_farms(
    stores: Stores, location: BucketLocation, tmp_path: Path
) -> None:
    bucket = Bucket(location)
    async with running(stores, tmp_path / "first") as first, running(stores, tmp_path / "second") as second:
        former = Claim(bucket, first.identity)
        await former.require()
        await bucket.delete(OWNER)
        await second.store.put(DATA, "bob")
        assert await owner_of(bucket) == await second.identity()
        await former.require()  # it is not asked each time
        with pytest.raises(BlobsUnavailable):
            await former.renew()
        with pytest.raises(BlobsUnavailable):
            await former.require()


async def test_the_claim_stands_while_the_server_is_away(location: BucketLocation) -> None:
    away = Claim(Bucket(replace(location, endpoint="http://127.0.0.1:9"), patience_s=0.1), named("mine"))
    await Claim(Bucket(location), named("mine")).renew()
    for _ in range(2):
        with pytest.raises(BlobsUnavailable):
            await away.require()
    assert await owner_of(Bucket(location)) == Identity("mine", NOW)


async def test_objects_of_an_earlier_release_are_the_farms_that_comes_first(location: BucketLocation) -> None:
    await Bucket(location).put(key_of(DIGEST), DATA)
    await claim(Bucket(location), Identity("the-first", NOW))
    with pytest.raises(BlobsUnavailable, match="the-first"):
        await claim(Bucket(location), Identity("the-second", NOW))


async def test_of_two_farms_that_claim_a_folder_at_one_moment_one_holds_it(
    location: BucketLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow, goes_on = Bucket(location), Bucket(location), asyncio.Event()

    create = slow.create

    async def create_late(key: str, data: bytes) -> None:
        await goes_on.wait()
        await create(key, data)

    monkeypatch.setattr(slow, "create", create_late)
    holder, late = Claim(quick, named("first")), Claim(slow, named("second"))
    coming = asyncio.create_task(late.require())
    await asyncio.sleep(0.3)  # it has seen that nobody has the folder
    await holder.require()
    goes_on.set()
    with pytest.raises(BlobsUnavailable, match="another farm, first, and this is second"):
        await coming
    await holder.renew()


async def test_credentials_that_may_not_ask_for_missing_objects_suffice(s3_server: S3Server, tmp_path: Path) -> None:
    """S3 refuses such requests where the credentials may list a prefix of the bucket only."""
    with proxy_to(s3_server.address) as proxy:
        proxy.deny_missing()
        location = s3_server.new_location(proxy.address)
        bucket = Bucket(location, patience_s=1.0)
        await bucket.check()
        assert await owner_of(bucket) is None
        assert await bucket.size(key_of(DIGEST)) is None
        assert await bucket.text("copying", 10) is None
        with pytest.raises(FileNotFoundError):
            await bucket.move(key_of(DIGEST), "there")
        stores = Stores(location)
        async with running(stores, tmp_path / "farm") as farm:
            await farm.store.put(DATA, "ann")
            assert await owner_of(bucket) == await farm.identity()
            assert await bucket.size(key_of(DIGEST)) == len(DATA)
        stores.close()


async def test_a_server_without_conditions_keeps_a_claim(location: BucketLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    put = obstore.put_async

    async def put_unconditionally(*arguments: Any, mode: str = "overwrite", **options: Any) -> Any:
        if mode == "create":
            raise obstore.exceptions.GenericError("<Error><Code>NotImplemented</Code></Error>")
        return await put(*arguments, **options)

    monkeypatch.setattr(obstore, "put_async", put_unconditionally)
    await claim(Bucket(location), Identity("mine", NOW))
    assert await owner_of(Bucket(location)) == Identity("mine", NOW)


@pytest.mark.parametrize("begin_empty", [False, True])
def test_no_server_starts_on_another_farms_folder(location: BucketLocation, tmp_path: Path, *, begin_empty: bool) -> None:
    path = tmp_path / "farm.sqlite"

    def require() -> None:
        require_known(tmp_path, path, None, WAIT_S, location, begin_empty=begin_empty)

    require()
    asyncio.run(claim(Bucket(location), Identity("another", NOW)))
    with pytest.raises(BlobsUnusable, match="another farm, another, and this is a new one"):
        require()
    assert not path.exists()
    FarmDatabase(path).open()
    with committed(FarmDatabase(path)) as connection:
        own = identity.read(connection)
    with pytest.raises(BlobsUnusable, match=f"this is {own.farm_id}") as refused:
        require()
    assert f"delete the object {location.url}/{OWNER}" in refused.value.remedy
    asyncio.run(Bucket(location).delete(OWNER))
    require()
    asyncio.run(claim(Bucket(location), own))
    require()


async def test_a_farm_that_was_restored_as_itself_takes_the_folder_over(
    stores: Stores, location: BucketLocation, tmp_path: Path, golden: Golden
) -> None:
    bucket = Bucket(location)
    async with running(stores, tmp_path / "farm") as farm:
        await farm.store.put(DATA, "ann")
        former = Claim(bucket, farm.identity)
        await former.renew()
        restored = (await farm.identity()).later_than(await owner_of(bucket))
        restored = restored._replace(since=restored.since + timedelta(seconds=1))
        await claim(bucket, restored)
        with pytest.raises(BlobsUnavailable) as refused:
            await former.renew()
        golden.check(
            str(refused.value)
            .replace(location.place, "PLACE")
            .replace(location.url, "URL")
            .replace(f"{restored.since:%Y-%m-%d %H:%M:%S}", "TIME")
        )
        with pytest.raises(BlobsUnavailable):
            await former.require()
        path = tmp_path / "farm" / "farm.sqlite"
        with pytest.raises(BlobsUnusable, match="was restored to another database"):
            await asyncio.to_thread(require_known, tmp_path, path, None, WAIT_S, location)
        assert await owner_of(bucket) == restored
        # The remedy for one that is gone for good.
        await bucket.delete(OWNER)
        await asyncio.to_thread(require_known, tmp_path, path, None, WAIT_S, location)
        await former.renew()
        await claim(bucket, restored)
        assert await owner_of(bucket) == restored


@pytest.mark.parametrize("text", ["mine", "mine yesterday", "mine 9999-12-31T23:59:59-23:00", ""])
def test_a_claim_whose_time_somebody_has_changed_is_the_earliest(text: str) -> None:
    assert Identity.parse(text) == Identity(text.partition(" ")[0], NEVER)
    mine = Identity("mine", NOW)
    assert Identity.parse(mine.text) == mine and mine.later_than(mine).since > NOW
