"""Texts whose tokens come as they are generated: they are those of eager PyTorch, and another command ends them."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.runners.streaming import Streamed, StreamRequest, Tokens
from etfarm.wire.errors import FarmError
from tests.support.farm import descendants, frozen
from tests.support.programs import Program, program
from tests.support.runner import arrays, expected_tokens, load_methods

pytestmark = pytest.mark.slow(reason="starts a runner for each test, and the Python one loads torch")

GENERATED = 24
PROMPT = 12
LIMIT_S = 60.0


def request_of(model: Program, **changes: Any) -> StreamRequest:
    """All of the model's prompt, and as many tokens as are expected."""
    (prompt,) = arrays(model.inputs)
    wanted = StreamRequest("forward", "forward", array("i", prompt.tolist()), 0, GENERATED, (), 10**12, max_chunk=63)
    return replace(wanted, **changes)


async def streamed(
    runner: RemoteRunner, wanted: StreamRequest, stop: asyncio.Event | None = None
) -> tuple[list[int], Streamed, list[Tokens]]:
    """The tokens of a text, its end, and its parts."""
    parts: list[Tokens] = []
    end = await runner.stream(wanted, LIMIT_S, parts.append, stop or asyncio.Event())
    tokens = [token for part in parts for token in part.tokens]
    assert end.tokens == len(tokens)
    return tokens, end, parts


@pytest.mark.parametrize("kind", ["start", "vector", "static", "custom"])
async def test_a_text_comes_in_parts_and_is_that_of_eager_pytorch(runner: RemoteRunner, kind: str) -> None:
    model = program(f"decoder_{kind}")
    await load_methods(runner, model)
    tokens, end, parts = await streamed(runner, request_of(model))
    assert tokens == expected_tokens(model) and end.finish_reason == "LENGTH"
    assert len(parts[0].tokens) == 1, "the first token does not wait for others"
    assert 0 < (parts[0].prefill_ns or 0) <= parts[0].token_ns[0]
    assert all(part.prefill_ns is None for part in parts[1:])
    assert min(time for part in parts for time in part.token_ns) > 0


@pytest.mark.parametrize("name", ["decoder_shared", "decoder_chunked"])
async def test_two_methods_generate_one_text(runner: RemoteRunner, name: str) -> None:
    model = program(name)
    await load_methods(runner, model, "prefill", "decode")
    wanted = request_of(model, prefill_method="prefill", decode_method="decode")
    assert (await streamed(runner, wanted))[0] == expected_tokens(model)


async def test_a_text_goes_on_where_the_last_one_ended(runner: RemoteRunner) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    wanted = request_of(model, tokens=5, max_chunk=4)
    first, _, _ = await streamed(runner, wanted)
    # The last token was selected, not executed.
    context = wanted.context + array("i", first)
    rest, _, _ = await streamed(runner, replace(wanted, context=context, depth=PROMPT + 4, tokens=GENERATED - 5))
    assert first + rest == expected_tokens(model)
    again, _, _ = await streamed(runner, replace(wanted, depth=PROMPT - 1))
    assert again == first, "what is behind the context does not count"


async def test_a_stop_token_ends_the_text_and_is_part_of_it(runner: RemoteRunner) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    last = expected_tokens(model)[9]
    tokens, end, _ = await streamed(runner, request_of(model, stop_tokens=(95, last)))
    assert tokens == expected_tokens(model)[: expected_tokens(model).index(last) + 1] and end.finish_reason == "STOP_TOKEN"


@pytest.mark.parametrize(("max_chunk", "tokens"), [(PROMPT, 1), (PROMPT - 1, 0)])
async def test_the_time_limit_ends_the_text_between_two_executions(runner: RemoteRunner, max_chunk: int, tokens: int) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    generated, end, _ = await streamed(runner, request_of(model, max_time_ns=1, max_chunk=max_chunk))
    assert (generated, end.finish_reason) == (expected_tokens(model)[:tokens], "MAX_TIME")
    assert (await streamed(runner, request_of(model)))[0] == expected_tokens(model)


async def test_the_time_limit_ends_a_prompt_that_is_too_short_for_prefill(runner: RemoteRunner) -> None:
    model = program("decoder_chunked")
    await load_methods(runner, model, "prefill", "decode")
    # Prefill takes 4 tokens, so that these are executed one by one.
    short = request_of(model, prefill_method="prefill", decode_method="decode", context=array("i", [1, 2, 3]), tokens=2)
    generated, end, _ = await streamed(runner, replace(short, max_time_ns=1))
    assert (generated, end.finish_reason) == ([], "MAX_TIME")
    assert len((await streamed(runner, short))[0]) == 2


async def test_a_text_that_is_stopped_leaves_the_runner_usable(runner: RemoteRunner) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    stop = asyncio.Event()
    parts: list[Tokens] = []

    def take(part: Tokens) -> None:
        parts.append(part)
        stop.set()

    # A context that is written again and again would be needed for a text without an end: this one may be complete.
    end = await runner.stream(request_of(model), LIMIT_S, take, stop)
    tokens = [token for part in parts for token in part.tokens]
    assert tokens == expected_tokens(model)[: len(tokens)] and end.finish_reason in ("CANCELLED", "LENGTH")
    stop.set()
    # The text is so short that a runner could complete it before a busy agent sends the second command.
    with frozen([runner.pid, *descendants(runner.pid)]):
        stopped = asyncio.create_task(streamed(runner, request_of(model), stop))
        await asyncio.sleep(0.2)  # both commands are written in the next turns of the event loop
    before, end, _ = await stopped
    assert end.finish_reason == "CANCELLED" and before == expected_tokens(model)[: len(before)]
    assert (await streamed(runner, request_of(model)))[0] == expected_tokens(model)


async def test_a_text_that_fails_has_sent_what_is_in_the_context(runner: RemoteRunner) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    parts: list[Tokens] = []
    with pytest.raises((errors.ProgramFailed, errors.ProgramCrashed)):
        await runner.stream(request_of(model, tokens=60), LIMIT_S, parts.append, asyncio.Event())
    tokens = [token for part in parts for token in part.tokens]
    assert tokens[:GENERATED] == expected_tokens(model) and len(tokens) >= 64 - PROMPT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_method": "other"}, "method 'other' is not loaded"),
        ({"depth": PROMPT}, "the payload must have more tokens than depth"),
        ({"stop_tokens": (-1,)}, "stop_tokens must be"),
        ({"tokens": 1 << 20}, "tokens must be"),
        ({"max_time_ns": 0}, "max_time_ns must be"),
    ],
)
async def test_a_wrong_request_leaves_the_runner_usable(runner: RemoteRunner, changes: dict[str, Any], message: str) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    with pytest.raises((FarmError, errors.InputMismatch), match=message):
        await streamed(runner, request_of(model, **changes))
    assert (await streamed(runner, request_of(model)))[0] == expected_tokens(model)
