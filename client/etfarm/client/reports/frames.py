"""Operators and samples as pandas objects. pandas is imported here only, and only when a function is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.errors import extra_missing
from etfarm.client.formats import tables

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

_DTYPES: Final = {
    tables.Kind.TEXT: "object", tables.Kind.INTEGER: "Int64", tables.Kind.NUMBER: "float64", tables.Kind.TRUTH: "boolean",
    tables.Kind.TEXTS: "object", tables.Kind.INTEGERS: "object",
}  # fmt: skip
"""The dtype of a column; missing values are <NA> or NaN."""


def operators_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row for each operator of REPORT.operators.

    Raises:
        EXTRA_MISSING: pandas is not installed.
    """
    nameless = {**dict.fromkeys(["id", "cell", "model", "recipe", "method", "device", "threads"])}
    document = {"job": None, "reports": [{**nameless, "operators": rows}]}
    return document_frame(document, "operators").drop(columns=list(tables.IDENTITY))


def samples_series(samples_ns: NDArray[np.int64]) -> pd.Series[int]:
    """Return the samples as int64 in nanoseconds, indexed by iteration.

    Raises:
        EXTRA_MISSING: pandas is not installed.
    """
    pandas = _pandas()
    index = pandas.RangeIndex(len(samples_ns), name="iteration")
    series: pd.Series[int] = pandas.Series(samples_ns, index=index, name="latency_ns")
    return series


def document_frame(document: Mapping[str, Any], what: str) -> pd.DataFrame:
    """Return the table of a document etfarm.report/1, as `etfarm.client.formats.tables` has it.

    Args:
        what: a name in `tables.WHAT`.

    Raises:
        ValueError: there is no such table.
        EXTRA_MISSING: pandas is not installed.
    """
    if what not in tables.WHAT:
        raise ValueError(f"table must be {' or '.join(map(repr, tables.WHAT))}, got {what!r}.")
    pandas = _pandas()
    if what == "samples":
        return _samples_frame(pandas, document)
    table = tables.table(document, what)
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    data = {
        name: pandas.Series(list(values), dtype=_DTYPES[kind])
        for (name, kind), values in zip(table.columns.items(), columns, strict=True)
    }
    frame: pd.DataFrame = pandas.DataFrame(data)
    return frame


def _samples_frame(pandas: ModuleType, document: Mapping[str, Any]) -> pd.DataFrame:
    """Return the table of samples column by column: row by row, a million samples take seconds."""
    frames = []
    for report in document["reports"]:
        samples_ns = report["latency"]["samples_ns"] if report["latency"] else ()
        values = zip(tables.IDENTITY.items(), tables.identity_of(document, report), strict=True)
        columns = {
            name: pandas.Series([value], dtype=_DTYPES[kind]).repeat(len(samples_ns)).array for (name, kind), value in values
        }
        numbers = pandas.Series(range(len(samples_ns)), dtype="int64").array
        latencies = pandas.Series(samples_ns, dtype="int64").array
        frames.append(pandas.DataFrame({**columns, "iteration": numbers, "latency_ns": latencies}))
    if not frames:
        frames.append(pandas.DataFrame(columns=[*tables.IDENTITY, "iteration", "latency_ns"]))
    frame: pd.DataFrame = pandas.concat(frames, ignore_index=True)
    return frame


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError:
        raise extra_missing("to_pandas", "pandas", "pandas") from None
    module: ModuleType = pandas
    return module
