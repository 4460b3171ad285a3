"""The smoke run: whatever the program does to its process, the compiling child gets an answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from etfarm.server.compile import smoke
from etfarm.server.compile.explain import first_line, stage_failed


def outcome_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behaviour: object, timeout_s: float = 20) -> smoke.Outcome:
    monkeypatch.setattr(smoke, "_run", behaviour)
    runner = smoke.SmokeRunner(tmp_path / "log")
    try:
        return runner.run(tmp_path / "model.pte", {"forward": tmp_path / "in.ett"}, timeout_s)
    finally:
        runner.close()


def test_a_crash_names_its_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = outcome_of(monkeypatch, tmp_path, lambda order: os.kill(os.getpid(), signal.SIGSEGV))
    assert (outcome.ran, outcome.why) == (False, "it crashed with SIGSEGV")


def test_an_exit_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = outcome_of(monkeypatch, tmp_path, lambda order: os._exit(3))
    assert (outcome.ran, outcome.why) == (False, "it ended with exit code 3")


def test_a_hang_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = outcome_of(monkeypatch, tmp_path, lambda order: time.sleep(60), timeout_s=0.2)
    assert outcome.timed_out
    assert not outcome.ran


def test_a_program_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.pte").write_bytes(b"no program")
    (tmp_path / "in.ett").write_bytes(b"")
    runner = smoke.SmokeRunner(tmp_path / "log")
    outcome = runner.run(tmp_path / "model.pte", {"forward": tmp_path / "in.ett"}, 60)
    assert not outcome.ran
    assert outcome.why


@pytest.mark.parametrize(
    ("error", "log", "words"),
    [
        ("Failed to load method forward, error: 0x:14", "[method.cpp:7] kernel 'aten::x.out' not found.",
         "an operator has no kernel (0x14): kernel 'aten::x.out' not found"),
        ("Failed to execute method forward, error: 0x12", "[cpuinfo_utils.cpp:1] Reading file x\nplain text",
         "an operator refused its arguments (0x12)"),
        ("something else", "", "something else"),
    ],
)  # fmt: skip
def test_the_runtimes_reason_is_put_in_words(error: str, log: str, words: str) -> None:
    assert smoke.explain(error, log) == words


def test_a_wrapped_error_is_told_by_its_cause_and_without_paths() -> None:
    cause = ValueError("\n\nCannot lower /srv/etfarm/jobs/job-1/model.pt2 today\nsecond line")
    wrapper = RuntimeError("An error occurred when running the 'X' pass after the following passes: []")
    wrapper.__cause__ = cause
    assert first_line(wrapper) == "Cannot lower model.pt2 today"
    error = stage_failed("TO_EXECUTORCH", wrapper)
    assert (error.reason, error.stage) == ("STAGE_FAILED", "TO_EXECUTORCH")


def test_an_error_without_words_is_told_by_its_type() -> None:
    assert first_line(KeyError()) == "KeyError"
