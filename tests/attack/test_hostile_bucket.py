"""A bucket that somebody else writes, and an S3 server that lies: no wrong bytes, no flood, no endless call, no user's fault."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import trustme
from structlog.testing import capture_logs

from etfarm.server.artifacts.errors import ArtifactDamaged
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.s3 import blobs
from etfarm.server.artifacts.s3.blobs import BucketBlobs, key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import BlobsUnavailable, BlobsUnusable
from etfarm.server.artifacts.store import Store
from etfarm.server.state.engine import Database
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import EtfarmError, Fault
from tests.support.databases import new_database
from tests.support.hostile_s3 import HostileS3, Lie, facts, hostile_s3, listing, reply
from tests.support.receivers import drip, hang, raw, receiver, status
from tests.support.refusals import refuses
from tests.support.s3 import S3Server

pytestmark = pytest.mark.slow(reason="waits for retries, and sends floods")

DATA = random.Random(1).randbytes(1_200_000)  # its digest is in the names of tests
DIGEST = artifact_of(DATA).digest
KEY = key_of(DIGEST)
OTHER = random.Random(2).randbytes(len(DATA))
PATIENCE_S = 0.5
ANSWER_S = 3.0
END_S = 60.0
"""Time within which every call ends, with a margin for a busy machine."""
FLOOD_BYTES = 600 << 20
"""What a flood sends at most, to a client that takes it."""
ROOM_BYTES = 150 << 20
"""What the memory of this process may grow by in a flood."""


@dataclass
class World:
    """A store whose bucket is in the hands of an attacker."""

    folder: Path
    database: Database
    s3: HostileS3
    store: Store

    async def reopen(self, name: str, limits: StoreLimits | None = None) -> None:
        """Replace the store by one of another server, which has no copies."""
        self.store.close()
        bucket = Bucket(self.s3.location(), patience_s=PATIENCE_S, timeout_s=ANSWER_S)
        self.store = Store(self.folder / name, self.database, limits, bucket=bucket)
        assert isinstance(self.store.blobs, BucketBlobs)
        self.store.blobs.quarantine_s = 2.0
        async with asyncio.timeout(END_S):
            await self.store.open()

    def copies(self) -> set[str]:
        return {path.name for path in self.folder.glob("*/cache/??/*")}

    def files(self) -> list[Path]:
        """Return what transfers have left."""
        return list(self.folder.glob("*/uploads/fetch-*"))

    def gets(self) -> list[str]:
        return [request for request in self.s3.requests if request.startswith("GET ") and DIGEST in request]


@pytest.fixture
def s3() -> Iterator[HostileS3]:
    with hostile_s3() as server:
        yield server


@pytest.fixture
async def world(tmp_path: Path, s3: HostileS3) -> AsyncIterator[World]:
    """A farm with one artifact, and a server that has no copy of it."""
    database = new_database(tmp_path / "farm.sqlite")
    await database.open()
    created = World(tmp_path, database, s3, Store(tmp_path / "unused", database))
    await created.reopen("writer")
    await created.store.put(DATA, "ann")
    created.store.place(DIGEST).unlink()
    await created.reopen("reader")
    yield created
    created.store.close()
    database.close()


async def read(store: Store, digest: str = DIGEST) -> bytes:
    return b"".join([chunk.data async for chunk in store.chunks(digest, 0)])


async def require(store: Store) -> None:
    await store.require_whole([DIGEST])


async def verify(store: Store) -> list[str]:
    """Return the digests of the artifacts that a verification reports."""
    return [artifact.digest async for row in store.verify() for artifact in row[3]]


async def blamed(call: Callable[[], object], *kinds: type[EtfarmError]) -> EtfarmError:
    """Return the error of a call, which ends in time and is the farm's."""
    async with asyncio.timeout(END_S):
        with pytest.raises(kinds) as raised:
            await call()  # type: ignore[misc]
    assert raised.value.fault is Fault.FARM
    return raised.value


# Whoever can write the bucket


BAD: dict[str, bytes] = {
    "another artifact's bytes": OTHER,
    "one bit": bytes([DATA[0] ^ 1]) + DATA[1:],
    "a byte less": DATA[:-1],
    "nothing": b"",
    "a byte more": DATA + b"!",
    "ten times": DATA * 10,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("use", [read, require])
async def test_replaced_bytes_are_neither_served_nor_kept(world: World, bad: str, use: Callable[[Store], object]) -> None:
    world.s3.objects[KEY] = BAD[bad]
    await blamed(lambda: use(world.store), ArtifactDamaged)
    assert world.copies() == set() and world.files() == []
    assert KEY not in world.s3.objects
    (kept,) = [key for key in world.s3.objects if key.startswith("quarantine/")]
    assert world.s3.objects[kept] == BAD[bad]
    assert await world.store.missing([DIGEST], "default") == [DIGEST], "an upload heals it"
    if len(BAD[bad]) != len(DATA):
        assert world.gets() == [], "what has another size is not read"


@pytest.mark.parametrize("bad", BAD)
async def test_a_verification_detects_replaced_bytes(world: World, bad: str) -> None:
    world.s3.objects[KEY] = BAD[bad]
    assert await verify(world.store) == [DIGEST]
    assert KEY not in world.s3.objects


async def test_an_object_that_claims_a_petabyte_costs_no_copies(world: World) -> None:
    other = await world.store.put(OTHER, "ann")
    world.s3.lies["HEAD"] = lambda request: reply(request, 200, b"", **facts() | {"Content-Length": str(10**15)})
    await blamed(lambda: require(world.store), ArtifactDamaged)
    assert world.copies() == {other.digest}
    assert world.store.path(other.digest).read_bytes() == OTHER


async def test_an_object_that_is_replaced_while_it_is_read_is_not_served(world: World) -> None:
    honest = world.s3.answer

    def replace_then_answer(request: BaseHTTPRequestHandler) -> None:
        world.s3.objects[KEY] = OTHER[::-1] if world.s3.objects[KEY] == OTHER else OTHER
        honest(request, KEY, {})

    world.s3.lies["GET"] = replace_then_answer
    await blamed(lambda: read(world.store), ArtifactDamaged)
    assert world.copies() == set()


async def test_an_object_that_shrinks_between_size_and_read_is_not_kept(world: World) -> None:
    honest = world.s3.answer

    def shrink(request: BaseHTTPRequestHandler) -> None:
        world.s3.objects[KEY] = DATA[:1000]
        honest(request, KEY, {})

    world.s3.lies["GET"] = shrink
    error = await blamed(lambda: require(world.store), BlobsUnavailable)
    assert "1000 bytes arrived instead of 1200000" in error.metadata["why"]
    del world.s3.lies["GET"]
    await blamed(lambda: require(world.store), ArtifactDamaged)
    assert world.copies() == set()


async def test_a_copy_that_was_verified_outlasts_the_object(world: World) -> None:
    await require(world.store)
    world.s3.objects[KEY] = OTHER
    before = len(world.gets())
    assert await read(world.store) == DATA
    assert len(world.gets()) == before


async def test_an_object_under_the_digest_of_none_is_not_read(world: World) -> None:
    """Whoever can write the bucket cannot bring an artifact into the farm."""
    digest = artifact_of(OTHER).digest
    world.s3.objects[key_of(digest)] = OTHER
    with refuses("ARTIFACT_NOT_FOUND"):
        await read(world.store, digest)
    assert not [request for request in world.s3.requests if digest in request]


HOSTILE_KEYS = [
    "{0}/../../etc/passwd", "{0}//", "{0}/aa/..", "{0}/\x1b[2J", "{0}/aa/" + "x" * 900, "{0}/" + DIGEST, "{0}/zz/" + DIGEST,
    "{0}/aa/" + "A" * 64, "{0}/aa/\U0001f600\u202e", "/etc/passwd", "other/" + DIGEST,
]  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE_KEYS)
async def test_no_key_keeps_a_server_from_starting_or_an_artifact_from_being_read(world: World, key: str) -> None:
    world.s3.lies["LIST"] = lambda request: reply(request, 200, listing([(key.format("quarantine"), 1)]))
    await world.reopen("next")
    assert await read(world.store) == DATA
    world.s3.lies["LIST"] = lambda request: reply(request, 200, listing([(key.format("blobs"), 1)], old=True))
    assert await verify(world.store) == []
    assert world.s3.objects[KEY] == DATA
    assert not [request for request in world.s3.requests if request.startswith("DELETE ") and "probe" not in request]


async def test_a_full_quarantine_does_not_keep_a_server_from_starting(world: World) -> None:
    names = [f"quarantine/{number:064x}.1" for number in range(100_000)]
    body = listing([(name, 1) for name in names[:1000]])
    pages = [body.replace(b"quarantine/" + b"0" * 30, b"quarantine/" + b"%030d" % page) for page in range(100)]
    served = iter(pages)
    world.s3.lies["LIST"] = lambda request: reply(request, 200, next(served, listing([])))
    heads = sum(request.startswith("HEAD ") for request in world.s3.requests)
    await world.reopen("next")
    assert sum(request.startswith("HEAD ") for request in world.s3.requests) == heads, "no artifact has these names"
    assert await read(world.store) == DATA


async def test_only_old_objects_at_an_artifacts_place_are_deleted(world: World) -> None:
    stray = artifact_of(b"stray").digest
    names = [KEY, key_of(stray), "blobs/readme", "blobs/aa/" + "A" * 64]
    world.s3.objects |= dict.fromkeys(names[1:], b"stray")
    world.s3.lies["LIST"] = lambda request: reply(request, 200, listing([(name, 5) for name in sorted(names)], old=True))
    served = world.s3.lies["LIST"]

    def once(request: BaseHTTPRequestHandler) -> None:
        served(request)
        world.s3.lies["LIST"] = lambda request: reply(request, 200, listing([]))

    world.s3.lies["LIST"] = once
    assert await verify(world.store) == []
    assert [name for name in names if name not in world.s3.objects] == [key_of(stray)]


async def test_many_strays_are_deleted_a_group_at_a_time(world: World) -> None:
    strays = [key_of(f"{number:064x}") for number in range(300)]
    world.s3.objects |= dict.fromkeys(strays, b"stray")
    pages = iter([listing([(key, 5) for key in sorted(strays)], old=True)])
    world.s3.lies["LIST"] = lambda request: reply(request, 200, next(pages, listing([])))
    at_once, most, lock = 0, 0, threading.Lock()
    honest = world.s3.answer

    def delete(request: BaseHTTPRequestHandler) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        honest(request, urlsplit(request.path).path.split("/", 2)[2], {})
        with lock:
            at_once -= 1

    world.s3.lies["DELETE"] = delete
    assert await verify(world.store) == []
    assert not set(strays) & world.s3.objects.keys()
    assert most <= blobs._FLIGHTS


# A server that lies


def flooded(s3: HostileS3, code: int, **headers: str) -> Lie:
    """Answer with a body that does not end."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response_only(code)
        for name, value in (facts() | {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}"} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Connection", "close")
        request.end_headers()
        s3.flood(request, FLOOD_BYTES)

    return answer


def ranged(body: bytes, code: int = 206, **headers: str) -> Callable[[HostileS3], Lie]:
    where = {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda s3: lambda request: reply(request, code, body, **facts() | where | named)


LIES: dict[str, Callable[[HostileS3], Lie]] = {
    "200 instead of 206": ranged(DATA * 2, 200),
    "an endless body": lambda s3: flooded(s3, 206),
    "an endless body of a known size": lambda s3: flooded(s3, 206, Content_Length=str(10**12)),
    "an endless chunked body": lambda s3: flooded(s3, 206, Transfer_Encoding="chunked"),
    "an endless body of 200": lambda s3: flooded(s3, 200, Content_Length=str(10**12)),
    "another range": ranged(DATA, Content_Range="bytes 5-1200004/9000000"),
    "a range of a petabyte": ranged(DATA, Content_Range=f"bytes 0-{10**15}/{10**15}"),
    "no range": ranged(DATA, Content_Range=""),
    "fewer bytes": ranged(DATA[:1000]),
    "204": ranged(b"", 204),
    "an error without a body": ranged(b"", 500),
    "an error with controls": ranged(b"<Error><Code>\x1b[2J\n</Code></Error>", 400),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_no_s3_server_gives_ends_as_the_farms_error_in_bounded_memory(world: World, lie: str) -> None:
    world.s3.lies["GET"] = LIES[lie](world.s3)
    process = psutil.Process()
    before, most, over = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.01):
            most = max(most, process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        error = await blamed(lambda: require(world.store), BlobsUnavailable)
    finally:
        over.set()
        watching.join()
    assert "\x1b" not in error.message and "\n" not in error.message
    assert most - before < ROOM_BYTES
    assert world.copies() == set() and world.files() == []
    world.s3.lies.clear()
    assert await read(world.store) == DATA


async def test_bytes_are_never_expanded(world: World) -> None:
    """An artifact that is a bomb is its own bytes, whatever encoding its object names."""
    bomb = gzip.compress(b"\0" * 100_000_000)
    artifact = await world.store.put(bomb, "ann")
    await world.reopen("next")
    world.s3.lies["GET"] = lambda request: reply(
        request, 206, bomb, **facts() | {"Content-Encoding": "gzip", "Content-Range": f"bytes 0-{len(bomb) - 1}/{len(bomb)}"}
    )
    assert await read(world.store, artifact.digest) == bomb


@pytest.mark.parametrize("size", ["-5", "1e3", "0x10", "9" * 30, ""])
async def test_a_size_that_is_none_is_the_farms_error(world: World, size: str) -> None:
    world.s3.lies["HEAD"] = lambda request: reply(request, 200, b"", **facts() | {"Content-Length": size})
    await blamed(lambda: require(world.store), BlobsUnavailable, ArtifactDamaged)
    assert world.copies() == set()


ENTITIES = "".join(f'<!ENTITY {name} "{f"&{of};" * 10}">' for of, name in zip("abcdefgh", "bcdefghi", strict=True))
BOMB = f'<!DOCTYPE l [<!ENTITY a "aaaaaaaaaa">{ENTITIES}]><ListBucketResult><Name>&i;</Name></ListBucketResult>'
FILE = '<!DOCTYPE l [<!ENTITY a SYSTEM "file:///etc/passwd">]><ListBucketResult><Name>&a;</Name></ListBucketResult>'
NEXT = b"<NextContinuationToken>a</NextContinuationToken>"
LISTS: dict[str, bytes] = {
    "a bomb of entities": BOMB.encode(),
    "an entity of a file": FILE.encode(),
    "the same page": listing([(key_of(f"{number:064x}"), 1) for number in range(1001)], 1000),
    "a page that it says is followed by itself": listing([(key_of("a" * 64), 1)] * 2, 1),
    "empty pages without end": listing([]).replace(b"false</IsTruncated>", b"true</IsTruncated>" + NEXT),
    "sizes that are none": listing([(key_of("a" * 64), "9" * 40)]),
    "a nest": b"<a>" * 300_000,
    "no XML": b"hello",
    "another page": b"<html><body>Sign in to this network</body></html>",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("lie", LISTS)
async def test_a_list_that_lies_loses_no_artifact_and_ends(world: World, lie: str) -> None:
    world.s3.lies["LIST"] = lambda request: reply(request, 200, LISTS[lie])
    await world.reopen("next")
    async with asyncio.timeout(END_S):
        assert await verify(world.store) == []
    assert await world.store.missing([DIGEST], "default") == []
    assert world.s3.objects[KEY] == DATA


@pytest.mark.parametrize("talk", [hang, drip])
async def test_a_server_that_never_finishes_its_answer_is_given_up(
    world: World, talk: Callable[[socket.socket, threading.Event], None]
) -> None:
    with raw(talk) as slow:
        location = replace(world.s3.location(), endpoint=f"http://127.0.0.1:{slow.port}")
        bucket = Bucket(location, patience_s=PATIENCE_S, timeout_s=1.0)

        async def pieces() -> None:
            async for _ in bucket.pieces("k", 10):
                pass

        async def pages() -> None:
            async for _ in bucket.list("k"):
                pass

        for call in (lambda: bucket.size("k"), pieces, pages, lambda: bucket.put("k", b"x"), lambda: bucket.delete("k")):
            await blamed(call, BlobsUnavailable)
        await blamed(bucket.check, BlobsUnusable)


async def test_an_object_that_cannot_be_moved_stays_damaged(world: World) -> None:
    world.s3.objects[KEY] = OTHER
    world.s3.lies["PUT"] = status(403, "<Error><Code>AccessDenied</Code></Error>")
    for _ in range(2):
        with capture_logs() as logged:
            await blamed(lambda: read(world.store), ArtifactDamaged)
        assert [line for line in logged if line["event"] == "a damaged artifact stays where it is"]
    assert world.copies() == set()


async def test_many_readers_of_damaged_objects_end_and_each_is_quarantined_once(world: World) -> None:
    digests = [(await world.store.put(os.urandom(1000), "ann")).digest for _ in range(40)]
    for digest in digests:
        world.s3.objects[key_of(digest)] = os.urandom(1000)
    await world.reopen("next")
    async with asyncio.timeout(END_S):
        answers = await asyncio.gather(
            *(read(world.store, digest) for digest in digests for _ in range(5)), return_exceptions=True
        )
    assert all(isinstance(answer, ArtifactDamaged) for answer in answers)
    kept = [key.rpartition("/")[2].partition(".")[0] for key in world.s3.objects if key.startswith("quarantine/")]
    assert sorted(kept) == sorted(digests)


# Certificates and other places


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("wrong", ["authority", "host", "expired"])
async def test_a_server_with_another_certificate_is_refused(s3: HostileS3, authority: trustme.CA, wrong: str) -> None:
    identity = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    match wrong:
        case "authority":
            trustme.CA().issue_cert("127.0.0.1").configure_cert(identity)
        case "host":
            authority.issue_cert("s3.example").configure_cert(identity)
        case "expired":
            authority.issue_cert("127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC)).configure_cert(identity)
    with receiver(status(200), identity) as server:
        location = replace(s3.location(), endpoint=f"https://127.0.0.1:{server.port}", authorities=authority.cert_pem.bytes())
        await blamed_at_start(Bucket(location, patience_s=PATIENCE_S))
        assert server.requests.empty()


async def blamed_at_start(bucket: Bucket) -> None:
    async with asyncio.timeout(END_S):
        with pytest.raises(BlobsUnusable):
            await bucket.check()


async def test_a_redirect_to_plain_http_is_not_followed(s3: HostileS3, authority: trustme.CA) -> None:
    """A server that is reached by https leads to no metadata service, and to no service of this machine without https."""
    identity = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(identity)
    s3.objects["k"] = b"of another server"
    with receiver(status(307, Location=f"http://{s3.address}/etfarm-tests/k"), identity) as server:
        location = replace(s3.location(), endpoint=f"https://127.0.0.1:{server.port}", authorities=authority.cert_pem.bytes())
        bucket = Bucket(location, patience_s=PATIENCE_S)

        async def pieces() -> list[bytes]:
            return [piece async for piece in bucket.pieces("k", 10)]

        await blamed(pieces, BlobsUnavailable)
        assert not server.requests.empty()
    assert s3.requests == []


# Whoever has a link


async def test_a_link_leads_to_no_other_object(s3_server: S3Server, tmp_path: Path) -> None:
    location = s3_server.new_location()
    bucket = Bucket(location, presign=f"http://{s3_server.address}")
    other = key_of(artifact_of(OTHER).digest)
    await bucket.put(KEY, DATA)
    await bucket.put(other, OTHER)
    url = await bucket.sign(KEY)
    assert await asyncio.to_thread(fetch, url) == (200, DATA)
    base, _, query = url.partition("?")
    root = base.removesuffix(KEY)
    escaped = [
        f"{root}{other}?{query}", f"{base}/../../../{other}?{query}", f"{base}/..%2f..%2f..%2f{other}?{query}",
        f"{base}%2f..%2f..%2f..%2f{other}?{query}", f"{root}//{other}?{query}", f"{base}/?{query}", f"{root}?list-type=2&{query}",
        f"{base}?{query}&versionId=1", f"{base}?{query}&response-content-type=text/html", f"{base}?{query}&uploads",
        f"{base}?{query}&acl", f"{base}?{query}&X-Amz-Expires=604800", f"{base}?X-Amz-Expires=604800&{query}",
        f"{base}?{query.replace('host', 'host%3brange')}", f"{base}?{query.replace('us-east-1', 'us-east-2')}",
        f"{base}?{query.replace('X-Amz-Expires=300', 'X-Amz-Expires=-1')}", f"{base}?{query[:-1]}", base,
    ]  # fmt: skip
    for tried in escaped:
        code, body = await asyncio.to_thread(fetch, tried)
        assert code >= 400 and OTHER not in body and DATA not in body, tried
    for method in ("PUT", "POST", "DELETE"):
        assert (await asyncio.to_thread(fetch, url, method))[0] >= 400
    assert await asyncio.to_thread(fetch, url) == (200, DATA)


def fetch(url: str, method: str = "GET") -> tuple[int, bytes]:
    """Return the status and the body of a request without credentials, whose path is sent as it is."""
    request = urllib.request.Request(url, b"x" if method in ("PUT", "POST") else None, method=method)
    with suppress(ConnectionError):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
    return 499, b""
