"""Tokens that wait for a caller: nothing is lost or doubled, and no device fills the server's memory."""

from __future__ import annotations

import asyncio

import pytest

from etfarm.v1 import session_pb2
from etfarm.wire.sessions import INLINE_BYTES, MAX_GENERATED_TOKENS, MAX_PROMPT_TOKENS, check_task
from etfarm.wire.token_buffer import MAX_TOKENS_OF_MESSAGE, BadTokens, TokenBuffer
from tests.support.refusals import refuses


def tokens(*values: int, prefill_ns: int | None = None) -> session_pb2.SessionTokens:
    """Tokens with a time each."""
    return session_pb2.SessionTokens(tokens=values, token_ns=[value * 10 for value in values], prefill_ns=prefill_ns)


async def test_a_reader_gets_what_has_come_and_waits_for_more() -> None:
    buffer = TokenBuffer(4)
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    buffer.put(tokens(1, prefill_ns=7))
    first = await taking
    assert first is not None and (list(first.tokens), first.prefill_ns) == ([1], 7)
    buffer.put(tokens(2))
    buffer.put(tokens(3, 4))
    buffer.close()
    rest = await buffer.take()
    assert rest is not None and (list(rest.tokens), list(rest.token_ns)) == ([2, 3, 4], [20, 30, 40])
    assert not rest.HasField("prefill_ns")
    assert await buffer.take() is None


async def test_a_slow_reader_gets_large_messages_in_parts() -> None:
    most = 2 * MAX_TOKENS_OF_MESSAGE + 1
    buffer = TokenBuffer(most)
    buffer.put(tokens(0, prefill_ns=7))
    for start in range(1, most, 256):
        buffer.put(tokens(*range(start, start + 256)))
    buffer.close()
    parts: list[session_pb2.SessionTokens] = []
    while (part := await buffer.take()) is not None:
        parts.append(part)
    assert [len(part.tokens) for part in parts] == [MAX_TOKENS_OF_MESSAGE, MAX_TOKENS_OF_MESSAGE, 1]
    assert [token for part in parts for token in part.tokens] == list(range(most))
    assert [part.HasField("prefill_ns") for part in parts] == [True, False, False]


@pytest.mark.parametrize(
    "sent",
    [tokens(1, 2, 3), session_pb2.SessionTokens(tokens=[1]), tokens(-1), session_pb2.SessionTokens(tokens=[1], token_ns=[-1])],
    ids=range(4),
)
async def test_tokens_that_were_not_requested_are_refused(sent: session_pb2.SessionTokens) -> None:
    with pytest.raises(BadTokens):
        TokenBuffer(2).put(sent)


@pytest.mark.remedy("BAD_CALL")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": MAX_GENERATED_TOKENS + 1}, "tokens"),
        ({"prompt_tokens": [1] * (MAX_PROMPT_TOKENS + 1)}, "prompt_tokens"),
        ({"prompt_tokens": [-1]}, "prompt_tokens"),
        ({"position": -1}, "position"),
        ({"position": (1 << 20) + 1}, "position"),
        ({"stop_tokens": [-5]}, "stop_tokens"),
        ({"stop_tokens": [1] * 1025}, "stop_tokens"),
        ({"max_time_s": 0.0}, "max_time_s"),
        ({"max_time_s": float("nan")}, "max_time_s"),
    ],
    ids=range(10),
)
def test_a_generation_out_of_range_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    wanted = {"prompt_tokens": [1], "tokens": MAX_GENERATED_TOKENS}
    check_task(session_pb2.SessionTask(generation=session_pb2.SessionGeneration(**wanted)))  # type: ignore[arg-type]
    with refuses("BAD_CALL", match=f"`{field}`"):
        check_task(session_pb2.SessionTask(generation=session_pb2.SessionGeneration(**wanted | changes)))  # type: ignore[arg-type]


def test_a_reset_needs_no_method() -> None:
    check_task(session_pb2.SessionTask(reset=True))
    with refuses("BAD_CALL", match="inline; at most 1 MiB"):
        check_task(session_pb2.SessionTask(reset=True, inputs=session_pb2.SessionTensors(inline=bytes(INLINE_BYTES + 1))))
    with refuses("BAD_CALL", match="does not name a method"):
        check_task(session_pb2.SessionTask())
