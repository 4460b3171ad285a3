"""The series of a report, whose lengths depend on the number of iterations: files in the store beside the report.

Both files are int64, little-endian, nanoseconds. Report.samples has one value for each timed iteration. Report.trace_times is a
matrix in row-major order with one column for each traced iteration: row 0 has the times of the method, row 1 + i those of
operators[i]; -1 throughout marks a row without times.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from etfarm.v1 import report_pb2
from etfarm.wire.errors import FarmError

Number = TypeVar("Number", int, float)

VALUE_BYTES: Final = 8
ABSENT: Final = -1
"""Marks every value of a row without times."""


class BadSeries(FarmError):
    """A file of a series that does not fit its report."""

    reason = "BAD_SERIES"


@dataclass(frozen=True)
class Series:
    """The series of one report. None and missing rows stand for values that were not measured or are no longer stored."""

    samples_ns: Sequence[int] = ()
    """Latency of each timed iteration, in the order measured."""
    trace_times_ns: Sequence[Sequence[int] | None] = ()
    """Times of the method, then of each operator, by traced iteration."""


def trace_times_bytes(report: report_pb2.Report) -> int:
    """Return the size that a report's trace_times must have, in bytes."""
    return VALUE_BYTES * (1 + len(report.operators)) * report.profile.iterations


def encode_samples(samples_ns: Sequence[int]) -> bytes:
    """Return the bytes of Report.samples."""
    return little_endian(array("q", samples_ns)).tobytes()


def decode_samples(data: bytes) -> list[int]:
    """Return the values of Report.samples.

    Raises:
        BadSeries: the file has no whole number of values.
    """
    return _decode(data, "samples").tolist()


def encode_trace_times(rows: Sequence[Sequence[int]], columns: int) -> bytes:
    """Return the bytes of Report.trace_times; a row of another length than `columns` is marked as absent."""
    values = array("q")
    for row in rows:
        values.extend(row if len(row) == columns else [ABSENT] * columns)
    return little_endian(values).tobytes()


def decode_trace_times(data: bytes, rows: int) -> list[list[int] | None]:
    """Return the rows of Report.trace_times, of which there are `rows`; a row without times is None.

    Raises:
        BadSeries: the file does not divide into so many rows.
    """
    values = _decode(data, "trace times")
    columns, rest = divmod(len(values), rows)
    if rest:
        raise BadSeries(f"The trace times must have {rows} rows of equal length, got {len(values)} values.")
    parts = [values[start * columns : (start + 1) * columns].tolist() for start in range(rows)]
    return [None if not part or part[0] == ABSENT else part for part in parts]


def add_series(document: dict[str, Any], series: Series) -> None:
    """Add the values to a REPORT of etfarm.report/1, in place."""
    if document["latency"] is not None:
        document["latency"]["samples_ns"] = list(series.samples_ns)
    holders = [document["profile"], *(document["operators"] or ())]
    for holder, times_ns in zip(holders, series.trace_times_ns, strict=False):
        if holder is not None:
            holder["times_ns"] = None if times_ns is None else list(times_ns)


def _decode(data: bytes, what: str) -> array[int]:
    if len(data) % VALUE_BYTES:
        raise BadSeries(f"The {what} must be whole values of {VALUE_BYTES} bytes, got {len(data)} bytes.")
    return little_endian(array("q", data))


def little_endian(values: array[Number]) -> array[Number]:
    """Convert values in place between the machine's byte order and little-endian, and return them."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
