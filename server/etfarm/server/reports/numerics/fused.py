"""Programs whose outputs are wrong although no operator is: backends compute operators of a delegate together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from etfarm.server.graphs.quantized_outputs import Level, level_of
from etfarm.server.reports.numerics import accuracy
from etfarm.v1 import report_pb2
from etfarm.wire import rounding, tensors
from etfarm.wire.tensors import Value


def fill_numerics(report: report_pb2.Report, expected: Sequence[Value], timed: Path, separate: Path, *, quantized: bool) -> None:
    """Compare the outputs of the timed program and of the numerics pass's program with what operators are judged by.

    Args:
        expected: outputs of the program on the host.
        timed, separate: tensor files of outputs on the same inputs.
        quantized: whether that is a quantized program.
    """
    timed_levels, separate_levels = _levels(expected, timed), _levels(expected, separate)
    for name, levels in (("timed_sqnr_db", timed_levels), ("sqnr_db", separate_levels)):
        ratios = [level.db for level in levels if level is not None and level.equal_share is None]
        if ratios and math.isfinite(min(ratios)):
            setattr(report.numerics, name, min(ratios))
    pairs = [
        (together, alone, accuracy.dtype_of(value) or "")
        for value, together, alone in zip(expected, timed_levels, separate_levels, strict=True)
        if together is not None and alone is not None
    ]
    if pairs:
        is_wrong = any(_is_far(each, dtype, quantized) for each, _, dtype in pairs)
        is_wrong_alone = any(_is_far(each, dtype, quantized) for _, each, dtype in pairs)
        is_bad = report.numerics.HasField("first_bad")
        report.numerics.wrong_only_when_fused = is_wrong and not is_wrong_alone and not is_bad


def _levels(expected: Sequence[Value], outputs: Path) -> list[Level | None]:
    return [level_of([pair]) for pair in accuracy.pair(list(expected), tensors.decode(outputs.read_bytes()))]


def _is_far(level: Level, dtype: str, quantized: bool) -> bool:
    if quantized or level.equal_share is not None:
        return level.is_far
    return level.db < rounding.least_sqnr_db(dtype)
