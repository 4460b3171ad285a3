"""Artifacts in a bucket of a real S3 server: what lasts, what a copy is, and what happens when the server fails."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from etfarm.server.artifacts.errors import ArtifactDamaged, DiskFull
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.s3.blobs import BucketBlobs, key_of
from etfarm.server.artifacts.s3.bucket import PIECE_BYTES, Bucket
from etfarm.server.artifacts.s3.claim import claim
from etfarm.server.artifacts.s3.errors import BlobsAway, BlobsUnavailable, BlobsUnusable
from etfarm.server.artifacts.s3.location import BucketLocation, Credentials
from etfarm.server.artifacts.store import Store
from etfarm.server.state import identity
from etfarm.server.state.engine import Database, DatabaseUnavailable
from etfarm.v1.artifact_pb2 import Chunk
from etfarm.v1.common_pb2 import Artifact
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import Kind
from tests.support.databases import Refusal
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.s3 import S3Server
from tests.support.s3_proxy import S3Proxy, proxy_to
from tests.support.stores import Stores

DATA = os.urandom(100_000)
DIGEST = artifact_of(DATA).digest
WAIT_S = 60.0
SLOW = pytest.mark.slow(reason="waits for retries, or moves many bytes")


@dataclass
class World:
    """A store in a bucket behind a proxy, and what it takes to open another one like it."""

    folder: Path
    database: Database
    stores: Stores
    proxy: S3Proxy
    direct: Bucket
    """The bucket without the proxy."""
    store: Store

    @property
    def blobs(self) -> BucketBlobs:
        assert isinstance(self.store.blobs, BucketBlobs)
        return self.store.blobs

    async def reopen(self, limits: StoreLimits | None = None, *, folder: str = "other", **options: Any) -> None:
        """Replace the store by one of another server, whose folder is empty."""
        self.store.close()
        self.store = self.create(limits, folder=folder, **options)
        await self.store.open()

    def create(self, limits: StoreLimits | None = None, *, folder: str, patience_s: float = 20.0, **options: Any) -> Store:
        assert self.stores.location is not None
        there = replace(self.stores.location, endpoint=f"http://{self.proxy.address}")
        return self.stores.create(self.folder / folder, self.database, limits, location=there, patience_s=patience_s, **options)

    async def object_of(self, digest: str) -> bytes | None:
        """Return the bytes of an artifact's object; None if there is none."""
        size_bytes = await self.direct.size(key_of(digest))
        if size_bytes is None:
            return None
        return b"".join([piece async for piece in self.direct.pieces(key_of(digest), size_bytes)])

    async def keys(self, prefix: str) -> list[str]:
        return [each.key async for page in self.direct.list(prefix) for each in page]

    def copies(self, folder: str = "other") -> set[str]:
        return {path.name for path in (self.folder / folder / "cache").glob("??/*")}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with proxy_to(s3_server.address) as created:
        yield created


@pytest.fixture
async def world(tmp_path: Path, s3_server: S3Server, proxy: S3Proxy, database: Database) -> AsyncIterator[World]:
    stores = Stores(s3_server.new_location())
    assert stores.location is not None
    created = World(tmp_path, database, stores, proxy, Bucket(stores.location), Store(tmp_path / "unused", database))
    await claim(created.direct, await database.read(identity.read))
    await created.reopen(folder="one")
    yield created
    created.store.close()
    stores.close()


async def read(store: Store, digest: str, offset: int = 0) -> bytes:
    return b"".join([chunk.data async for chunk in store.chunks(digest, offset)])


async def chunked(data: bytes) -> AsyncIterator[Chunk]:
    for start in range(0, len(data), 1 << 20):
        yield Chunk(offset=start, data=data[start : start + (1 << 20)])


async def send(store: Store, data: bytes, artifact: Artifact | None = None) -> bool:
    return (await store.receive(artifact or artifact_of(data), chunked(data), "vision", "ann")).complete


async def test_a_new_server_with_an_empty_folder_serves_everything(world: World) -> None:
    assert await send(world.store, DATA)
    assert await world.object_of(DIGEST) == DATA
    await world.reopen()
    assert await world.store.missing([DIGEST], "vision") == []
    assert (await world.store.upload_status(DIGEST, "vision")).complete
    assert await world.store.absent([DIGEST, "a" * 64]) == ["a" * 64]
    assert world.copies() == set(), "what is asked for is not fetched"
    with refuses("ARTIFACT_NOT_FOUND"):
        world.store.path(DIGEST)
    await world.store.require_whole([DIGEST, "a" * 64])
    assert world.store.path(DIGEST).read_bytes() == DATA
    assert world.copies() == {DIGEST}
    await world.reopen(folder="third")
    assert await read(world.store, DIGEST, 70_000) == DATA[70_000:]


async def test_an_artifact_is_recorded_only_after_the_bucket_has_it(world: World) -> None:
    assert await send(world.store, b"another")
    world.proxy.stall()
    sending = asyncio.create_task(send(world.store, DATA))
    await asyncio.to_thread(world.proxy.wait_for, world.proxy.requests, "PUT", 2)
    assert await world.store.holdings.sizes([DIGEST]) == {}
    assert not await world.store.has_for_now(DIGEST)
    world.proxy.heal()
    assert await sending
    assert await world.store.has(DIGEST)


async def test_a_link_permits_to_read_one_object_for_five_minutes_and_nothing_else(world: World, s3_server: S3Server) -> None:
    other = b"other" * 1000
    await send(world.store, DATA)
    await send(world.store, other)
    assert await world.store.link(DIGEST, 0) is None, "a bucket signs nothing unless it is configured"
    presign = f"http://{s3_server.address}"
    await world.reopen(presign=presign)
    link = await world.store.link(DIGEST, 0)
    assert link is not None and link.url.startswith(presign) and link.certificates == b""
    assert parse_qs(urlsplit(link.url).query)["X-Amz-Expires"] == ["300"]
    assert world.blobs.bucket.location.credentials.secret_key not in link.url
    assert await asyncio.to_thread(http, link.url) == (200, DATA)
    assert await asyncio.to_thread(http, link.url, Range="bytes=90000-") == (206, DATA[90_000:])
    for method in ("PUT", "DELETE"):
        assert (await asyncio.to_thread(http, link.url, method))[0] == 403
    assert (await asyncio.to_thread(http, link.url.replace(DIGEST, artifact_of(other).digest)))[0] == 403
    assert (await asyncio.to_thread(http, link.url.replace("X-Amz-Expires=300", "X-Amz-Expires=3600")))[0] == 403
    assert (await asyncio.to_thread(http, link.url.partition("?")[0]))[0] == 403
    assert world.store.downloaded == {"s3": len(DATA)}
    assert world.blobs.bucket.use.signed == 1


async def test_there_is_no_link_to_what_is_not_stored(world: World) -> None:
    await world.reopen(presign="https://s3.example")
    await send(world.store, DATA)
    assert await world.store.link("a" * 64, 0) is None
    assert await world.store.link(DIGEST, len(DATA)) is None
    assert await world.store.link(DIGEST, -1) is None
    assert await world.store.remove([DIGEST], unused_since_s=world.store.uses.clock() + 1) == {DIGEST}
    assert await world.store.link(DIGEST, 0) is None
    assert not world.store.downloaded


def http(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of a request without credentials."""
    request = urllib.request.Request(url, b"" if method == "PUT" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def test_many_callers_share_one_transfer(world: World) -> None:
    await world.store.put(DATA, "ann")
    await world.reopen()
    before = world.proxy.count("GET")
    await asyncio.gather(*(world.store.require_whole([DIGEST]) for _ in range(20)), read(world.store, DIGEST))
    assert world.proxy.count("GET") == before + 1


async def test_deletion_takes_the_object_and_the_copy(world: World) -> None:
    await send(world.store, DATA)
    await world.store.discard([DIGEST])
    assert await world.object_of(DIGEST) is None and world.copies("one") == set()
    await send(world.store, DATA)
    assert await world.store.remove([DIGEST], unused_since_s=world.store.uses.clock() + 1) == {DIGEST}
    assert await world.object_of(DIGEST) is None
    assert await world.store.missing([DIGEST], "vision") == [DIGEST]
    await send(world.store, DATA)
    assert await read(world.store, DIGEST) == DATA, "it can come again"


async def test_what_a_task_uses_is_not_deleted(world: World) -> None:
    await world.store.put(DATA, "ann")
    using, done = asyncio.Event(), asyncio.Event()

    async def use() -> bytes:
        await world.store.require_whole([DIGEST])
        using.set()
        await done.wait()
        return world.store.path(DIGEST).read_bytes()

    user = asyncio.create_task(use())
    await using.wait()
    later_s = world.store.uses.clock() + 1
    assert await world.store.remove([DIGEST], unused_since_s=later_s) == set()
    done.set()
    assert await user == DATA
    assert await world.store.remove([DIGEST], unused_since_s=later_s) == {DIGEST}


async def test_a_503_is_repeated_and_nothing_is_lost(world: World) -> None:
    for method in ("PUT", "GET", "HEAD"):
        world.proxy.answer_503(method, times=4)
    assert await send(world.store, DATA)
    await world.reopen()
    assert await read(world.store, DIGEST) == DATA
    assert world.blobs.bucket.use.requests["get", "failed"] == 0


@pytest.mark.remedy("BLOBS_UNAVAILABLE")
async def test_a_server_that_stays_away_is_reported_and_the_upload_goes_on_later(golden: Golden, world: World) -> None:
    await world.reopen(patience_s=0.5)
    world.proxy.answer_503("PUT")
    with pytest.raises(BlobsUnavailable) as failed:
        await send(world.store, DATA)
    golden.check(str(failed.value).replace(DIGEST[:12], "DIGEST").replace(world.blobs.bucket.location.place, "PLACE"))
    assert (failed.value.kind, failed.value.reason) == (Kind.UNAVAILABLE, "BLOBS_UNAVAILABLE")
    assert await world.store.missing([DIGEST], "vision") == [DIGEST]
    assert (await world.store.upload_status(DIGEST, "vision")).committed_bytes == len(DATA), "the bytes need not come again"
    world.proxy.heal()
    assert (await world.store.receive(artifact_of(DATA), chunked(b""), "vision", "ann")).complete
    assert await world.object_of(DIGEST) == DATA


async def test_a_broken_transfer_is_repeated(world: World) -> None:
    world.proxy.cut("PUT", times=3)
    assert await send(world.store, DATA)
    assert await world.object_of(DIGEST) == DATA
    await world.reopen()
    world.proxy.cut("GET", times=3)
    await world.store.require_whole([DIGEST])
    assert world.store.path(DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("is_database_away", [False, True])
async def test_a_deletion_that_fails_is_made_up_for_also_after_the_database_was_away(
    world: World, *, is_database_away: bool
) -> None:
    await send(world.store, DATA)
    await world.reopen(patience_s=0.2)
    world.proxy.answer_503("DELETE")
    assert await world.store.remove([DIGEST], unused_since_s=world.store.uses.clock() + 1) == {DIGEST}
    assert not await world.store.has(DIGEST)
    assert await world.object_of(DIGEST) == DATA
    world.proxy.heal()
    world.blobs.repeat_s = 0.05 if is_database_away else world.blobs.repeat_s
    guard = Refusal(DatabaseUnavailable("The database is away.", "Try again."))
    world.database.guard = guard if is_database_away else None
    tending = asyncio.create_task(world.blobs.tend())
    if is_database_away:
        assert await asyncio.to_thread(guard.has_refused.wait, WAIT_S)
        world.database.guard = None
    await asyncio.to_thread(world.proxy.wait_for, world.proxy.answered, "DELETE", 1)
    tending.cancel()
    assert await world.object_of(DIGEST) is None


async def test_bytes_that_are_damaged_on_their_way_are_fetched_again(world: World) -> None:
    await world.store.put(DATA, "ann")
    await world.reopen()
    world.proxy.corrupt(times=1)
    await world.store.require_whole([DIGEST])
    assert world.store.path(DIGEST).read_bytes() == DATA
    assert await world.keys("quarantine") == []


async def test_a_reader_of_the_damaged_bytes_is_not_given_their_end(world: World) -> None:
    data = os.urandom(2 * PIECE_BYTES)
    artifact = await world.store.put(data, "ann")
    await world.reopen()
    world.proxy.corrupt(times=1)
    with pytest.raises(BlobsUnavailable):
        await read(world.store, artifact.digest)
    assert await read(world.store, artifact.digest) == data


@pytest.mark.parametrize("how", ["require", "read", "verify"])
async def test_a_damaged_object_is_quarantined_and_an_upload_heals_it(world: World, how: str) -> None:
    await send(world.store, DATA)
    await world.stores.damage(world.store, DIGEST)
    await world.reopen()
    damage: list[tuple[str, int]] = []
    world.store.integrity.on_damaged = lambda digest, size_bytes: damage.append((digest, size_bytes))
    match how:
        case "require":
            with pytest.raises(ArtifactDamaged):
                await world.store.require_whole([DIGEST])
        case "read":
            with pytest.raises(ArtifactDamaged):
                await read(world.store, DIGEST)
        case "verify":
            assert [row[3] async for row in world.store.verify()] == [[artifact_of(DATA)]]
    assert damage == [(DIGEST, len(DATA))]
    assert await world.object_of(DIGEST) is None
    (kept,) = await world.keys("quarantine")
    assert kept.startswith(f"quarantine/{DIGEST}.")
    for folder in ("other", "third"):
        assert await world.store.missing([DIGEST], "vision") == [DIGEST]
        with pytest.raises(ArtifactDamaged):
            world.store.path(DIGEST)
        await world.reopen(folder=folder)
    assert await send(world.store, DATA)
    assert await world.store.missing([DIGEST], "vision") == []
    await world.reopen(folder="fourth")
    assert await read(world.store, DIGEST) == DATA


async def test_a_damaged_copy_is_fetched_again(world: World) -> None:
    await send(world.store, DATA)
    await world.store.require_whole([DIGEST])
    world.store.close()
    copy = world.store.path(DIGEST)
    copy.chmod(0o600)
    copy.write_bytes(DATA[::-1])
    await world.reopen(folder="one")
    await world.store.require_whole([DIGEST])
    assert world.store.path(DIGEST).read_bytes() == DATA
    assert await world.keys("quarantine") == []


async def test_verify_compares_the_bucket_with_the_database(world: World) -> None:
    kept, lost = await world.store.put(DATA, "ann"), await world.store.put(b"lost", "ann")
    await world.direct.delete(key_of(lost.digest))
    orphan = hashlib.sha256(b"orphan").hexdigest()
    await world.direct.put(key_of(orphan), b"orphan")
    rows = [row async for row in world.store.verify()]
    assert [artifact for row in rows for artifact in row[3]] == [lost]
    assert rows[-1][:2] == (2, 2)
    assert await world.object_of(orphan) == b"orphan", "a young one may be about to be recorded"
    assert await world.store.absent([kept.digest, lost.digest]) == [lost.digest]


async def test_copies_are_bounded_the_least_recently_used_go_and_those_in_use_stay(world: World) -> None:
    stored = [(await world.store.put(os.urandom(1000), "ann")).digest for _ in range(4)]
    await world.reopen(StoreLimits(cache_bytes=2500))

    async def use(*digests: str) -> set[str]:
        await world.store.require_whole(digests)
        return world.copies()

    assert await asyncio.create_task(use(*stored[:2])) == set(stored[:2])
    assert await asyncio.create_task(use(stored[0])) == set(stored[:2])
    assert await asyncio.create_task(use(stored[2])) == {stored[0], stored[2]}
    assert await asyncio.create_task(use(*stored)) == set(stored), "a task needs all of them"
    assert await asyncio.create_task(use(stored[3])) >= {stored[3]}
    await asyncio.create_task(use((await world.store.put(os.urandom(1000), "ann")).digest))
    assert len(world.copies()) == 2
    assert await read(world.store, stored[1])


async def test_a_full_disk_gives_up_copies_first(world: World) -> None:
    stored = [(await world.store.put(os.urandom(1000), "ann")).digest for _ in range(3)]
    size_bytes, folder = 3000, world.folder / "full"
    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        blobs = BucketBlobs(
            world.direct, folder, folder, world.store.holdings, lambda: world.database.read(identity.read), pool, pool,
            cache_bytes=1 << 30, floor_bytes=200, free=lambda _: size_bytes - 1000 * len(world.copies("full")),
        )  # fmt: skip
        for digest in stored:
            assert await asyncio.create_task(blobs.bring([digest])) == []
        assert world.copies("full") == {stored[1], stored[2]}
        size_bytes = 1000
        with pytest.raises(DiskFull):
            await blobs.bring([stored[1], stored[2], stored[0]])


async def test_uploads_may_use_the_space_of_copies(world: World) -> None:
    await send(world.store, DATA)
    free = shutil.disk_usage(world.folder).free
    assert world.store.room.measure().free_bytes == pytest.approx(free + len(DATA), abs=256 << 20)
    assert world.store.blobs.spare_bytes() == len(DATA)
    await world.store.require_whole([DIGEST])
    assert world.store.blobs.spare_bytes() == 0


@SLOW
async def test_a_large_artifact_streams_while_it_is_fetched(world: World) -> None:
    data = os.urandom(5 * PIECE_BYTES + 12345)
    artifact = await world.store.put(data, "ann")
    assert await world.object_of(artifact.digest) == data
    await world.reopen()
    world.proxy.cut("GET", times=2)
    assert await read(world.store, artifact.digest) == data


@SLOW
async def test_a_server_that_does_not_answer_is_given_up(world: World) -> None:
    await world.store.put(DATA, "ann")
    slow = world.create(folder="slow", patience_s=1.0, timeout_s=0.5)
    world.proxy.stall()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(BlobsUnavailable):
            await slow.require_whole([DIGEST])
    world.proxy.heal()
    await slow.require_whole([DIGEST])
    assert slow.path(DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("wrong", ["bucket", "secret", "key", "endpoint"])
async def test_a_bucket_that_cannot_be_used_is_refused_at_the_start(
    golden: Golden, world: World, s3_server: S3Server, wrong: str
) -> None:
    location = s3_server.location("x")
    match wrong:
        case "bucket":
            location = replace(location, bucket="no-such-bucket")
        case "secret":
            location = replace(location, credentials=Credentials("farm", "another-secret"))
        case "key":
            location = replace(location, credentials=Credentials("nobody", "another-secret"))
        case "endpoint":
            location = replace(location, endpoint="http://127.0.0.1:1")
    with pytest.raises(BlobsUnusable) as refused:
        await Bucket(location, patience_s=0.2).check()
    assert isinstance(refused.value, BlobsAway) == (wrong == "endpoint")
    golden.check(str(refused.value).replace(location.endpoint, "ENDPOINT"))
    assert "secret" not in str(refused.value)


async def test_a_bucket_that_is_gone_takes_no_artifact_with_it(s3_server: S3Server) -> None:
    """Requests fail at once and say why. An answer to HEAD, which has no code, does not count as one about the object."""
    bucket = Bucket(replace(s3_server.location("x"), bucket="no-such-bucket"), patience_s=WAIT_S)

    async def pages() -> None:
        async for _ in bucket.list("k"):
            pass

    async def pieces() -> None:
        async for _ in bucket.pieces("k", 10):
            pass

    calls = (lambda: bucket.size("k"), pages, pieces, lambda: bucket.put("k", b"x"), lambda: bucket.delete("k"))
    for call in calls:
        with pytest.raises(BlobsUnavailable) as failed:
            await call()
        assert failed.value.metadata["why"] == "there is no bucket 'no-such-bucket'"
        assert "to create it, or correct --blobs" in failed.value.remedy
    assert bucket.use.retries == 0


async def test_artifacts_of_this_machine_are_not_left_behind(golden: Golden, world: World, tmp_path: Path) -> None:
    await Store(tmp_path / "one", world.database).put(DATA, "ann")
    with pytest.raises(BlobsUnusable) as refused:
        await world.create(folder="one").open()
    assert world.stores.location is not None
    golden.check(str(refused.value).replace(world.stores.location.url, "URL"))


def test_the_credentials_are_in_no_representation() -> None:
    location = BucketLocation("etfarm", "", "", "us-east-1", Credentials("AKIA", "very-secret", "token-secret"))
    assert "secret" not in f"{location!r} {location} {Bucket(location)!r}"


async def test_artifacts_in_a_bucket_are_not_taken_for_files(golden: Golden, world: World) -> None:
    with golden.refuses("BLOBS_UNUSABLE"):
        await Store(world.folder / "one", world.database).open()


async def test_verify_deletes_nothing_of_a_bucket_beside_a_database_that_names_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.artifacts.s3.blobs.ORPHAN_AGE", timedelta(days=-1))
    orphan = hashlib.sha256(b"orphan").hexdigest()
    await world.direct.put(key_of(orphan), b"orphan")
    assert [row[:2] async for row in world.store.verify()] == [(0, 0)]
    assert await world.object_of(orphan) == b"orphan"
    await world.store.put(DATA, "ann")
    assert [row async for row in world.store.verify()][-1][3] == []
    assert await world.object_of(orphan) is None
    assert await world.object_of(DIGEST) == DATA
