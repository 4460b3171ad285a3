"""The numeric gap and the accuracy as people read them, from documents of etfarm.report/1."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.formats import markdown
from tests.support.documents import completed
from tests.support.rendering import render_text


def _row(op: str, reference: str, snr_db: float | None, line: int, **more: Any) -> dict[str, Any]:
    values = {"dtype": "int8", "shape": [1, 8], "min": -0.5, "max": 1.25}
    return {
        "ops": ["quantized_decomposed.dequantize_per_tensor.default", f"aten.{op}.default"], "reference": reference,
        "max_abs_error": 0.4, "source": {"file": "net.py", "line": line, "code": f"x = self.{op}(x)"}, "debug_handles": [line],
        "module": f"blocks.{line - 10}",
        "expected": values, "actual": values, **({"snr_db": snr_db} if snr_db is not None else {}), **more,
    }  # fmt: skip


def _document(rows: list[dict[str, Any]], *, timed: bool = False, **more: Any) -> dict[str, Any]:
    message = {
        "cell": "c1", "state": "SUCCEEDED", "model": {"name": "net"}, "numeric_gap": rows,
        "numerics": {"is_timed_program": timed, "threshold_db": 20.0}, **more,
    }  # fmt: skip
    return completed(message)


SNRS = {
    "conv": (58.0, 40.0), "add": (57.0, 39.0), "pool": (56.0, 38.0), "norm": (5.8, 5.7), "mean": (9.0, 8.0), "gelu": (9.5, 9.0),
    "view": (19.0, 18.0), "linear": (20.0, 19.0),
}  # fmt: skip
ROWS = [
    row
    for line, (op, (quantized, eager)) in enumerate(SNRS.items(), 10)
    for row in (_row(op, "QUANTIZED", quantized, line, first_bad=op == "norm"), _row(op, "EAGER", eager, line))
]


def test_the_first_bad_operator_comes_first_with_its_line_and_its_code() -> None:
    lines = render_text(_document(ROWS), width=140).splitlines()
    (at,) = [index for index, line in enumerate(lines) if "first bad operator" in line]
    assert lines[at].strip() == (
        "numerics  first bad operator: norm in blocks.3, 5.8 dB against the quantized program, 20 dB more than rounding explains"
    )
    assert lines[at + 1].strip() == "net.py:13  x = self.norm(x)"


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (0, "none of 8 values could be judged: the warnings say why"),
        (5, "none of 5 is further off than rounding explains, against the quantized program; 5 of 8 values judged"),
        (8, "no bad operator: none of 8 is further off than rounding explains, against the quantized program"),
    ],
)
def test_no_operator_is_called_right_that_was_not_judged(judged: int, expected: str) -> None:
    rows = [{**row, "first_bad": False} for row in ROWS]
    created = _document(rows)
    created["numerics"]["judged"] = judged
    text = render_text(created, width=160)
    assert expected in text and ("no bad operator" in text) == bool(judged)
    assert ("values judged" in text) == (judged == 5)
    comment = markdown.write({"schema": "etfarm.report/1", "job": None, "reports": [created], "error": None}).decode()
    assert ("none is bad" in comment, "of them judged" in comment) == (judged > 0, judged < 8)


def test_the_worst_are_shown_with_both_references_and_the_rest_is_counted() -> None:
    text = render_text(_document(ROWS), job="j1")
    table = [line.split() for line in text.splitlines() if "self." in line and "dB" in line]
    assert [row[0] for row in table] == ["6", "8", "10", "12", "14"], "the numbers of their rows in the report"
    assert table[0][1:5] == ["5.8", "dB", "5.7", "dB"] and "norm" in table[0] and "-0.5" in table[0]
    assert "and 3 more with a higher SNR: etfarm report show j1 --top 0" in text
    everything = render_text(_document(ROWS), top=0)
    assert "58.0 dB" in everything and "more with a higher SNR" not in everything


def test_a_correct_program_is_reported_as_correct() -> None:
    rows = [_row("conv", "EAGER", 140.0, 3), _row("relu", "EAGER", 300.0, 4)]
    text = render_text(_document(rows))
    assert "no bad operator: none of 2 is further off than rounding explains, against the program before quantization" in text
    assert "exact" in text and "vs eager" in text and "vs quantized" not in text


@pytest.mark.parametrize("timed", [False, True])
def test_values_of_another_program_than_the_timed_one_are_said_to_be_that(timed: bool) -> None:
    assert ("not from the timed one" in render_text(_document(ROWS, timed=timed))) is not timed


def test_all_lines_of_a_bad_group_are_reported() -> None:
    lines = [{"file": "net.py", "line": at, "code": f"line {at}"} for at in (7, 9)]
    text = render_text(_document([_row("conv", "EAGER", 1.0, 7, first_bad=True, sources=lines)]))
    assert "net.py:7  line 7" in text and "net.py:9  line 9" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [{**row, "source": {"file": "a/long/path/to/some/models/net.py", "line": 1, "code": "y" * 90}} for row in ROWS]
    text = render_text(_document(rows), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_nan_on_the_device_alone_is_reported() -> None:
    values = {"dtype": "float32", "shape": [4], "min": 0.0, "max": 1.0}
    row = _row("conv", "EAGER", None, 3, expected=values, actual={**values, "nan_count": 2}, first_bad=True)
    text = render_text(_document([row]))
    assert "no SNR" in text and "2 NaN" in text


def test_a_job_without_numerics_shows_none() -> None:
    assert "numerics" not in render_text(_document([]))


def test_accuracy_says_how_often_the_best_class_is_the_same_and_where_nan_came_from() -> None:
    output = {"output": "scores", "reference": "quantized program", "sqnr_db": 41.5, "max_abs_error": 0.01}
    scores = render_text(_document([], accuracy=[{**output, "top1_agreement": 0.75, "nan_count": 0}]))
    assert "scores: SQNR 41.5 dB, max abs error 0.01, top-1 agrees 75 %, against the quantized program" in scores
    nan = render_text(
        _document([], accuracy=[{"output": "scores", "reference": "program", "nan_count": 3, "reference_nan_count": 0}])
    )
    assert "scores: not comparable, against the program, 3 NaNs where it has none" in nan


def test_accuracy_over_several_samples_has_their_range() -> None:
    output = {"output": "y", "reference": "program", "samples": 8, "sqnr_db": 16.1, "sqnr_db_min": 15.4, "sqnr_db_max": 20.1}
    assert "y: SQNR 16.1 dB, 15.4 dB to 20.1 dB in 8 samples, against the program" in render_text(
        _document([], accuracy=[output])
    )
    assert "y: equal to the program in 8 samples" in render_text(_document([], accuracy=[{**output, "equal": True}]))
    assert "in 1 " not in render_text(_document([], accuracy=[{**output, "samples": 1}]))


def test_accuracy_of_integers_says_how_many_are_equal() -> None:
    output = {"output": "label", "reference": "quantized program", "equal": False, "max_abs_error": 3.0, "equal_share": 0.75}
    text = render_text(_document([], accuracy=[output]))
    assert "label: 75.0 % of the integers equal, max abs error 3, against the quantized program" in text
