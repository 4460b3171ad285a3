"""Reports as people read them, from documents of etfarm.report/1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format
from rich.console import Console

from etfarm.client.cli import jobs, output, render
from etfarm.client.cli.display import LiveDisplay, PlainDisplay
from etfarm.client.models import Cell, CellChanged, CellState, JobInfo, JobState, Progress
from etfarm.v1 import report_pb2
from etfarm.wire import report
from etfarm.wire.errors import Fault, error_of


def _row(index: int, kind: str, name: str, share: float, p50_ns: float | None, **more: Any) -> dict[str, Any]:
    return {"index": index, "kind": f"OPERATOR_KIND_{kind}", "name": name, "share": share, "p50_ns": p50_ns, **more}


def _document(**changes: Any) -> dict[str, Any]:
    message = {
        "id": "r1", "cell": "c1", "recipe": "xnnpack_fp32", "method": "forward", "threads": 4, "state": "SUCCEEDED",
        "model": {"name": "resnet8", "digest": "0" * 64},
        "device": {"id": "d1", "name": "pi5-a", "arch": "aarch64", "soc": "cortex-a76", "os": "Linux", "cores": 4},
        "latency": {"samples_ns": [1_840_000] * 543, "p50_ns": 1_840_000, "p50_ci95_ns": [1_820_000, 1_860_000]},
        "profile": {"iterations": 10, "p50_ns": 1_880_000},
        "verdict": {"status": "VERDICT_STATUS_VALID"},
        "operators": [
            _row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True),
            _row(1, "KERNEL", "Convolution (NHWC, F32) IGEMM #2", 0.412, 760_000, parent=0, backend="XnnpackBackend",
                 source={"file": "models/resnet.py", "line": 31, "code": "y = self.conv2(y)"}),
            _row(2, "KERNEL", "Add (ND) #1", 0.001, None, parent=0, backend="XnnpackBackend", resolution_ns=1000.0),
            _row(3, "REST", "REST", 0.387, 727_000, parent=0),
            _row(4, "OPERATOR", "aten.mean.dim", 0.18, 330_000,
                 source={"file": "models/resnet.py", "line": 44, "code": "y = y.mean((2, 3))"}),
            _row(5, "REST", "REST", 0.02, 46_000),
        ],
        "compile": {
            "cached": True,
            "stages": [{"stage": "TO_EXECUTORCH", "duration_ms": 195.0, "where": "SERVER"}],
            "program": {"digest": "1" * 64, "size_bytes": 320_512},
            "delegation": {"forward": {"subgraphs": 1, "delegated_nodes": 36, "non_delegated_nodes": 1}},
            "warnings": [{"code": "ONE_SAMPLE", "message": "forward was calibrated with one input."}],
        },
        "accuracy": [{"output": "linear", "reference": "program before quantization", "sqnr_db": 38.21, "max_abs_error": 0.0012}],
        "memory": {"peak_rss_bytes": 8 << 20, "planned_bytes": [24_800]},
    }  # fmt: skip
    message.update(changes)
    return report.report_json(json_format.ParseDict(message, report_pb2.Report()))


def _text(document: dict[str, Any], width: int = 120, **options: Any) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(render.report(document, width=width, **options))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_the_answer_is_the_first_line() -> None:
    first = _text(_document()).splitlines()[0]
    assert first.startswith("resnet8 · xnnpack_fp32 · pi5-a (cortex-a76, 4 threads)")
    assert first.endswith("p50 1.84 ms [1.82, 1.86]  VALID  543 samples  traced 1.88 ms")


def test_operators_come_by_share_with_kernels_under_their_delegate() -> None:
    lines = _text(_document()).splitlines()[1:7]
    assert [line.split()[0] for line in lines] == ["0", "1", "38.7", "2", "4", "2.0"]
    assert lines[1] == (
        "  1  41.2 %    760 µs    Convolution (NHWC, F32) IGEMM #2            models/resnet.py:31  y = self.conv2(y)"
    )
    assert "<1.00 µs" in lines[3]
    assert "portable" in lines[4] and "models/resnet.py:44  y = y.mean((2, 3))" in lines[4]


def test_only_the_largest_are_shown_and_the_rest_is_counted() -> None:
    text = _text(_document(), top=1, job="j1")
    assert "aten.mean.dim" not in text
    assert "and 4 more, 58.8 % together: etfarm report show j1 --top 0" in text
    assert "more," not in _text(_document(), top=0)


@pytest.mark.parametrize("width", [80, 100, 130, 160])
def test_nothing_is_wider_than_the_terminal_and_no_row_wraps(width: int) -> None:
    lines = _text(_document(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("IGEMM" in line for line in lines) == sum("#2" in line for line in lines)


def test_a_narrow_terminal_keeps_the_place_and_leaves_out_the_code() -> None:
    text = _text(_document(), 80)
    assert "models/resnet.py:31" in text
    assert "y = self.conv2(y)" not in text


def test_the_facts_are_told_with_their_units() -> None:
    text = _text(_document())
    assert "linear: SQNR 38.2 dB, max abs error 0.0012, against the program before quantization" in text
    assert "peak 8.00 MiB, planned 24.2 KiB" in text
    assert "cached; took TO_EXECUTORCH 195 ms" in text
    assert "313 KiB, 36 of 37 nodes delegated in 1 subgraph, 80.0 % of the time" in text
    assert "forward was calibrated with one input." in text


def test_inputs_that_nobody_gave_are_called_made_up() -> None:
    assert "inputs    made up by the runner, seed 0" in _text(_document(), made_up={"c1"})
    assert "made up" not in _text(_document(), made_up={"c2"})


def test_a_verdict_says_what_to_do() -> None:
    reason = {"code": "CPU_PRESSURE", "message": "Some task waited."}
    text = _text(_document(verdict={"status": "VERDICT_STATUS_INVALID", "reasons": [reason]}))
    assert "INVALID" in text.splitlines()[0]
    assert "Some task waited. Stop what else runs on the device." in text


def test_a_failed_cell_is_its_error_with_the_remedy() -> None:
    empty: dict[str, Any] = dict.fromkeys(("latency", "profile", "verdict", "operators", "compile", "accuracy", "memory"))
    error = {
        "fault": "FAULT_USER",
        "reason": "PROGRAM_CRASHED",
        "message": "The program was killed.",
        "remedy": "Look at the log.",
    }
    text = _text(_document(state="FAILED", error=error, **empty))
    assert text.splitlines()[0].endswith("FAILED")
    assert "PROGRAM_CRASHED The program was killed. Look at the log." in text


def test_pipes_get_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(render.report(_document(), width=120))
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


def test_pipes_get_sentences_and_tables_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sentence = "It was killed. " * 30
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": sentence.strip()}
    output.show(render.report(_document(state="FAILED", error=error), width=output.PIPE_WIDTH))
    output.show_table(("ID", "WHY"), [("1", sentence.strip())], shrink=("WHY",))
    assert capsys.readouterr().out.count(sentence.strip()) == 2


def test_kernels_that_nobody_could_measure_are_one_line() -> None:
    kernels = [_row(i, "KERNEL", f"Add (ND) #{i}", 0.001, None, parent=0, resolution_ns=1000.0) for i in (1, 2, 3)]
    delegate = _row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True)
    text = _text(_document(operators=[delegate, *kernels, _row(4, "REST", "REST", 0.797, 727_000, parent=0)]))
    assert text.count("kernels below the 1 µs resolution") == 1
    assert "Add (ND)" not in text and "more," not in text


def test_the_module_of_a_sequential_is_called_one() -> None:
    rows = [
        _row(0, "OPERATOR", "aten.mean.dim", 0.5, 330_000, module="0"),
        _row(1, "OPERATOR", "aten.add", 0.5, 1e5, module="l.0"),
    ]
    text = _text(_document(operators=rows))
    assert "module 0" in text and "module l.0" not in text


def test_tables_shorten_only_what_they_may(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.show_table(("ID", "WHAT"), [("0123456789abcdef", "a long text that does not fit in here")], shrink=("WHAT",))
    assert "0123456789abcdef" in (said := capsys.readouterr().out)
    assert "…" in said and max(map(len, said.splitlines())) <= 40


def _cell(state: CellState, **more: Any) -> Cell:
    given: dict[str, Any] = {"threads": 4, "device": None, "waiting_for": "", "error": None, "attempts": 0, **more}
    return Cell("c1", 0, "resnet8", "xnnpack_fp32", "forward", state=state, **given)


def _now() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC)


def test_lines_come_as_phases_end() -> None:
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.status("Submitting.")
        display.status("Submitting.")
        display.cells([_cell(CellState.QUEUED)])
        display.event(CellChanged(1, _now(), _cell(CellState.COMPILING), JobState.RUNNING))
        display.event(Progress(_now(), "c1", "SERVER", "QUANTIZE", None, None, None, ""))
        display.event(Progress(_now(), "c1", "SERVER", "QUANTIZE", 1234.0, None, None, ""))
        display.event(CellChanged(2, _now(), _cell(CellState.COMPILING), JobState.RUNNING))
    what = "resnet8 · xnnpack_fp32 · 4 threads"
    assert lines == ["Submitting.", f"{what}: COMPILING", f"{what}: QUANTIZE 1.23 s (SERVER)"]


def test_a_failed_cell_says_why_on_stderr_however_it_is_shown() -> None:
    failed = _cell(CellState.FAILED, error=error_of(Fault.USER, "PROGRAM_CRASHED", "It was killed.", "Look at the log."))
    event = CellChanged(1, _now(), failed, JobState.FAILED)
    lines: list[str] = []
    PlainDisplay(lines.append).event(event)
    assert lines == ["resnet8 · xnnpack_fp32 · 4 threads: FAILED: It was killed. Look at the log."]
    live = LiveDisplay()
    live.event(event)
    assert live._failures() == ["etfarm: It was killed. Look at the log."]


def test_the_live_table_shows_what_a_cell_does() -> None:
    display = LiveDisplay()
    display.cells([_cell(CellState.RUNNING)])
    display.event(Progress(_now(), "c1", "pi5-a", "TIMED", None, 50, 100, ""))
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(display)
    assert "running" in capture.get() and "TIMED 50 % (pi5-a)" in capture.get()
    assert "0 of 1 cell done" in capture.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_live_table_shortens_names_and_says_once_what_they_share(width: int) -> None:
    display = LiveDisplay()
    recipes = ("a_recipe_with_quite_a_long_name:and=arguments", "another_recipe_with_a_long_name:and=arguments")
    cells = [replace(_cell(CellState.WAITING_FOR_DEVICE), id=name, index=i, recipe=name) for i, name in enumerate(recipes)]
    display.cells(cells)
    display.event(
        Progress(_now(), recipes[0], "", "", None, None, None, "every device that matches is busy with other jobs " * 2)
    )
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(display)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0] == "resnet8 · 4 threads"
    assert len(lines) == 4 and max(map(len, lines)) <= width
    assert all("waiting for device" in line and line.endswith("0.0 s") for line in lines[1:3])


def test_a_job_is_called_by_its_models_and_recipes() -> None:
    cells = tuple(replace(_cell(CellState.QUEUED), model=model, recipe=recipe) for model in "ab" for recipe in ("x", None))
    assert jobs._what(JobInfo("j", "", {}, "me", JobState.QUEUED, _now(), None, cells)) == "a, b · x"
