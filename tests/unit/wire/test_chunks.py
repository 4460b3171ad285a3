"""Chunk arithmetic: no gaps, no overlaps, nothing past the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import chunks, digest


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_spans_cover_what_is_left_without_gaps_in_order(offset: int, size: int, chunk: int) -> None:
    covered = [position for start, length in chunks.spans(offset, size, chunk) for position in range(start, start + length)]
    assert covered == list(range(offset, size))


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_all_spans_but_the_last_are_full(offset: int, size: int, chunk: int) -> None:
    lengths = [length for _, length in chunks.spans(offset, size, chunk)]
    assert all(length == chunk for length in lengths[:-1])
    assert all(0 < length <= chunk for length in lengths)


def test_a_chunk_is_within_what_the_contract_allows() -> None:
    assert chunks.CHUNK_BYTES <= 1 << 20


@given(st.binary(max_size=50))
def test_an_artifact_is_its_sha256_and_size(data: bytes) -> None:
    artifact = chunks.artifact_of(data)
    assert (artifact.digest, artifact.size_bytes) == (digest.of_bytes(data), len(data))
