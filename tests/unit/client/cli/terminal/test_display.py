"""What a waiting command shows of a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from etfarm.client.cli.terminal.display import LiveDisplay, PlainDisplay
from etfarm.client.formats import phases
from etfarm.client.jobs import summary
from etfarm.client.models import Cell, CellChanged, CellState, Event, JobInfo, JobState, Progress
from etfarm.client.transport.presence import AWAY, BACK
from etfarm.wire.errors import Fault, error_of
from tests.support.rendering import printed

WHAT = "resnet8 · xnnpack_fp32 · 4 threads: "


def _cell(state: CellState, **more: Any) -> Cell:
    values: dict[str, Any] = {"threads": 4, "device": None, "waiting_for": "", "error": None, "attempts": 0, **more}
    return Cell(id="c1", model="resnet8", recipe="xnnpack_fp32", method="forward", state=state, **values)


def _progress(actor: str, phase: str, **more: Any) -> Progress:
    return Progress(**{"at": datetime.now(UTC), "cell_id": "c1", "actor": actor, "phase": phase, **more})


def _change(state: CellState, **more: Any) -> CellChanged:
    return CellChanged(1, datetime.now(UTC), _cell(state, **more), JobState.RUNNING)


def _lines(state: CellState, *events: Event) -> list[str]:
    """Return what a pipe gets of a cell that is in a state when events come, without what the cell is called."""
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.cells([_cell(state)])
        for event in events:
            display.event(event)
    assert all(line.startswith(WHAT) for line in lines)
    return [line.removeprefix(WHAT) for line in lines]


def _live(state: CellState, *events: Event) -> LiveDisplay:
    display = LiveDisplay()
    display.cells([_cell(state)])
    for event in events:
        display.event(event)
    return display


def test_lines_come_as_phases_end() -> None:
    quantize = (_progress("SERVER", "QUANTIZE"), _progress("SERVER", "QUANTIZE", duration_ms=1234.0))
    lines = _lines(CellState.QUEUED, _change(CellState.COMPILING), *quantize, _change(CellState.COMPILING))
    assert lines == ["compiling", "compiling QUANTIZE: 1.23 s"]


def test_a_status_is_one_line_however_often_it_is_set() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.status("Submitting.")
        display.status("Submitting.")
    assert lines == ["Submitting."]


def test_the_condition_that_a_device_waits_for_is_reported_once_with_its_reading() -> None:
    cool = [_progress("pi5-a", "WAIT_FOR_COOL", message=f"at most 60 s: {degrees} °C") for degrees in (80, 75)]
    idle = _progress("pi5-a", "WAIT_FOR_IDLE", message="at most 10 s: 1.00 tasks per cpu run")
    assert _lines(CellState.RUNNING, *cool, idle) == [
        "waiting for a cool device on pi5-a, at most 60 s: 80 °C",
        "waiting for an idle machine on pi5-a, at most 10 s: 1.00 tasks per cpu run",
    ]


def test_a_device_that_is_retired_while_a_cell_waits_is_a_new_reason_and_a_pool_has_few() -> None:
    first, busy = ["pi5-a is drained", "no known device matches any more"], [f"{name} is busy" for name in "abcdefgh"]
    waits = [_progress("SERVER", "WAIT_FOR_DEVICE", message=reason) for reason in (*first, first[0], *busy)]
    assert _lines(CellState.WAITING_FOR_DEVICE, *waits) == [f"waiting for a device, {reason}" for reason in (*first, *busy[:3])]


def test_a_failed_cell_says_why_on_stderr_however_it_is_shown() -> None:
    failed = _cell(CellState.FAILED, error=error_of(Fault.USER, "PROGRAM_CRASHED", "It was killed.", "Look at the log."))
    event = CellChanged(1, datetime.now(UTC), failed, JobState.FAILED)
    assert _lines(CellState.RUNNING, event) == ["failed: It was killed. Look at the log."]
    live = LiveDisplay()
    live.event(event)
    assert live._failures() == ["etfarm: It was killed. Look at the log."]


def test_the_live_table_shows_what_a_cell_does() -> None:
    shown = printed(_live(CellState.RUNNING, _progress("pi5-a", "TIMED", done=50, total=100)), width=100)
    assert "running" in shown and "measuring 50 % on pi5-a" in shown
    assert "0 of 1 cell done" in shown


def test_the_live_table_says_that_the_server_is_away_until_the_job_goes_on() -> None:
    display, shown = _live(CellState.RUNNING), list[str]()
    for text in (AWAY, BACK, None):
        if text is None:
            display.event(_progress("pi5-a", "TIMED", done=50, total=100))
        else:
            display.status(text)
        shown.append(printed(display, width=100))
    assert [AWAY in text for text in shown] == [True, False, False]
    assert [BACK in text for text in shown] == [False, True, False]


def test_a_latency_is_shown_as_soon_as_it_is_measured() -> None:
    median = {"p50_ns": 1_840_000.0}
    done = {**median, "p50_ci95_ns": (1_820_000.0, 1_860_000.0), "verdict": "NOT_BENCHMARKABLE"}
    events = (
        _progress("pi5-a", "TIMED", duration_ms=1000.0, **median),
        _progress("pi5-a", "TRACED", done=5, total=10),
        _change(CellState.SUCCEEDED, **done),
    )
    assert _lines(CellState.RUNNING, *events) == [
        "measuring: 1.00 s on pi5-a, p50 1.84 ms",
        "succeeded, p50 1.84 ms [1.82, 1.86] NOT BENCHMARKABLE",
    ]
    shown = [printed(_live(CellState.RUNNING, *events[:count]), width=110) for count in (1, 2, 3)]
    assert "running  p50 1.84 ms, measuring on pi5-a" in shown[0]
    assert "running  p50 1.84 ms, tracing operators 50 % on pi5-a" in shown[1]
    assert "succeeded  p50 1.84 ms [1.82, 1.86] NOT BENCHMARKABLE" in shown[2]


@pytest.mark.parametrize("state", list(CellState))
def test_a_pipe_has_the_words_of_the_live_table_for_each_state(state: CellState) -> None:
    lines: list[str] = []
    PlainDisplay(lines.append).event(_change(state))
    words = lines[0].removeprefix(WHAT)
    assert words == phases.describe_state(state.value) and words in printed(_live(state), width=110)
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
    assert f"4 threads  {shown}" in printed(_live(state, _progress("SERVER", phase)), width=100)


@pytest.mark.parametrize("step", ["", "run 1 of 5, "])
def test_how_long_a_wait_lasts_at_most_is_not_cut_in_a_narrow_terminal(step: str) -> None:
    waits = f"{step}at most 10 s: 3.60 tasks per cpu run, to be below 0.15"
    display = _live(CellState.RUNNING, _progress("vm", "WAIT_FOR_IDLE", message=waits))
    assert "waiting at most 10 s for an idle machine" in printed(display, width=100)


def test_progress_that_arrives_before_the_change_that_it_follows_is_kept() -> None:
    change = _change(CellState.RUNNING)
    earlier, later = (_progress("SERVER", "WAIT_FOR_QUIET", at=change.at + timedelta(milliseconds=apart)) for apart in (-1, 1))
    live = _live(CellState.WAITING_FOR_DEVICE, later, change)
    assert "running  waiting until the server's own work pauses" in printed(live, width=110)
    assert _lines(CellState.WAITING_FOR_DEVICE, later, change)[0] == "waiting until the server's own work pauses"
    live.event(earlier)
    live.event(replace(change, sequence=2, cell=_cell(CellState.ANALYZING)))
    assert "waiting" not in printed(live, width=110)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_live_table_shortens_names_and_says_once_what_they_share(width: int) -> None:
    display = LiveDisplay()
    recipes = ("a_recipe_with_quite_a_long_name:and=arguments", "another_recipe_with_a_long_name:and=arguments")
    cells = [replace(_cell(CellState.WAITING_FOR_DEVICE), id=name, index=i, recipe=name) for i, name in enumerate(recipes)]
    display.cells(cells)
    busy = "every device that matches is busy with other jobs " * 2
    display.event(Progress(at=datetime.now(UTC), cell_id=recipes[0], message=busy))
    lines = printed(display, width=width).splitlines()
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
        summary.describe_contents(JobInfo(id="j", owner="me", state=JobState.QUEUED, submitted_at=datetime.now(UTC), cells=cells))
        == "a, b · x"
    )
