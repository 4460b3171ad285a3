"""What a process remembers of the files that it has verified: little, whatever the number of artifacts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etfarm.server.artifacts.integrity import Integrity


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as created:
        yield created


def stored(folder: Path, number: int) -> str:
    data = b"%d" % number
    digest = hashlib.sha256(data).hexdigest()
    (folder / digest).write_bytes(data)
    return digest


async def test_files_that_are_not_read_are_verified_again(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.artifacts.integrity.MOST_VERIFIED", 20)
    integrity = Integrity(tmp_path / "quarantine", tmp_path.joinpath, pool)
    read, unread = stored(tmp_path, -1), stored(tmp_path, -2)
    integrity.settled(read)
    integrity.settled(unread)
    for number in range(120):
        integrity.settled(stored(tmp_path, number))
        assert number % 10 or integrity.is_known_whole(read)
    assert integrity.is_known_whole(read) and not integrity.is_known_whole(unread)
    assert await integrity.is_whole(unread) and integrity.is_known_whole(unread)
    damaged = stored(tmp_path, 0)  # written anew, as long as before
    (tmp_path / damaged).write_bytes(b"1")
    assert not await integrity.is_whole(damaged)
