"""The smoke run: whatever the program does to its process, the compiling child gets an answer."""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from etfarm.server.compile.verify import smoke  # noqa: E402
from etfarm.server.compile.verify.smoke import Execute, Outcome, Run, SmokeRunner, explain  # noqa: E402
from etfarm.wire import tensors  # noqa: E402
from etfarm.wire.tensors import Scalar  # noqa: E402
from tests.support import models  # noqa: E402


def run_of(folder: Path, method: str = "forward") -> Run:
    return Run(method, folder / "in.ett", folder / f"{method}.out.ett")


def outcomes_of(
    folder: Path, behaviour: Execute, methods: tuple[str, ...] = ("forward",), timeout_s: float = 60
) -> list[Outcome]:
    runner = SmokeRunner(folder / "log", behaviour)
    try:
        return runner.run(folder / "model.pte", None, [run_of(folder, method) for method in methods], timeout_s)
    finally:
        runner.close()


def crash(number: signal.Signals) -> None:
    """End this process by a signal, without the traceback that pytest's own fault handler would print into the test run."""
    faulthandler.disable()
    os.kill(os.getpid(), number)


def test_a_crash_names_its_signal(tmp_path: Path) -> None:
    [outcome] = outcomes_of(tmp_path, lambda order: crash(signal.SIGSEGV))
    assert (outcome.ran, outcome.why) == (False, "it crashed with SIGSEGV")


def test_an_exit_is_no_success(tmp_path: Path) -> None:
    [outcome] = outcomes_of(tmp_path, lambda order: os._exit(3))
    assert (outcome.ran, outcome.why) == (False, "it ended with exit code 3")


def test_a_silent_exit_is_no_success_either(tmp_path: Path) -> None:
    [outcome] = outcomes_of(tmp_path, lambda order: os._exit(0))
    assert not outcome.ran


def test_a_crash_ends_its_own_run_only(tmp_path: Path) -> None:
    def behaviour(order: dict[str, Any]) -> dict[str, object]:
        if order["calls"][0][0] == "second":
            crash(signal.SIGABRT)
        os.write(1, f"this is {order['calls'][0][0]}".encode())
        return {"ran": True}

    result = outcomes_of(tmp_path, behaviour, ("first", "second", "third"))
    assert [(o.method, o.ran) for o in result] == [("first", True), ("second", False), ("third", True)]
    assert result[1].why == "it crashed with SIGABRT"
    assert [o.log.strip() for o in (result[0], result[2])] == ["this is first", "this is third"]


@pytest.mark.slow(reason="waits for the deadline of a program that hangs")
def test_a_hang_is_ended_and_the_next_run_goes_on(tmp_path: Path) -> None:
    def behaviour(order: dict[str, Any]) -> dict[str, object]:
        if order["calls"][0][0] == "hangs":
            (tmp_path / "pid").write_text(str(os.getpid()))
            signal.pause()
        return {"ran": True}

    hung, fine = outcomes_of(tmp_path, behaviour, ("hangs", "runs"), timeout_s=5)
    assert hung.timed_out
    assert not hung.ran
    assert fine.ran
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_memory_that_is_used_up_says_nothing_against_the_program(tmp_path: Path) -> None:
    def behaviour(order: dict[str, Any]) -> dict[str, object]:
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'")
        crash(signal.SIGABRT)

    [outcome] = outcomes_of(tmp_path, behaviour)
    assert outcome.out_of_memory
    assert not outcome.ran


def test_a_kill_by_the_host_says_nothing_against_the_program(tmp_path: Path) -> None:
    def behaviour(order: dict[str, Any]) -> dict[str, object]:
        crash(signal.SIGKILL)

    [outcome] = outcomes_of(tmp_path, behaviour)
    assert outcome.out_of_memory and not outcome.ran and outcome.why == "it crashed with SIGKILL"


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    runner = SmokeRunner(tmp_path / "log")
    pid = runner._pid
    runner.close()
    runner.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_forking_process_that_has_ended_is_reported(tmp_path: Path) -> None:
    runner = SmokeRunner(tmp_path / "log")
    os.kill(runner._pid, signal.SIGKILL)
    [outcome] = runner.run(tmp_path / "model.pte", None, [run_of(tmp_path)], 60)
    runner.close()
    assert not outcome.ran
    assert "has ended" in outcome.why


@pytest.mark.slow(reason="lowers models")
@pytest.mark.parametrize(("limit_s", "executions"), [(60.0, 2), (0.0, 1)])
def test_a_program_that_takes_long_is_executed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, executions: int
) -> None:
    monkeypatch.setattr(smoke, "MAX_REPEATED_S", limit_s)
    runner = SmokeRunner(tmp_path / "log")  # before any use of torch
    try:
        exir = pytest.importorskip("executorch.exir")
        program, x = models.conv(), torch.rand(1, 3, 8, 8)
        (tmp_path / "model.pte").write_bytes(exir.to_edge(program).to_executorch().buffer)
        (tmp_path / "in.ett").write_bytes(tensors.encode([tensors.from_array("", x.numpy())]))
        run = replace(run_of(tmp_path), repeated=tmp_path / "again.ett")
        [outcome] = runner.run(tmp_path / "model.pte", None, [run], 60)
    finally:
        runner.close()
    assert outcome.ran and run.outputs.exists()
    assert (tmp_path / "again.ett").exists() == (executions == 2)


def test_an_invalid_program_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model.pte").write_bytes(b"no program")
    (tmp_path / "in.ett").write_bytes(tensors.encode([Scalar("", 1)]))
    runner = SmokeRunner(tmp_path / "log")
    [outcome] = runner.run(tmp_path / "model.pte", None, [run_of(tmp_path)], 60)
    runner.close()
    assert not outcome.ran
    assert outcome.why
    assert not (tmp_path / "forward.out.ett").exists()


@pytest.mark.parametrize(
    ("error", "log", "words"),
    [
        ("Failed to load method forward, error: 0x:14", "[method.cpp:7] kernel 'aten::x.out' not found.",
         "an operator has no kernel (0x14): kernel 'aten::x.out' not found"),
        ("Failed to load method forward, error: 0x:14",
         "[a.cpp:7] kernel 'a::x.out' not found.\n[a.cpp:8] dtype: 6\n[a.cpp:7] kernel 'a::y' not found.\n"
         "[a.cpp:7] kernel 'a::x.out' not found.",
         "an operator has no kernel (0x14): kernels 'a::x.out', 'a::y' not found"),
        ("Failed to execute method forward, error: 0x12", "[cpuinfo_utils.cpp:1] Reading file x\nplain text",
         "an operator refused its arguments (0x12)"),
        ("something else", "", "something else"),
    ],
)  # fmt: skip
def test_the_runtimes_reason_is_put_in_words(error: str, log: str, words: str) -> None:
    assert explain(error, log) == words
