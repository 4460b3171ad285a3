"""Generation of text by a vision-language model: encoder, token embedding and decoder as one flow in the runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.generation import Generated, GenerateRequest
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from tests.support.programs import Program, program
from tests.support.runner import arrays, expected_tokens, load_methods

pytestmark = pytest.mark.slow(reason="starts a runner for each test, and the Python one loads torch")

GENERATED = 24
PROMPT = 12
POSITIONS = 16


def request_of(model: Program, **changes: Any) -> GenerateRequest:
    """All of the model's prompt after the image, and as many tokens as are expected."""
    prompt = arrays(model.inputs)[1].tolist()
    wanted = GenerateRequest(
        "text_decoder", "text_decoder", prompt, 0, GENERATED, 2, 1, 10**12, embedding_method="token_embedding",
        encoders=["vision_encoder"],
    )  # fmt: skip
    return replace(wanted, **changes)


async def generated(runner: RemoteRunner, model: Program, **changes: Any) -> Generated:
    """The model loaded and its image set, and the result of a request."""
    wanted = request_of(model, **changes)
    await load_methods(runner, model, *wanted.parts)
    await runner.select("vision_encoder")
    await runner.set_inputs(model.inputs[:1])
    return await runner.generate(wanted, 60)


@pytest.mark.parametrize("kind", ["start", "vector", "static", "short", "xnnpack"])
async def test_the_tokens_are_those_of_eager_pytorch(runner: RemoteRunner, kind: str) -> None:
    model = program(f"flow_{kind}")
    result = await generated(runner, model)
    assert [list(row) for row in result.tokens] == 2 * [expected_tokens(model)]
    executions = {part.method: (part.prefill_executions, part.decode_executions) for part in result.parts}
    # One position, or five tokens, at a time.
    before = {"static": (PROMPT, POSITIONS + PROMPT), "short": (3, 2)}.get(kind, (1, 2))
    steps = GENERATED - 1
    assert executions == {
        "vision_encoder": (1, 0),
        "token_embedding": (before[0], steps),
        "text_decoder": (before[1], steps),
    }
    for repetition, (prefill_ns, token_ns) in enumerate(zip(result.prefill_ns, result.token_ns, strict=True)):
        assert 0 < sum(part.prefill_ns[repetition] for part in result.parts) <= prefill_ns
        assert 0 < sum(part.decode_ns[repetition] for part in result.parts) <= sum(token_ns[1:])


async def test_methods_that_share_a_cache_are_parts_of_their_own(runner: RemoteRunner) -> None:
    model = program("flow_shared")
    result = await generated(runner, model, prefill_method="prefill", decode_method="decode", reload=True)
    assert [list(row) for row in result.tokens] == 2 * [expected_tokens(model)]
    assert [(part.method, part.prefill_executions, part.decode_executions) for part in result.parts] == [
        ("vision_encoder", 1, 0),
        ("token_embedding", 1, GENERATED - 1),
        ("prefill", 2, 0),
        ("decode", 0, GENERATED - 1),
    ]


@pytest.mark.parametrize("max_chunk", [1, 5])
async def test_chunks_do_not_change_the_tokens(runner: RemoteRunner, max_chunk: int) -> None:
    model = program("flow_start")
    result = await generated(runner, model, max_chunk=max_chunk)
    assert [list(row) for row in result.tokens] == 2 * [expected_tokens(model)]


async def test_the_image_follows_the_context_and_matters(runner: RemoteRunner) -> None:
    model = program("flow_start")
    behind = await generated(runner, model, depth=6)
    assert list(behind.tokens[0]) == list(behind.tokens[1])
    await runner.select("vision_encoder")
    await runner.set_inputs([tensors.from_array("image", -arrays(model.inputs)[0], (0, 1, 2, 3))])
    other = await runner.generate(request_of(model), 60)
    assert list(other.tokens[0]) != expected_tokens(model), "another image"
    await runner.set_inputs(model.inputs[:1])
    again = await runner.generate(request_of(model), 60)
    assert list(again.tokens[0]) == expected_tokens(model)
    without = await runner.generate(request_of(model, encoders=[]), 60)
    assert [part.method for part in without.parts] == ["token_embedding", "text_decoder"]


async def test_an_encoder_of_another_width_is_refused_with_both_shapes(runner: RemoteRunner) -> None:
    with pytest.raises(errors.InputMismatch) as refused:
        await generated(runner, program("flow_misfit"))
    assert "method 'vision_encoder' cannot generate text: it returns float32 [1, 16, 24]" in str(refused.value)
    assert "'text_decoder' takes rows of 32 float32 values" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_method": "vision_encoder", "encoders": []}, r"input 0 \(tokens\) must be int64 or int32, not float32"),
        ({"embedding_method": "other"}, "method 'other' is not loaded"),
        ({"encoders": ["vision_encoder"] * 2}, "a method can be only one of encoder, embedding"),
        ({"encoders": ["text_decoder"]}, "a method can be only one of encoder, embedding"),
        ({"embedding_method": "text_decoder"}, "a method can be only one of encoder, embedding"),
        ({"token_input": 1, "position_input": 0}, r"input 1 \(embeddings\) must be float32, float16 or bfloat16, not int64"),
        ({"embedding_method": "", "encoders": []}, r"input 0 \(tokens\) must be int64 or int32, not float32"),
    ],
)
async def test_a_wrong_request_leaves_the_runner_usable(runner: RemoteRunner, changes: dict[str, Any], message: str) -> None:
    model = program("flow_start")
    await generated(runner, model, repetitions=1, warmup=0)
    with pytest.raises(EtfarmError, match=message) as refused:
        await runner.generate(request_of(model, **changes), 60)
    assert refused.value.reason in ("RUNNER_BROKEN", "INPUT_MISMATCH", "PROGRAM_FAILED")
    assert list((await runner.generate(request_of(model), 60)).tokens[0]) == expected_tokens(model)


async def test_an_encoder_without_inputs_is_refused(runner: RemoteRunner) -> None:
    model = program("flow_start")
    await load_methods(runner, model, *request_of(model).parts)
    with pytest.raises(errors.InputMismatch, match="method 'vision_encoder' cannot generate text: input 0 is not set"):
        await runner.generate(request_of(model), 60)
