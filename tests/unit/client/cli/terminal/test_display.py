"""What a waiting command shows of a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from etfarm.client.cli.terminal.display import LiveDisplay, PlainDisplay
from etfarm.client.formats import phases
from etfarm.client.jobs import summary
from etfarm.client.models import Cell, CellChanged, CellState, JobInfo, JobState, Progress
from etfarm.client.transport.presence import AWAY, BACK
from etfarm.wire.errors import Fault, error_of


def _cell(state: CellState, **more: Any) -> Cell:
    values: dict[str, Any] = {"threads": 4, "device": None, "waiting_for": "", "error": None, "attempts": 0, **more}
    return Cell(id="c1", model="resnet8", recipe="xnnpack_fp32", method="forward", state=state, **values)


def _now() -> Any:
    return datetime.now(UTC)


def test_lines_come_as_phases_end() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.status("Submitting.")
        display.status("Submitting.")
        display.cells([_cell(CellState.QUEUED)])
        display.event(CellChanged(1, _now(), _cell(CellState.COMPILING), JobState.RUNNING))
        display.event(Progress(at=_now(), cell_id="c1", actor="SERVER", phase="QUANTIZE"))
        display.event(Progress(at=_now(), cell_id="c1", actor="SERVER", phase="QUANTIZE", duration_ms=1234.0))
        display.event(CellChanged(2, _now(), _cell(CellState.COMPILING), JobState.RUNNING))
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == ["Submitting.", f"{what}: compiling", f"{what}: compiling QUANTIZE: 1.23 s"]


def test_the_condition_that_a_device_waits_for_is_reported_once_with_its_reading() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.cells([_cell(CellState.RUNNING)])
        for degrees in (80, 75):
            display.event(
                Progress(at=_now(), cell_id="c1", actor="pi5-a", phase="WAIT_FOR_COOL", message=f"at most 60 s: {degrees} °C")
            )
        display.event(
            Progress(
                at=_now(), cell_id="c1", actor="pi5-a", phase="WAIT_FOR_IDLE", message="at most 10 s: 1.00 tasks per cpu run"
            )
        )
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == [
        f"{what}: waiting for a cool device on pi5-a, at most 60 s: 80 °C",
        f"{what}: waiting for an idle machine on pi5-a, at most 10 s: 1.00 tasks per cpu run",
    ]


def test_a_device_that_is_retired_while_a_cell_waits_is_a_new_reason_and_a_pool_has_few() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.cells([_cell(CellState.WAITING_FOR_DEVICE)])

        def wait(reason: str) -> None:
            display.event(Progress(at=_now(), cell_id="c1", actor="SERVER", phase="WAIT_FOR_DEVICE", message=reason))

        for reason in ("pi5-a is drained", "no known device matches any more", "pi5-a is drained"):
            wait(reason)
        for name in "abcdefgh":
            wait(f"{name} is busy")
    what = "resnet8 · xnnpack_fp32 · 4 threads: waiting for a device"
    reasons = ("pi5-a is drained", "no known device matches any more", "a is busy", "b is busy", "c is busy")
    assert lines == [f"{what}, {reason}" for reason in reasons]


def test_a_failed_cell_says_why_on_stderr_however_it_is_shown() -> None:
    failed = _cell(CellState.FAILED, error=error_of(Fault.USER, "PROGRAM_CRASHED", "It was killed.", "Look at the log."))
    event = CellChanged(1, _now(), failed, JobState.FAILED)
    lines: list[str] = []
    PlainDisplay(lines.append).event(event)
    assert lines == ["resnet8 · xnnpack_fp32 · 4 threads: failed: It was killed. Look at the log."]
    live = LiveDisplay()
    live.event(event)
    assert live._failures() == ["etfarm: It was killed. Look at the log."]


def test_the_live_table_shows_what_a_cell_does() -> None:
    display = LiveDisplay()
    display.cells([_cell(CellState.RUNNING)])
    display.event(Progress(at=_now(), cell_id="c1", actor="pi5-a", phase="TIMED", done=50, total=100))
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(display)
    assert "running" in capture.get() and "measuring 50 % on pi5-a" in capture.get()
    assert "0 of 1 cell done" in capture.get()


def test_the_live_table_says_that_the_server_is_away_until_the_job_goes_on() -> None:
    display, shown = LiveDisplay(), list[str]()
    display.cells([_cell(CellState.RUNNING)])
    console = Console(width=100, color_system=None)
    for text in (AWAY, BACK, None):
        if text is None:
            display.event(Progress(at=_now(), cell_id="c1", actor="pi5-a", phase="TIMED", done=50, total=100))
        else:
            display.status(text)
        with console.capture() as capture:
            console.print(display)
        shown.append(capture.get())
    assert [AWAY in text for text in shown] == [True, False, False]
    assert [BACK in text for text in shown] == [False, True, False]


def test_a_latency_is_shown_as_soon_as_it_is_measured() -> None:
    lines: list[str] = []
    timed = Progress(at=_now(), cell_id="c1", actor="pi5-a", phase="TIMED", duration_ms=1000.0, p50_ns=1_840_000.0)
    done = _cell(CellState.SUCCEEDED, p50_ns=1_840_000.0, p50_ci95_ns=(1_820_000.0, 1_860_000.0), verdict="NOT_BENCHMARKABLE")
    plain, live = PlainDisplay(lines.append), LiveDisplay()
    console = Console(width=110, color_system=None)
    shown = []
    for event in (
        timed,
        Progress(at=_now(), cell_id="c1", actor="pi5-a", phase="TRACED", done=5, total=10),
        CellChanged(1, _now(), done, JobState.RUNNING),
    ):
        for display in (plain, live):
            if event is timed:
                display.cells([_cell(CellState.RUNNING)])
            display.event(event)
        with console.capture() as capture:
            console.print(live)
        shown.append(capture.get())
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == [
        f"{what}: measuring: 1.00 s on pi5-a, p50 1.84 ms",
        f"{what}: succeeded, p50 1.84 ms [1.82, 1.86] NOT BENCHMARKABLE",
    ]
    assert "running  p50 1.84 ms, measuring on pi5-a" in shown[0]
    assert "running  p50 1.84 ms, tracing operators 50 % on pi5-a" in shown[1]
    assert "succeeded  p50 1.84 ms [1.82, 1.86] NOT BENCHMARKABLE" in shown[2]


@pytest.mark.parametrize("state", list(CellState))
def test_a_pipe_has_the_words_of_the_live_table_for_each_state(state: CellState) -> None:
    cell, console = _cell(state), Console(width=110, color_system=None)
    live, lines = LiveDisplay(), list[str]()
    live.cells([cell])
    PlainDisplay(lines.append).event(CellChanged(1, _now(), cell, JobState.RUNNING))
    with console.capture() as capture:
        console.print(live)
    words = lines[0].removeprefix("resnet8 · xnnpack_fp32 · 4 threads: ")
    assert words == phases.describe_state(state.value) and words in capture.get()
    assert not any(word.isupper() or "_" in word for word in words.split())


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("TO_EXECUTORCH", "compiling TO_EXECUTORCH"),
        ("NUMERICS_TO_EXECUTORCH", "compiling TO_EXECUTORCH for the numerics pass"),
        ("NUMERICS", "recording the outputs of operators"),
        ("WAIT_FOR_QUIET", "waiting until the server's own work pauses"),
        ("", ""),
    ],
)
def test_a_phase_is_described_in_words(phase: str, words: str) -> None:
    assert phases.describe(phase) == words


@pytest.mark.parametrize(
    ("state", "phase", "shown"),
    [
        (CellState.COMPILING, "TO_EXECUTORCH", "compiling  TO_EXECUTORCH  0"),
        (CellState.RUNNING, "RUN", "running  executing once  0"),
        (CellState.ANALYZING, "ANALYZE", "analyzing    0"),
    ],
)
def test_the_activity_does_not_repeat_the_state(state: CellState, phase: str, shown: str) -> None:
    display = LiveDisplay()
    display.cells([_cell(state)])
    display.event(Progress(at=_now(), cell_id="c1", actor="SERVER", phase=phase))
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(display)
    assert f"4 threads  {shown}" in capture.get()


@pytest.mark.parametrize("step", ["", "run 1 of 5, "])
def test_how_long_a_wait_lasts_at_most_is_not_cut_in_a_narrow_terminal(step: str) -> None:
    display, console = LiveDisplay(), Console(width=100, color_system=None)
    display.cells([_cell(CellState.RUNNING)])
    waits = f"{step}at most 10 s: 3.60 tasks per cpu run, to be below 0.15"
    display.event(Progress(at=_now(), cell_id="c1", actor="vm", phase="WAIT_FOR_IDLE", message=waits))
    with console.capture() as capture:
        console.print(display)
    assert "waiting at most 10 s for an idle machine" in capture.get()


def test_progress_that_arrives_before_the_change_that_it_follows_is_kept() -> None:
    lines: list[str] = []
    change = _now()
    earlier, later = (change + timedelta(milliseconds=apart) for apart in (-1, 1))
    waits = Progress(at=later, cell_id="c1", actor="SERVER", phase="WAIT_FOR_QUIET")
    live, plain, console = LiveDisplay(), PlainDisplay(lines.append), Console(width=110, color_system=None)
    for display in (live, plain):
        display.cells([_cell(CellState.WAITING_FOR_DEVICE)])
        for event in (waits, CellChanged(1, change, _cell(CellState.RUNNING), JobState.RUNNING)):
            display.event(event)
    with console.capture() as capture:
        console.print(live)
    assert "running  waiting until the server's own work pauses" in capture.get()
    assert lines[0] == "resnet8 · xnnpack_fp32 · 4 threads: waiting until the server's own work pauses"
    live.event(replace(waits, at=earlier))
    live.event(CellChanged(2, change, _cell(CellState.ANALYZING), JobState.RUNNING))
    with console.capture() as capture:
        console.print(live)
    assert "waiting" not in capture.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_live_table_shortens_names_and_says_once_what_they_share(width: int) -> None:
    display = LiveDisplay()
    recipes = ("a_recipe_with_quite_a_long_name:and=arguments", "another_recipe_with_a_long_name:and=arguments")
    cells = [replace(_cell(CellState.WAITING_FOR_DEVICE), id=name, index=i, recipe=name) for i, name in enumerate(recipes)]
    display.cells(cells)
    display.event(Progress(at=_now(), cell_id=recipes[0], message="every device that matches is busy with other jobs " * 2))
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(display)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0] == "resnet8 · 4 threads"
    assert len(lines) == 4 and max(map(len, lines)) <= width
    assert all("waiting for device" in line and line.endswith("0.0 s") for line in lines[1:3])


def test_a_cell_that_is_only_compiled_is_about_all_methods() -> None:
    compiled = replace(_cell(CellState.COMPILING), method="text_decoder", threads=None, on_device=False)
    assert compiled.label == "resnet8 · xnnpack_fp32"
    assert replace(compiled, on_device=True).label == "resnet8 · xnnpack_fp32 · text_decoder"


def test_a_job_is_called_by_its_models_and_recipes() -> None:
    cells = tuple(replace(_cell(CellState.QUEUED), model=model, recipe=recipe) for model in "ab" for recipe in ("x", None))
    assert (
        summary.describe_contents(JobInfo(id="j", owner="me", state=JobState.QUEUED, submitted_at=_now(), cells=cells))
        == "a, b · x"
    )
