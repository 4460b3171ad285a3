"""The tokens of a generation as the library gives them, and what a caller has received of a session's context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from etfarm.client.sessions.text import AsyncTokenStream, GeneratedTokens, TextContext, request_of
from etfarm.v1 import session_pb2
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.status import to_proto
from tests.support.refusals import refuses


class Device:
    """What a device sends, in parts; it notes what it was asked for, and whether its reader has left."""

    def __init__(self, parts: Sequence[Sequence[int]], error: EtfarmError | None = None) -> None:
        self._parts = parts
        self._error = error
        self.positions: list[int] = []
        self.closed = 0

    async def open(self, request: session_pb2.SessionGeneration) -> AsyncGenerator[session_pb2.GenerateSessionResponse, None]:
        """One generation."""
        self.positions.append(request.position)
        try:
            for index, part in enumerate(self._parts):
                tokens = session_pb2.SessionTokens(tokens=part, token_ns=[5] * len(part), prefill_ns=None if index else 3)
                yield session_pb2.GenerateSessionResponse(tokens=tokens)
            generated = session_pb2.SessionGenerated(finish_reason=session_pb2.FINISH_REASON_LENGTH)
            answer = session_pb2.SessionAnswer(generated=generated)
            if self._error is not None:
                answer = session_pb2.SessionAnswer(error=to_proto(self._error))
            yield session_pb2.GenerateSessionResponse(answer=answer)
        finally:
            self.closed += 1


def stream(device: Device, context: TextContext, prompt: Sequence[int] = (1, 2), **fields: Any) -> AsyncTokenStream:
    return AsyncTokenStream(device.open, request_of(prompt, 9, (), **fields), context)


async def test_a_text_read_to_its_end_is_the_context_of_the_next_one() -> None:
    device, context = Device([[7], [8, 9]]), TextContext()
    first = stream(device, context)
    assert [token async for token in first] == [7, 8, 9]
    result = await first.result()
    assert (result.tokens, result.finish_reason, result.context_tokens, context.tokens) == ((7, 8, 9), "LENGTH", 5, 5)
    assert (result.ttft_ns, result.prefill_ns, result.tokens_per_s) == (5, 3, 2e8)
    assert [token async for token in first] == [], "a stream is read once"
    await stream(device, context, ()).result()
    assert (device.positions, context.tokens) == ([0, 5], 8)
    await stream(device, context, (1,), position=2).result()
    assert (device.positions, context.tokens) == ([0, 5, 2], 6)


async def test_a_loop_that_is_left_has_received_what_it_saw() -> None:
    device, context = Device([[7], [8, 9]]), TextContext(tokens=10)
    left = stream(device, context)
    tokens = aiter(left)
    assert [await anext(tokens), await anext(tokens)] == [7, 8]
    await tokens.aclose()  # type: ignore[attr-defined]
    del tokens
    assert device.closed == 1
    result = await left.result()
    assert (result.tokens, result.finish_reason, result.context_tokens) == ((7, 8), "CANCELLED", 14)
    assert context.tokens == 14


async def test_a_result_within_the_loop_reads_the_rest() -> None:
    device, context = Device([[7], [8, 9]]), TextContext()
    text = stream(device, context)
    seen = []
    async for token in text:
        seen.append(token)
        assert (await text.result()).tokens == (7, 8, 9)
    assert seen == [7]


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    device, context = Device([[7]], error_for("BAD_CALL", "It is wrong.")), TextContext(tokens=3)
    failing = stream(device, context)
    seen = []
    with pytest.raises(EtfarmError, match="It is wrong"):
        async for token in failing:
            seen.append(token)
    assert (seen, context.tokens) == ([7], 6)
    refused = Device([], error_for("BAD_CALL", "It is wrong."))
    with pytest.raises(EtfarmError, match="It is wrong"):
        await stream(refused, context).result()
    assert context.tokens == 6, "nothing has changed"


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4]), np.array([[3, 4]], np.int32), torch.tensor([[3, 4]])])
def test_a_prompt_is_a_row_of_token_ids(prompt: Any) -> None:
    assert list(request_of(prompt, 1, {9, 5}).prompt_tokens) == [3, 4]
    assert list(request_of(prompt, 1, {9, 5}).stop_tokens) == [5, 9]
    assert request_of([], 1, "eos").stop_at_eos


@pytest.mark.parametrize(
    ("prompt", "tokens", "stop_tokens", "fields"),
    [
        ([[1, 2], [3, 4]], 1, (), {}), ([1.0], 1, (), {}), (["a"], 1, (), {}), ([1 << 31], 1, (), {}), ([-1], 1, (), {}),
        ([1], 0, (), {}), ([1], 1 << 40, (), {}), ([1], 1.5, (), {}), ([1], 1, "end", {}), ([1], 1, (), {"position": -1}),
        ([1], 1, (), {"max_time_s": 0}),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_request_with_impossible_values_is_refused(prompt: Any, tokens: Any, stop_tokens: Any, fields: dict[str, Any]) -> None:
    with refuses("BAD_CALL"):
        request_of(prompt, tokens, stop_tokens, **fields)


def test_few_tokens_have_no_rate() -> None:
    none = GeneratedTokens((), np.array([], np.int64), None, "MAX_TIME", 0)
    assert (none.ttft_ns, none.tokens_per_s) == (None, None)
    assert GeneratedTokens((1,), np.array([5]), 3, "LENGTH", 2).tokens_per_s is None
