"""The files of requests on a node: verified, kept while they are used, and bounded."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

from etfarm.server.workers.cluster.file_cache import FileCache, FileDiffers
from etfarm.server.workers.errors import is_disk_full
from etfarm.wire import digest as digests
from tests.support.refusals import refuses


def bytes_read() -> int:
    """Return the number of bytes that this thread has read from files."""
    counters = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(counters["rchar"])


def store(cache: FileCache, holder: str, data: bytes) -> str:
    digest = digests.of_bytes(data)
    if cache.hold(holder, {digest: len(data)}):
        middle = len(data) // 2
        cache.write(holder, digest, 0, data[:middle], len(data))
        cache.write(holder, digest, middle, data[middle:], len(data))
    return digest


def announced(folder: Path, data: bytes = b"some bytes") -> tuple[FileCache, str]:
    """Return a cache, and the digest of a file that a child named `one` needs there."""
    cache, digest = FileCache(folder), digests.of_bytes(data)
    assert cache.hold("one", {digest: len(data)}) == [digest]
    return cache, digest


def test_a_file_is_sent_once(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    digest = store(cache, "one", b"some bytes")
    assert cache.hold("two", {digest: 10}) == []
    assert cache.path(digest).read_bytes() == b"some bytes"
    assert [path.name for path in tmp_path.iterdir()] == [digest]


def test_other_bytes_than_those_of_the_digest_are_not_kept(tmp_path: Path) -> None:
    cache, digest = announced(tmp_path)
    with pytest.raises(FileDiffers, match="another digest"):
        cache.write("one", digest, 0, b"SOME BYTES", 10)
    assert list(tmp_path.iterdir()) == []
    assert cache.hold("two", {digest: 10}) == [digest]


def test_no_call_reads_what_others_wrote(tmp_path: Path) -> None:
    """The last piece of a large file takes no longer than the others."""
    cache, data = FileCache(tmp_path), bytes(range(256)) * 64 * 1024
    digest, piece = digests.of_bytes(data), 1 << 20
    cache.hold("one", {digest: len(data)})
    before = bytes_read()
    for offset in range(0, len(data), piece):
        cache.write("one", digest, offset, data[offset : offset + piece], len(data))
    assert bytes_read() - before < piece
    assert digests.of_file(cache.path(digest)) == digest


def test_a_piece_out_of_order_is_refused(tmp_path: Path) -> None:
    cache, digest = announced(tmp_path)
    cache.write("one", digest, 0, b"some", 10)
    for offset, piece in ((0, b"some"), (5, b"bytes"), (4, b" bytes and more")):
        with pytest.raises(FileDiffers, match="gaps"):
            cache.write("one", digest, offset, piece, 10)
    cache.write("one", digest, 4, b" bytes", 10)
    assert cache.path(digest).read_bytes() == b"some bytes"


def test_what_a_holder_did_not_write_whole_is_deleted_with_it(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    digest = digests.of_bytes(b"some bytes")
    for holder in ("one", "two"):
        cache.hold(holder, {digest: 10})
        cache.write(holder, digest, 0, b"some", 10)
    cache.release("one")
    with pytest.raises(FileDiffers, match="has ended"):
        cache.write("one", digest, 4, b" bytes", 10)
    cache.write("two", digest, 4, b" bytes", 10)
    assert [path.name for path in tmp_path.iterdir()] == [digest]


def test_a_holder_that_ends_during_a_piece_is_what_the_error_says(tmp_path: Path) -> None:
    """The end of a child closes its files, and is no defect of ours."""
    ended = 0
    for attempt in range(40):
        cache, data = FileCache(tmp_path), attempt.to_bytes() * (1 << 20)
        digest, piece = digests.of_bytes(data), 1 << 12
        cache.hold("one", {digest: len(data)})
        cache.write("one", digest, 0, data[:piece], len(data))
        ending = threading.Thread(target=cache.release, args=["one"])
        ending.start()
        try:
            for offset in range(piece, len(data), piece):
                cache.write("one", digest, offset, data[offset : offset + piece], len(data))
        except FileDiffers as error:
            assert "a child that has ended" in str(error)
            ended += 1
        ending.join()
        assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    assert ended, "no holder ended during a write"


def test_a_disk_that_is_full_at_the_last_byte_keeps_no_piece(tmp_path: Path) -> None:
    cache, digest = announced(tmp_path, data := b"some bytes")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, former[1]))
    try:
        with pytest.raises(OSError) as full:
            cache.write("one", digest, 0, data, len(data))
        assert is_disk_full(full.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert list(tmp_path.iterdir()) == []
    assert store(cache, "one", data) == digest


@pytest.mark.parametrize("name", ["../x", "x", "", "a" * 63])
def test_a_name_that_is_no_digest_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a digest"):
        FileCache(tmp_path).write("one", name, 0, b"", 0)


def test_files_that_nothing_uses_make_room_the_one_used_longest_ago_first(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, kept_bytes=30)
    first, second, held = (store(cache, holder, holder[0].encode() * 10) for holder in ("first", "second", "held"))
    cache.release("first")
    cache.release("second")
    assert cache.hold("again", {first: 10}) == []
    cache.release("again")
    store(cache, "fourth", b"4" * 10)
    assert not cache.path(second).exists()
    assert cache.path(first).exists()
    assert cache.path(held).exists()


def test_a_full_disk_is_an_error_before_a_file_is_written(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, reserve_bytes=1 << 60)
    with refuses("DISK_FULL"):
        store(cache, "one", b"some bytes")
