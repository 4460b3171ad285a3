"""Text generated in sessions, on a real farm and on this machine's own runner."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess
from tests.support.local_sessions import Open, local_data  # noqa: F401 - a fixture
from tests.support.programs import program
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="sessions generate text on a farm and on a runner of this machine")


def texts(name: str) -> tuple[list[int], list[int]]:
    """A prompt, and the tokens of eager PyTorch after it."""
    created = program(name)
    prompt, after = (
        tensors.to_array(value).tolist()
        for values in (created.inputs, created.expected)
        for value in values
        if isinstance(value, tensors.Tensor)
    )
    return prompt, after


def test_tokens_come_from_the_device_and_a_conversation_goes_on(open_session: Open) -> None:
    prompt, after = texts("decoder_start")
    with open_session(program("decoder_start").path, threads=1) as session:
        stream = session.generate(prompt, 10)
        assert list(stream) == after[:10]
        result = stream.result()
        assert (list(result.tokens), result.finish_reason, result.context_tokens) == (after[:10], "LENGTH", 22)
        assert result.token_ns.shape == (10,) and result.token_ns.min() > 0 and result.token_ns.dtype == np.int64
        assert result.prefill_ns and result.ttft_ns and result.prefill_ns <= result.ttft_ns
        assert result.tokens_per_s and list(stream) == []
        # What was generated is the context of what follows; no prompt is needed.
        assert list(session.generate([], 5)) == after[10:15]
        assert session.generate(torch.tensor([after[15:17]]), 3).result().context_tokens == 32
        assert list(session.generate([], 6, position=18)) == after[6:12], "a part of the context"
        # A new one, with the prompt in two parts.
        session.reset()
        session.generate(np.array(prompt[:5]), 1).result()
        assert list(session.generate(prompt[5:], 8, position=5)) == after[:8]
        assert list(session.generate(prompt, 24, position=0, stop_tokens=[after[3]])) == after[: after.index(after[3]) + 1]
        ended = session.generate(prompt, 24, position=0, max_time_s=1e-9).result()
        assert (list(ended.tokens), ended.finish_reason, ended.context_tokens) == (after[:1], "MAX_TIME", 13)


@pytest.mark.parametrize("name", ["decoder_shared", "decoder_vector", "decoder_custom"])
def test_programs_of_every_signature_generate(open_session: Open, name: str) -> None:
    prompt, after = texts(name)
    with open_session(program(name).path, threads=1) as session:
        assert list(session.generate(prompt, 12)) == after[:12]
        assert list(session.generate([], 12)) == after[12:]


def test_what_does_not_fit_is_refused_and_changes_nothing(open_session: Open) -> None:
    prompt, after = texts("decoder_start")
    with open_session(program("decoder_start").path, threads=1) as session:
        assert list(session.generate(prompt, 4)) == after[:4]
        refused = [
            (([], 49), {}, "CONTEXT_TOO_SHORT", r"Text so far \(16\) \+ prompt \(0\) \+ tokens \(49\) exceed the context of 64"),
            ((prompt, 60), {"position": 0}, "CONTEXT_TOO_SHORT", r"Prompt \(12\) \+ tokens \(60\) exceed the context of 64"),
            (([96], 1), {}, "BAD_CALL", "the token 96, and the vocabulary has 96"),
            (([1], 1), {"position": 17}, "BAD_CALL", "`position` is 17, and the context has 16"),
            (([], 1), {"position": 0}, "BAD_CALL", "The prompt has no tokens"),
            (([1], 1), {"stop_tokens": "eos"}, "BAD_CALL", "get_eos_ids"),
            (([1], 1), {"decode_method": "other"}, "NOT_A_LANGUAGE_MODEL", "no method 'other'"),
            (([1], 0), {}, "BAD_CALL", "`tokens` must be 1 to 65,536, got 0"),
            (([-1], 1), {}, "BAD_CALL", "must be 0 to"),
            (([1.5], 1), {}, "BAD_CALL", "whole numbers in one row, got float64"),
            (([1], 1), {"max_time_s": -1}, "BAD_CALL", "max_time_s"),
        ]
        for arguments, options, reason, message in refused:
            with pytest.raises(EtfarmError, match=message) as error:
                session.generate(*arguments, **options).result()  # type: ignore[arg-type]
            assert error.value.reason == reason
        assert list(session.generate([], 5)) == after[4:9]


def test_a_text_that_ends_before_its_first_token_changes_nothing(open_session: Open) -> None:
    prompt = [14, 78, 75, 48]
    with open_session(program("decoder_chunked").path, threads=1) as session:
        (first,) = session.generate(prompt, 1)
        after = list(session.generate([], 8))
        assert list(session.generate(prompt, 1, position=0)) == [first]
        # The first four tokens are executed at the positions of the prompt, and another text would follow them.
        ended = session.generate([9, 73, 70, 28, 1], 4, position=0, max_time_s=1e-9).result()
        assert (ended.tokens, ended.finish_reason, ended.context_tokens) == ((), "MAX_TIME", 5)
        assert list(session.generate([], 8)) == after


def test_other_programs_are_no_language_models(open_session: Open) -> None:
    with open_session(program("counter").path) as session:
        session.run("forward", np.zeros(1, np.float32))
        with refuses("NOT_A_LANGUAGE_MODEL"):
            session.generate([1], 1).result()
        (value,) = session.run("forward", np.zeros(1, np.float32))
        assert value.item() == 2.0, "the state has stayed"
        session.reset()
        (value,) = session.run("forward", np.zeros(1, np.float32))
        assert value.item() == 1.0, "the state starts anew"


def test_a_loop_that_is_left_early_stops_the_device(open_session: Open) -> None:
    prompt, after = texts("decoder_long")
    with open_session(program("decoder_long").path, threads=1) as session:
        stream = session.generate(prompt, 16_000)
        seen = []
        for token in stream:
            seen.append(token)
            if len(seen) == 5:
                break
        # The next call takes its turn when the device has stopped, which would take a minute otherwise.
        assert list(session.generate([], 5, max_time_s=3600)) == after[5:10], "what the loop has not seen is not in the context"
        result = stream.result()
        assert (list(result.tokens), result.finish_reason, result.context_tokens) == (after[:5], "CANCELLED", 17)
        assert seen == after[:5]


def test_the_command_prints_the_tokens_as_they_come(farm: FarmProcess, tmp_path: Path) -> None:
    prompt, after = texts("decoder_start")
    path, ids = program("decoder_start").path, ",".join(map(str, prompt))
    command = [sys.executable, "-m", "etfarm.wire.command", "generate", str(path), "--server", farm.address, "--prompt-ids", ids]
    written = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "-n", "10", "--threads", "1", "--json", str(written)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == " ".join(map(str, after[:10])) + "\n"
    assert re.search(rf"{path.stem} on \S+: 10 tokens, the first after .+, then [\d.,]+ tokens/s", done.stderr)
    generation = json.loads(written.read_text())["generation"]
    assert (generation["tokens"], generation["finish_reason"], generation["recipe"]) == (after[:10], "LENGTH", None)
    assert len(generation["token_ns"]) == 10 and generation["tokens_per_s"] > 0 and generation["context_tokens"] == 22
    refused = subprocess.run([*command[:-1], "96", "-n", "2"], capture_output=True, text=True, timeout=120, check=False)
    assert (
        refused.returncode == 1
        and "\n\n" not in refused.stderr
        and "the token 96, and the vocabulary has 96" in refused.stderr
        and not refused.stdout
    )
