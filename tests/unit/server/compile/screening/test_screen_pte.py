"""The screen of a .pte: its magic number, its version, and whether it is as long as its header states."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from etfarm.server.compile.screening import screen
from etfarm.server.compile.screening.errors import TruncatedProgram
from tests.support.refusals import refuses


def pte(program: int = 100, base: int = 128, segments: int = 64, size: int = 192) -> bytes:
    header = b"eh00" + struct.pack("<I3Q", 32, program, base, segments)
    return (b"\x40\0\0\0ET12" + header).ljust(size, b"\0")


def test_a_whole_pte_passes(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for data in (pte(), b"\x40\0\0\0ET12" + b"\0" * 100):
        path.write_bytes(data)
        assert screen.screen_pte(path) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\x40\0\0\0ET99" + b"\0" * 64, b"\x40\0\0\0FB12" + b"\0" * 64])
def test_other_bytes_are_no_pte(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(data)
    with refuses("NOT_A_PTE"):
        screen.screen_pte(tmp_path / "p")


@pytest.mark.parametrize("data", [pte(size=191), pte(size=39), pte(program=1 << 40), pte(base=1 << 62, segments=9)])
def test_a_cut_off_pte_says_how_much_is_missing(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(TruncatedProgram) as caught:
        screen.screen_pte(tmp_path / "p")
    assert caught.value.metadata["size_bytes"] == str(len(data))
