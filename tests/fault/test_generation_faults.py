"""Faults in the middle of generated texts: a clear error, a free device, no process left, in sessions and in measurements."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from etfarm.client import Farm, Generate, Session
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from tests.support.farm import PROMPTLY_S, FarmProcess, lives, runners, wait_until
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="kills runners, agents and servers in the middle of texts")

LONG = 16_000
"""Number of tokens that take the long model a minute."""

READER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
from etfarm.client import Farm
with Farm(sys.argv[1]) as farm, farm.session(sys.argv[2]) as session:
    for token in session.generate([1, 2, 3], 16_000):
        print("token", flush=True)
"""
"""A process that reads a text and is ended in the middle."""


def prompt() -> list[int]:
    (value,) = program("decoder_long").inputs
    assert isinstance(value, tensors.Tensor)
    return list(tensors.to_array(value).tolist())


def works_again(farm: FarmProcess) -> bool:
    """Return whether a new session generates."""
    with farm.client() as client, client.session(program("decoder_long").path) as session:
        return len(list(session.generate(prompt(), 3))) == 3


@contextmanager
def generating(farm: FarmProcess) -> Iterator[tuple[Session, Iterator[int]]]:
    """A session in the middle of a text."""
    with farm.client() as client, client.session(program("decoder_long").path, threads=1) as session:
        tokens = iter(session.generate(prompt(), LONG))
        next(tokens)
        yield session, tokens


def error_of(tokens: Iterator[int]) -> EtfarmError:
    """Return the error that ends a text."""
    with pytest.raises(EtfarmError) as ended:
        assert len(list(tokens)) < LONG
    return ended.value


def test_a_killed_runner_ends_the_text_and_the_session(farm: FarmProcess) -> None:
    with generating(farm) as (session, tokens):
        (runner,) = runners(farm.agents[0].pid)
        os.kill(runner, signal.SIGKILL)
        error = error_of(tokens)
        assert error.reason in ("PROGRAM_OUT_OF_MEMORY", "PROGRAM_CRASHED") and error.metadata["signal"] == "SIGKILL"
        with pytest.raises(EtfarmError) as again:
            session.generate([1], 1).result()
        assert again.value.reason == error.reason
        assert wait_until(farm.is_idle, PROMPTLY_S)
    assert works_again(farm)


def test_a_session_that_is_closed_in_the_middle_of_a_text_frees_the_device(farm: FarmProcess) -> None:
    with generating(farm) as (session, tokens):
        (runner,) = runners(farm.agents[0].pid)
        threading.Timer(0.0, session.close).start()
        assert error_of(tokens).reason == "SESSION_CLOSED"
    assert wait_until(lambda: not lives(runner) and farm.is_idle(), PROMPTLY_S)
    assert works_again(farm)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_caller_that_is_ended_in_the_middle_of_a_text_frees_the_device(farm: FarmProcess, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READER, farm.address, str(program("decoder_long").path)], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "token\n"
        held = runners(farm.agents[0].pid)
        assert held
        process.send_signal(number)
        assert wait_until(lambda: farm.is_idle() and not any(lives(pid) for pid in held), PROMPTLY_S)
    finally:
        process.kill()
        process.communicate()
    assert works_again(farm)


def test_a_killed_agent_ends_the_text(breakable: FarmProcess) -> None:
    breakable.start()
    with generating(breakable) as (_, tokens):
        held = runners(breakable.agents[0].pid)
        breakable.agents[0].kill9()
        error = error_of(tokens)
        assert (error.fault.value, error.reason) == ("DEVICE", "SESSION_LOST")
        assert wait_until(lambda: not any(lives(pid) for pid in held), PROMPTLY_S), "the runner outlived its agent"
    breakable.agents[0].start()
    breakable.agents[0].expect("connected to")
    assert works_again(breakable)


def test_a_killed_server_ends_the_text(breakable: FarmProcess) -> None:
    breakable.start()
    with generating(breakable) as (_, tokens):
        breakable.kill9()
        assert error_of(tokens).reason == "SERVER_UNREACHABLE"
    assert wait_until(lambda: not runners(breakable.agents[0].pid), PROMPTLY_S), "a runner without a session"
    breakable.restart()
    breakable.agents[0].expect("connected to")
    assert works_again(breakable)


def test_a_runner_that_is_killed_in_the_middle_of_a_measurement_fails_its_report(farm: FarmProcess) -> None:
    with Farm(farm.address) as client:
        job = client.bench(str(program("decoder_long").path), generate=Generate(4096, prompt_tokens=12, depths=0), threads=1)
        assert wait_until(lambda: any(_works(pid) for pid in runners(farm.agents[0].pid)))
        for pid in runners(farm.agents[0].pid):
            os.kill(pid, signal.SIGKILL)
        (report,) = job.result().reports
        assert report.error is not None and report.error.metadata["signal"] == "SIGKILL"
    assert wait_until(lambda: farm.is_idle() and not runners(farm.agents[0].pid), PROMPTLY_S)
    assert works_again(farm)


def test_a_measurement_is_placed_again_when_its_agent_is_killed_in_the_middle(breakable: FarmProcess) -> None:
    breakable.start()
    with Farm(breakable.address) as client:
        # The server generates the text again to compare it, which takes longer than the runner.
        short = Generate(200, prompt_tokens=12, depths=0, repetitions=1, warmup=0)
        job = client.bench(str(program("decoder_long").path), generate=short, threads=1)
        assert wait_until(lambda: any(_works(pid) for pid in runners(breakable.agents[0].pid)))
        held = runners(breakable.agents[0].pid)
        breakable.agents[0].kill9()
        assert wait_until(lambda: not any(lives(pid) for pid in held), PROMPTLY_S), "the runner outlived its agent"
        breakable.agents[0].start()
        report = job.result().report
        assert report.generation is not None and report.generation.points[0].repetitions == 1


def _works(pid: int) -> bool:
    """Return whether a runner has begun to generate: it has used more time than loading the program takes."""
    try:
        return psutil.Process(pid).cpu_times().user > 0.3
    except psutil.NoSuchProcess:
        return False
