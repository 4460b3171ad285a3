"""Files that are written as a whole."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from etfarm.wire.atomic_write import write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"new and longer", b""):
        write_atomically(path, data, durable=durable)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_power_cut_left_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_bytes(b"untouched")
    (tmp_path / "file.part").symlink_to(other)
    write_atomically(path, b"new", durable=True)
    assert (path.read_bytes(), other.read_bytes()) == (b"new", b"untouched")
    assert sorted(tmp_path.iterdir()) == [path, other]


def test_a_secret_is_never_readable_to_others(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_atomically(path, b"new", durable=True, mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path] and path.is_dir()
