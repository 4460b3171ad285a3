"""The head of a program: what its extended header declares, and that no bytes make the reader fail otherwise."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from executorch.exir._serialize._program import _get_extended_header
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire.program_tables import read_method_names
from etfarm.wire.pte import HEAD_BYTES, MIN_HEADER_BYTES, HeaderCutOff, identifier_of, read_extended_header
from tests.support.programs import program

_SIZES = st.integers(0, 2**64 - 1)


def head(length: int, program_bytes: int, segments_start: int, segment_bytes: int) -> bytes:
    return b"\x40\0\0\0ET12eh00" + struct.pack("<I3Q", length, program_bytes, segments_start, segment_bytes)


def test_a_header_declares_the_parts_of_the_file() -> None:
    header = read_extended_header(head(32, 100, 128, 64))
    assert header is not None
    assert (header.program_bytes, header.segments_start, header.segment_bytes, header.file_bytes) == (100, 128, 64, 192)
    assert header.segment(bytes(range(200)), 2, 3) == bytes([130, 131, 132])
    assert header.segment(b"cut off", 2, 3) == b""


def test_the_first_version_of_the_header_does_not_say_how_large_the_segments_are() -> None:
    header = read_extended_header(head(MIN_HEADER_BYTES, 100, 128, 64))
    assert header is not None and (header.segment_bytes, header.file_bytes) == (0, 128)


def test_a_program_without_segments_has_no_header() -> None:
    assert read_extended_header(b"\x40\0\0\0ET12" + bytes(100)) is None


@pytest.mark.parametrize("size", [12, 31, HEAD_BYTES - 1])
def test_a_header_that_is_cut_off_is_no_header_with_zeros(size: int) -> None:
    with pytest.raises(HeaderCutOff, match=f"{size}$"):
        read_extended_header(head(32, 1, 2, 3)[:size])


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda rest: b"\x40\0\0\0ET12eh00" + rest))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    assert len(identifier_of(memoryview(data))) <= 4
    try:
        header = read_extended_header(memoryview(data))
    except HeaderCutOff:
        assert len(data) < HEAD_BYTES
    else:
        assert header is None or header.segment(data, 2**63, 2**63) == b"" or header.segments_start == 0


@given(st.sampled_from([0, 23, 24, 25, 31, 32, 33, 2**32 - 1]), _SIZES, _SIZES, _SIZES)
def test_valid_headers_are_read_as_executorch_reads_them(length: int, program: int, start: int, size: int) -> None:
    data = head(length, program, start, size)
    theirs, ours = _get_extended_header(data + bytes(24)), read_extended_header(data)
    assert ours is not None
    if theirs is None:
        assert length < MIN_HEADER_BYTES
    else:
        assert (ours.program_bytes, ours.segments_start) == (theirs.program_size, theirs.segment_base_offset)
        if length == MIN_HEADER_BYTES or length >= 32:  # no version in between exists
            assert ours.segment_bytes == theirs.segment_data_size


def test_the_methods_of_a_program_are_read_without_executorch(tmp_path: Path) -> None:
    path = tmp_path / "x.pte"
    path.write_bytes(program("methods").bytes)
    assert read_method_names(path) == ["double", "shift"]
    assert read_method_names(program("conv").path) == ["forward"]
    path.write_bytes(path.read_bytes()[:100])
    assert read_method_names(path) == []
    path.write_bytes(b"")
    assert read_method_names(path) == []


@pytest.mark.parametrize("program_bytes", [2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_program_that_declares_more_than_its_file_is_read_to_the_files_end(tmp_path: Path, program_bytes: int) -> None:
    path = tmp_path / "x.pte"
    path.write_bytes(head(32, program_bytes, 0, 0) + bytes(100))
    assert read_method_names(path) == []
    # ExecuTorch writes the field's 8 bytes behind the header's magic and length.
    content = program("methods").bytes
    if read_extended_header(content) is not None:
        path.write_bytes(content[:16] + struct.pack("<Q", program_bytes) + content[24:])
        assert read_method_names(path) == ["double", "shift"]
