"""Oddities of inputs are in the report, and the program runs on them all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.server.reports.analyze import describe_nan
from etfarm.wire import tensors
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Value
from tests.support.analyses import analyze_request, analyzed


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_nan_of_every_dtype_that_has_it_is_counted(dtype: str) -> None:
    kind = tensors.dtype_of(dtype)
    has_nan = "float" in dtype
    array = np.array([[1, np.nan if has_nan else 0, 1]] * 2).astype(kind)
    text = describe_nan([tensors.from_array("x", array)])
    assert text.startswith("The inputs have NaN: 2 of 6 elements of 'x'.") is has_nan
    assert bool(text) is has_nan


def test_scalars_and_tensors_without_elements_are_looked_at_too() -> None:
    values: list[Value] = [
        tensors.from_array("empty", np.zeros((0, 3), np.float32)), tensors.from_array("point", np.float32(np.nan).reshape(())),
        Scalar("none", None), Scalar("two", 2), Scalar("flag", True), Scalar("", float("nan")),
    ]  # fmt: skip
    assert "NaN: 1 of 1 element of 'point', 1 of 1 element of 5." in describe_nan(values)
    assert describe_nan([value for value in values if value.name not in ("point", "")]) == ""


def test_a_report_warns_of_nan_among_the_inputs(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.write_bytes(tensors.encode([tensors.from_array("x", np.array([1, np.nan], np.float32))]))
    events: list[dict[str, Any]] = []
    report = analyzed(analyze_request(inputs=inputs), tmp_path, events)
    (warning,) = report.compile.warnings
    assert warning.code == "INPUTS_HAVE_NAN" and "1 of 2 elements of 'x'" in warning.message
    assert {event["stage"] for event in events} == {"INPUTS"}
