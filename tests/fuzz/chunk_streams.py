"""Uploads: chunks of a stream into a real store, `etfarm.server.artifacts.store`."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.artifacts.store import Store
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire.errors import EtfarmError

RUNS = 60
CONTENT = bytes(range(64))
_HEAD = struct.Struct("<?q")
_CHUNK = struct.Struct("<qB")


def seeds() -> list[bytes]:
    """Return streams: whether the digest is the content's, the announced size, then chunks with their offsets."""
    whole = _HEAD.pack(True, len(CONTENT)) + _CHUNK.pack(0, 40) + CONTENT[:40] + _CHUNK.pack(40, 24) + CONTENT[40:]
    other = _HEAD.pack(False, 3) + _CHUNK.pack(0, 3) + b"abc"
    return [whole, other, _HEAD.pack(True, len(CONTENT)), _HEAD.pack(False, 0)]


def fuzz(data: bytes) -> None:
    """An upload is refused, goes on from where it is, or is whole with its digest."""
    if len(data) < _HEAD.size:
        return
    is_contents, size_bytes = _HEAD.unpack_from(data)
    digest = hashlib.sha256(CONTENT if is_contents else data).hexdigest()
    asyncio.run(_receive(digest, size_bytes, data[_HEAD.size :]))


@cache
def _migrated() -> Path:
    """Return an empty database of the newest schema, whose making takes longer than all else."""

    async def make(path: Path) -> None:
        database = SqliteDatabase(path)
        await database.open()
        database.close()

    folder = Path(tempfile.mkdtemp(prefix="etfarm-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with ThreadPoolExecutor(1) as pool:  # a loop runs here already
        pool.submit(asyncio.run, make(folder / "farm.sqlite")).result()
    return folder / "farm.sqlite"


async def _receive(digest: str, size_bytes: int, data: bytes) -> None:
    async def chunks() -> AsyncIterator[artifact_pb2.Chunk]:
        at = 0
        while at + _CHUNK.size <= len(data):
            offset, length = _CHUNK.unpack_from(data, at)
            at += _CHUNK.size
            yield artifact_pb2.Chunk(offset=offset, data=data[at : at + length])
            at += length

    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as name:
        shutil.copy(_migrated(), Path(name) / "farm.sqlite")
        database = SqliteDatabase(Path(name) / "farm.sqlite")
        await database.open()
        try:
            store = Store(Path(name) / "artifacts", database)
            try:
                status = await store.receive(
                    common_pb2.Artifact(digest=digest, size_bytes=size_bytes), chunks(), DEFAULT_PROJECT, "ann"
                )
            except EtfarmError as error:
                assert str(error) and not await store.has(digest)
            else:
                assert status.complete == await store.has(digest) and status.committed_bytes <= max(size_bytes, 0)
            if await store.has(digest):
                assert hashlib.sha256(store.path(digest).read_bytes()).hexdigest() == digest
        finally:
            database.close()
