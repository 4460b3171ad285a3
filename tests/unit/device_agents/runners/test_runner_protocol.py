"""The runner's protocol on the raw pipes: whatever comes in, it answers, and it ends when its input ends."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.process import Limits
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.wire.errors import UserError
from tests.support.programs import program

COMMANDS = (
    "hello", "threads", "affinity", "load", "method", "load_method", "input", "default_inputs",
    "run", "measure", "trace", "debug", "outputs", "memory", "self_test", "select", "generate",
)  # fmt: skip


def talk(runner: Bundle | list[str], data: bytes, *options: str) -> tuple[list[dict[str, Any]], int]:
    """Return the events that `data` gets, and the exit code; `runner` is a bundle or a command line."""
    command = runner.command() if isinstance(runner, Bundle) else runner
    done = subprocess.run(
        [*command, *options], input=data, capture_output=True, timeout=60, env={"LC_ALL": "C.UTF-8"}, check=False
    )
    events, rest = [], done.stdout
    while rest:
        line, _, rest = rest.partition(b"\n")
        events.append(json.loads(line.decode("utf-8")))
        rest = rest[events[-1].get("payload_bytes", 0) :]
    return events, done.returncode


def replies(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] in ("result", "error")]


def words(value: str) -> bytes:
    return " ".join(value.split()).encode()


ARGUMENT = st.builds(
    lambda key, value: f"{key}={value}",
    st.sampled_from(["n", "cores", "path", "name", "index", "shape", "dim_order", "dtype", "seed", "iterations", "x"]),
    st.one_of(
        st.integers(-(2**70), 2**70).map(str),
        st.sampled_from(["", "%", "%zz", "%00", "/dev/null", "/", "forward", "0,1", ",", "1,,2", "float32"]),
        st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8),
    ),
)
LINE = st.one_of(
    st.builds(
        lambda command, arguments: words(" ".join([command, *arguments])),
        st.sampled_from(COMMANDS),
        st.lists(ARGUMENT, max_size=4),
    ),
    st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"").replace(b"bytes=", b"")),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lines=st.lists(LINE, max_size=12))
def test_every_line_of_garbage_gets_one_reply_and_the_end_of_input_ends_it(
    runner_bundle: Bundle,
    lines: list[bytes],
) -> None:
    sent = [line for line in lines if not line.startswith(b"quit")]
    events, code = talk(runner_bundle, b"".join(line + b"\n" for line in sent))
    assert code == 0
    assert len(replies(events)) == len(sent)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=2000))
def test_a_stream_of_noise_ends_with_the_input(runner_bundle: Bundle, data: bytes) -> None:
    events, code = talk(runner_bundle, data)
    assert code == 0
    assert all(event["event"] in ("result", "error", "log") for event in events)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lines=st.lists(LINE, min_size=1, max_size=6))
def test_garbage_before_a_loaded_method_leaves_it_usable(runner_bundle: Bundle, lines: list[bytes]) -> None:
    head = f"load path={program('add').path}\nload_method name=forward\n".encode()
    # Only what cannot change the method's own state; a crash of the program is another test's matter.
    noise = [line for line in lines if not line.startswith((b"quit", b"load_method", b"measure", b"trace", b"select"))]
    body = b"".join(line + b"\n" for line in noise)
    events, code = talk(runner_bundle, head + body + b"default_inputs seed=1\nrun\nquit\n")
    assert code == 0
    assert [event["event"] for event in replies(events)[-3:]] == ["result"] * 3


def test_a_payload_is_taken_whatever_the_command(runner_bundle: Bundle) -> None:
    events, _ = talk(runner_bundle, b"nonsense bytes=6\nhello\ninput index=0 bytes=4\nrun\nmemory\n")
    assert [(event["event"], event["command"]) for event in events] == [
        ("error", "nonsense"),
        ("error", "input"),
        ("result", "memory"),
    ]


def test_a_payload_that_is_cut_off_ends_the_process(runner_bundle: Bundle) -> None:
    events, code = talk(runner_bundle, b"input index=0 bytes=1000000\nabc")
    assert (events, code) == ([], 0)


def test_a_line_without_end_is_refused_and_skipped(runner_bundle: Bundle) -> None:
    events, _ = talk(runner_bundle, b"x" * (3 << 20) + b"\nmemory\n")
    assert [event["event"] for event in events] == ["error", "result"]
    assert "longer than" in events[0]["message"]


COMPLAINTS = {
    b"memory now=1": "memory has no option 'now'",
    b"threads": "threads needs n=",
    b"threads n=0": "n must be an integer from 1 to 1024, not '0'",
    b"threads n=1 n=2": "n is given twice",
    b"load path=%4": "% is not followed by two hex digits",
    b"load path=a%00b": "a value holds a NUL byte",
    b"run fast": "'fast' is not key=value",
    b"run": "no method is loaded",
    b"select name=forward": "method 'forward' is not loaded",
    b"frobnicate": "there is no command 'frobnicate'",
    b"x" * (3 << 20): "the line is longer than 1048576 bytes",
    b"": "there is no command ''",
}


@pytest.mark.parametrize("kind", ["native", "python"])
def test_a_bad_command_gets_the_reason(runner_bundle: Bundle, kind: str) -> None:
    if kind == "python" and not PythonRunner.available():
        pytest.skip("needs torch and executorch")
    runner = runner_bundle if kind == "native" else PythonRunner.command()
    events, code = talk(runner, b"".join(line + b"\n" for line in COMPLAINTS))
    assert code == 0
    assert {event["event"] for event in events} == {"error"}
    for event, complaint in zip(events, COMPLAINTS.values(), strict=True):
        assert complaint in event["message"]


def test_the_python_binding_answers_noise_and_ends_with_its_input() -> None:
    if not PythonRunner.available():
        pytest.skip("needs torch and executorch")
    noise = random.Random(1)
    words = [command.encode() for command in COMMANDS if command != "load"]
    arguments = [
        b"n=1",
        b"name=forward",
        b"index=0",
        b"shape=,",
        b"seed=-1",
        b"kind=int",
        b"value=9" * 30,
        b"%=%",
        b"path=/",
        b"x",
    ]
    lines = [b" ".join([noise.choice(words), *noise.choices(arguments, k=noise.randrange(4))]) for _ in range(300)]
    lines += [bytes(noise.randrange(11, 256) for _ in range(noise.randrange(1, 80))) for _ in range(100)]
    lines += [b"nonsense bytes=6\nhello", b"memory"]
    events, code = talk(PythonRunner.command(), b"\n".join(lines) + b"\ninput index=0 bytes=1000000\nabc")
    assert code == 0
    assert len(replies(events)) == len(lines)
    assert events[-1]["event"] == "result"


def test_an_unknown_option_of_the_process_is_a_usage_error(runner_bundle: Bundle) -> None:
    assert talk(runner_bundle, b"", "--limit-data-bytes", "many") == ([], 2)
    assert talk(PythonRunner.command(), b"", "--limit-data-bytes", "many") == ([], 2)


async def test_a_damaged_program_is_answered_or_dies_within_its_deadline(runner_bundle: Bundle, tmp_path: Path) -> None:
    chance = random.Random(20)
    ended: Counter[str] = Counter()
    for name in ("conv", "add", "external", "scalars"):
        model = program(name)
        for _ in range(15):
            damaged = bytearray(model.bytes)
            for _ in range(chance.randrange(1, 9)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            (tmp_path / "damaged.pte").write_bytes(damaged)
            limits = Limits(data_bytes=512 << 20, command_s=5)
            async with NativeRunner.start(runner_bundle.command(), tmp_path, limits=limits) as runner:
                try:
                    await runner.load(tmp_path / "damaged.pte", model.data)
                    await runner.load_method("forward")
                    await runner.default_inputs(1)
                    await runner.run()
                    await runner.outputs()
                    ended["ok"] += 1
                except UserError as error:  # the program's fault, whatever it was
                    ended[error.reason] += 1
            assert not Path(f"/proc/{runner.pid}").exists()
    assert ended.total() == 60
    assert ended["PROGRAM_FAILED"] > 0
