"""Teacher forcing by the runners: the logits are those of eager PyTorch, whatever the program's signature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.protocol import Progress
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.runners.score import Scored, ScoreRequest
from etfarm.wire.errors import FarmError
from tests.support.programs import Program, program
from tests.support.refusals import refuses
from tests.support.runner import load_methods

pytestmark = pytest.mark.slow(reason="starts a runner for each test, and the Python one loads torch")

VOCABULARY = 96
TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
REQUEST = ScoreRequest("forward", "forward", TEXT, 64, (0, 4, 9), 10**12)


async def scored(runner: RemoteRunner, model: Program, **changes: Any) -> Scored:
    """The model loaded, and the result of a request."""
    wanted = replace(REQUEST, **changes)
    await load_methods(runner, model, wanted.prefill_method, wanted.decode_method)
    return await runner.score(wanted, VOCABULARY, 60)


def arrays_of(result: Scored) -> tuple[Any, Any, Any]:
    """Probabilities, most likely tokens and rows of logits."""
    ends = 4 * result.tokens, 8 * result.tokens
    values = result.values
    logits = np.frombuffer(values[ends[1] :], dtype="<f4").reshape(result.rows, result.vocabulary)
    return np.frombuffer(values[: ends[0]], dtype="<f4"), np.frombuffer(values[ends[0] : ends[1]], dtype="<i4"), logits


def eager(kind: str, text: list[int]) -> tuple[Any, Any, Any]:
    """The same of eager PyTorch, for a single window."""
    from tests.support.language_models import forced_logits

    logits = forced_logits(kind, text)
    chosen = logits.astype(np.float64)
    logs = chosen - np.log(np.exp(chosen).sum(axis=1, keepdims=True))
    following = [float(logs[index, token]) for index, token in enumerate(text[1:])]
    return np.array([*following, 0.0]), chosen.argmax(axis=1), logits


@pytest.mark.parametrize("kind", ["start", "vector", "int32", "xnnpack", "custom"])
async def test_the_scores_are_those_of_eager_pytorch(runner: RemoteRunner, kind: str) -> None:
    result = await scored(runner, program(f"decoder_{kind}"))
    assert (result.tokens, result.rows, result.vocabulary) == (len(TEXT), 3, VOCABULARY) and result.duration_ns > 0
    for actual, expected in zip(arrays_of(result), eager(kind, TEXT), strict=True):
        expected = expected[list(REQUEST.rows)] if expected.ndim == 2 else expected
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
async def test_logits_of_half_precision_are_returned_as_float32(runner: RemoteRunner, dtype: str) -> None:
    result = await scored(runner, program(f"decoder_{dtype}"))
    np.testing.assert_allclose(arrays_of(result)[2], eager(dtype, TEXT)[2][list(REQUEST.rows)], rtol=0.01, atol=0.02)


@pytest.mark.parametrize("reload", [False, True])
async def test_each_window_begins_a_new_context(runner: RemoteRunner, reload: bool) -> None:
    changes = {"prefill_method": "prefill", "decode_method": "decode", "window": 4, "rows": (3, 4), "reload": reload}
    probabilities, best, logits = arrays_of(await scored(runner, program("decoder_shared"), **changes))
    parts = [eager("shared", TEXT[begin : begin + 4]) for begin in range(0, len(TEXT), 4)]
    np.testing.assert_allclose(probabilities, np.concatenate([part[0] for part in parts]), rtol=0, atol=1e-4)
    assert best.tolist() == np.concatenate([part[1] for part in parts]).tolist()
    np.testing.assert_allclose(logits, [parts[0][2][3], parts[1][2][0]], rtol=0, atol=1e-4)
    assert probabilities[3] == probabilities[7] == probabilities[9] == 0


async def test_no_token_is_executed_after_the_time_limit(runner: RemoteRunner) -> None:
    result = await scored(runner, program("decoder_start"), max_time_ns=1)
    assert (result.tokens, result.rows) == (1, 1) and len(result.values) == 8 + 4 * VOCABULARY


async def test_progress_counts_the_tokens_that_are_scored(runner: RemoteRunner) -> None:
    seen: list[Progress] = []
    await load_methods(runner, program("decoder_start"))
    await runner.score(REQUEST, VOCABULARY, 60, seen.append)
    assert {step.stage for step in seen} == {"SCORE"} and all(step.done <= len(TEXT) for step in seen)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"decode_method": "other"}, "method 'other' is not loaded"),
    ({"tokens": [], "rows": ()}, "the payload must have at least one token"),
    ({"tokens": [1, -1], "rows": ()}, "token 1 is negative"),
    ({"tokens": [1, 96], "rows": ()}, "token 1 is 96, but method 'forward' returns 96 logits"),
    ({"rows": (4, 4)}, "rows must be ascending indices of tokens"),
    ({"rows": (10,)}, "rows must be ascending indices of tokens"),
    ({"tokens": [1] * 2000, "rows": tuple(range(1025))}, "rows must be at most 1024"),
    ({"window": 0}, "window must be"),
]


async def test_wrong_requests_leave_the_runner_usable(runner: RemoteRunner) -> None:
    await load_methods(runner, program("decoder_start"))
    for changes, message in WRONG:
        with pytest.raises((FarmError, errors.InputMismatch, errors.ProgramFailed), match=message):
            await runner.score(replace(REQUEST, **changes), VOCABULARY, 60)
    assert (await runner.score(REQUEST, VOCABULARY, 60)).tokens == len(TEXT)


async def test_a_traced_method_does_not_score(runner: RemoteRunner) -> None:
    await runner.load(program("decoder_start").path)
    await runner.load_method("forward", trace=True)
    with refuses("RUNNER_BROKEN", match="with a tracer"):
        await runner.score(REQUEST, VOCABULARY, 60)
