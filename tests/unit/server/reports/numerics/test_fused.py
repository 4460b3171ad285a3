"""Whether a program is wrong only when fused, by the outputs of the timed program and of the one with a delegate per operator."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from etfarm.server.reports.numerics import fused
from etfarm.v1 import report_pb2
from etfarm.wire import tensors

EXPECTED = np.linspace(1, 2, 50, dtype=np.float32)
NAN = np.full(50, math.nan, np.float32)
CLASSES = np.arange(50)


@pytest.mark.parametrize(
    ("expected", "timed", "separate", "quantized", "timed_db", "wrong"),
    [
        ([EXPECTED], [EXPECTED * 1.2], [EXPECTED * 1.01], True, 14.0, True),
        ([EXPECTED], [EXPECTED * 1.2], [EXPECTED * 1.2], True, 14.0, False),
        ([EXPECTED], [EXPECTED * 1.03], [EXPECTED], True, 30.5, False),
        ([EXPECTED], [EXPECTED * 1.03], [EXPECTED], False, 30.5, True),
        # A good output does not hide one with NaN.
        ([EXPECTED, EXPECTED], [EXPECTED, NAN], [EXPECTED, EXPECTED], True, None, True),
        ([CLASSES], [CLASSES // 20], [CLASSES], True, None, True),
        ([CLASSES], [CLASSES], [CLASSES], True, None, False),
    ],
)
def test_a_program_is_wrong_only_when_fused_if_its_operators_alone_are_right(
    expected: list[np.ndarray],
    timed: list[np.ndarray],
    separate: list[np.ndarray],
    quantized: bool,
    timed_db: float | None,
    wrong: bool,
    tmp_path: Path,
) -> None:
    files = [tmp_path / "timed.ett", tmp_path / "separate.ett"]
    for file, outputs in zip(files, (timed, separate), strict=True):
        file.write_bytes(tensors.encode([tensors.from_array(str(at), output) for at, output in enumerate(outputs)]))
    report = report_pb2.Report()
    fused.fill_numerics(report, [tensors.from_array("", each) for each in expected], *files, quantized=quantized)
    assert report.numerics.wrong_only_when_fused is wrong
    level = report.numerics.timed_sqnr_db if report.numerics.HasField("timed_sqnr_db") else None
    assert level == (timed_db if timed_db is None else pytest.approx(timed_db, abs=0.1))
