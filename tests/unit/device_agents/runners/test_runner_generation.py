"""Generation of text by the runners: the tokens are those of eager PyTorch, whatever the program's signature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.generation import Generated, GenerateRequest
from etfarm.device_agents.runners.protocol import Progress
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.wire import tensors
from etfarm.wire.errors import FarmError
from etfarm.wire.tensors import Tensor
from tests.support.programs import Program, program
from tests.support.refusals import refuses
from tests.support.runner import arrays, expected_tokens, load_methods

pytestmark = pytest.mark.slow(reason="starts a runner for each test, and the Python one loads torch")

GENERATED = 24
PROMPT = 12
# The first of equal logits wins in eager PyTorch, too, as there are in half precision.
KINDS = ("start", "vector", "static", "int32", "xnnpack", "custom", "half", "bfloat16")
TWO = {"prefill_method": "prefill", "decode_method": "decode"}


def request_of(model: Program, **changes: Any) -> GenerateRequest:
    """All of the model's prompt, and as many tokens as are expected."""
    (prompt,) = arrays(model.inputs)
    wanted = GenerateRequest("forward", "forward", prompt.tolist(), 0, GENERATED, 2, 1, 10**12)
    return replace(wanted, **changes)


async def generated(runner: RemoteRunner, model: Program, **changes: Any) -> Generated:
    """Return the model loaded, and the result of a request."""
    wanted = request_of(model, **changes)
    await load_methods(runner, model, wanted.prefill_method, wanted.decode_method)
    return await runner.generate(wanted, 60)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_tokens_are_those_of_eager_pytorch(runner: RemoteRunner, kind: str) -> None:
    model = program(f"decoder_{kind}")
    result = await generated(runner, model)
    assert [list(row) for row in result.tokens] == 2 * [expected_tokens(model)]
    assert result.stop_reason == "ENOUGH" and result.repetitions == 2
    assert len(result.prefill_ns) == 2 and [len(row) for row in result.token_ns] == [GENERATED, GENERATED]
    for prefill_ns, token_ns in zip(result.prefill_ns, result.token_ns, strict=True):
        assert 0 < prefill_ns <= token_ns[0] and min(token_ns) > 0
        assert sum(token_ns) <= result.duration_ns
    assert result.first_run_ns and result.wall_ns >= result.duration_ns


async def test_calls_of_methods_that_share_state_agree_with_eager_pytorch(runner: RemoteRunner) -> None:
    model = program("decoder_shared")
    (prompt,) = arrays(model.inputs)
    await load_methods(runner, model, "prefill", "decode")
    tokens: list[int] = []
    for index in range(6):
        await runner.select("decode" if tokens else "prefill")
        ids = tokens[-1:] or prompt.tolist()
        position = len(prompt) + index - 1 if tokens else 0
        await runner.set_inputs([_integers("tokens", [ids]), _integers("positions", [position])])
        await runner.run()
        (logits,) = arrays(await runner.outputs())
        tokens.append(int(logits.argmax()))
    assert tokens == expected_tokens(model)[:6]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("decoder_shared", TWO, id="methods see what the other has written to the state that they share"),
        pytest.param("decoder_shared", {**TWO, "reload": True, "depth": 3, "warmup": 0}, id="methods are loaded again"),
        pytest.param("decoder_chunked", TWO, id="the tokens are whole chunks of a static prefill"),
        pytest.param("decoder_chunked", {**TWO, "depth": 5}, id="what is too short for a static prefill is decoded"),
        pytest.param("decoder_start", {"max_chunk": 5}, id="chunks"),
        pytest.param("decoder_start", {"depth": 5}, id="a depth"),
        pytest.param("decoder_start", {"depth": 11, "max_chunk": 1}, id="a depth of single tokens"),
        pytest.param("llama", {"max_chunk": 7}, id="ExecuTorch's own exporter"),
    ],
)
async def test_no_way_to_the_tokens_changes_them(runner: RemoteRunner, name: str, changes: dict[str, Any]) -> None:
    model = program(name)
    result = await generated(runner, model, **changes)
    assert [list(row) for row in result.tokens] == 2 * [expected_tokens(model)]


async def test_no_repetition_begins_after_the_time_limit(runner: RemoteRunner) -> None:
    result = await generated(runner, program("decoder_start"), max_time_ns=1, repetitions=50)
    assert (result.repetitions, result.stop_reason, len(result.tokens)) == (1, "MAX_TIME", 1)


async def test_progress_counts_tokens(runner: RemoteRunner) -> None:
    model = program("decoder_start")
    wanted = request_of(model, repetitions=1)
    seen: list[Progress] = []
    await load_methods(runner, model)
    await runner.generate(wanted, 60, seen.append)
    assert [step.stage for step in seen if not step.done] == ["WARMUP", "TIMED"]
    assert all(step.done <= GENERATED for step in seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_method": "other"}, "method 'other' is not loaded"),
        ({"position_input": 0}, "the tokens and their positions must be different inputs"),
        ({"position_input": 2}, r"input 2 \(positions\) does not exist: it takes 2"),
        ({"depth": PROMPT}, "the payload must have more tokens than depth"),
        ({"context": [1, -1]}, "token 1 is negative"),
        ({"context": [1, 5000]}, "method 'forward' failed"),
        ({"tokens": 1 << 20}, "tokens must be"),
        ({"repetitions": 0}, "repetitions must be"),
    ],
)
async def test_a_wrong_request_leaves_the_runner_usable(runner: RemoteRunner, changes: dict[str, Any], message: str) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    with pytest.raises((FarmError, errors.InputMismatch, errors.ProgramFailed), match=message):
        await runner.generate(request_of(model, **changes), 60)
    assert list((await runner.generate(request_of(model), 60)).tokens[0]) == expected_tokens(model)


async def test_a_text_longer_than_the_context_is_an_error(runner: RemoteRunner) -> None:
    model = program("decoder_start")
    await load_methods(runner, model)
    with pytest.raises((errors.ProgramFailed, errors.ProgramCrashed)):
        await runner.generate(request_of(model, tokens=60), 60)


@pytest.mark.parametrize("name", ["add", "counter"])
async def test_a_program_that_is_no_language_model_is_refused(runner: RemoteRunner, name: str) -> None:
    await load_methods(runner, program(name))
    with pytest.raises(errors.InputMismatch, match="method 'forward' cannot generate text: input"):
        await runner.generate(request_of(program("decoder_start")), 60)


async def test_a_traced_method_does_not_generate(runner: RemoteRunner) -> None:
    await runner.load(program("decoder_start").path)
    await runner.load_method("forward", trace=True)
    with refuses("RUNNER_BROKEN", match="with a tracer"):
        await runner.generate(request_of(program("decoder_start")), 60)


def _integers(name: str, values: Any) -> Tensor:
    import numpy as np

    array = np.array(values, dtype=np.int64)
    return tensors.from_array(name, array, tuple(range(array.ndim)))
