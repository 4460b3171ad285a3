"""Tables and sentences in a terminal, and in a pipe."""

from __future__ import annotations

import pytest

from etfarm.client.cli.terminal import output
from etfarm.client.cli.views import render
from tests.support.rendering import report_document, report_row


def test_pipes_get_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(render.report(report_document(), width=120))
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


def test_pipes_get_sentences_and_tables_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sentence = "It was killed. " * 30
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": sentence.strip()}
    output.show(render.report(report_document(state="FAILED", error=error), width=output.PIPE_WIDTH))
    output.show_table(("ID", "WHY"), [("1", sentence.strip())], shrink=("WHY",))
    assert capsys.readouterr().out.count(sentence.strip()) == 2


def test_pipes_get_operators_with_whole_names_modules_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    source = {"file": "torchvision/models/squeezenet.py", "line": 32, "code": "[self.expand1x1_activation(self.expand1x1(x)), x]"}
    name, module = "Convolution (NHWC, F32) IGEMM " + "#1" * 40, "features.12.expand3x3" * 4
    rows = [report_row(0, "OPERATOR", name, 0.5, 1e6, module=module, source=source)]
    output.show(render.report(report_document(operators=rows), width=output.open_console().width))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Convolution" in line]
    assert all(text in line for text in (name, module, "squeezenet.py:32", source["code"])) and "…" not in line


def test_tables_shorten_only_what_they_may(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.show_table(("ID", "WHAT"), [("0123456789abcdef", "a long text that does not fit in here")], shrink=("WHAT",))
    assert "0123456789abcdef" in (text := capsys.readouterr().out)
    assert "…" in text and max(map(len, text.splitlines())) <= 40


def test_a_sentence_that_wraps_is_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    sentence = "int8 for the Ethos-U55 NPU, compiled by Vela; needs executorch[ethos-u]: ethosu.vela is not installed"
    rows = [("arm_ethos_u55_int8", "a-board-with-a-long-name, another", sentence), ("portable", "pi", "fp32")]
    output.show_table(("RECIPE", "RUNS ON", "WHAT"), rows, shrink=("WHAT", "RUNS ON"), wrap=("WHAT",))
    text = capsys.readouterr().out
    head, *lines = text.splitlines()
    assert max(map(len, lines)) <= 60 and "arm_ethos_u55_int8 " in lines[0]
    assert " ".join(line[head.index("WHAT") :].strip() for line in lines) == f"{sentence} fp32"


def test_a_narrow_table_leaves_columns_out_before_it_cuts_an_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ("0123456789abcdef", "a long name of a job", "SUCCEEDED", "33.6 µs to 32.9 ms, 1 of 6 INVALID", "ann", "1:02")
    heads = ("JOB", "NAME", "STATE", "P50", "OWNER", "TOOK")
    for width, left_out in ((100, set()), (82, {"TOOK"}), (74, {"TOOK", "OWNER"})):
        monkeypatch.setenv("COLUMNS", str(width))
        output.show_table(heads, [row], shrink=("NAME",), spare=("TOOK", "OWNER"))
        head, line = capsys.readouterr().out.splitlines()
        assert set(heads) - set(head.split()) == left_out
        assert "0123456789abcdef" in line and "1 of 6 INVALID" in line
