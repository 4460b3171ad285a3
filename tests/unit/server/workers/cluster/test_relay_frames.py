"""The bytes between the connector and a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.errors import BadAnswer
from etfarm.wire.errors import EtfarmError, UserError

PIECES = st.lists(st.tuples(st.sampled_from([b"c", b"l", b"s", b"z"]), st.binary(max_size=50)), max_size=5)


@given(PIECES)
def test_pieces_survive(pieces: list[tuple[bytes, bytes]]) -> None:
    assert list(relay_frames.split(relay_frames.join(pieces))) == pieces


@given(PIECES.filter(bool), st.data())
def test_truncated_pieces_are_refused_or_are_fewer(pieces: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    joined = relay_frames.join(pieces)
    cut = joined[: data.draw(st.integers(1, len(joined) - 1))]
    try:
        parsed = list(relay_frames.split(cut))
    except BadAnswer:
        return
    assert parsed == pieces[: len(parsed)]
    assert len(parsed) < len(pieces)


def test_an_answer_is_a_result_or_an_error() -> None:
    assert relay_frames.decode_answer(relay_frames.encode_result(b"x")) == b"x"
    with pytest.raises(EtfarmError, match="too tall") as refused:
        relay_frames.decode_answer(relay_frames.encode_error(UserError("It is too tall.")))
    assert refused.value.reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize("answer", [None, "text", {"a": 1}, bytearray(b"+")])
def test_anything_but_bytes_is_refused(answer: object) -> None:
    with pytest.raises(BadAnswer):
        relay_frames.decode_answer(answer)
