"""The rows of a numeric gap, grouped by their value.

They are taken from the JSON of etfarm.report/1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etfarm.wire.sqnr import EXACT_DB, decibels

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """One value with its comparisons."""

    place: int
    """Index of its first row."""
    rows: Mapping[str, Json]
    """Rows by reference."""

    @property
    def judged(self) -> Json:
        """The row that the first bad operator is searched by: against the quantized program if there is one."""
        return self.rows.get("QUANTIZED") or next(iter(self.rows.values()))

    @property
    def level_db(self) -> float:
        """Sort key in dB: a value without an SNR is exact, or as bad as possible."""
        row = self.judged
        if row["snr_db"] is not None:
            return float(row["snr_db"])
        nans = [side[key] for side in (row["expected"], row["actual"]) if side for key in ("nan_count", "infinite_count")]
        return -EXACT_DB if any(nans) or row["max_abs_error"] else EXACT_DB


def operators(rows: Sequence[Json]) -> Iterator[Operator]:
    """Yield the values of REPORT["numeric_gap"] in order.

    Rows of one value are adjacent, with the one against the quantized program first.
    """
    place = 0
    while place < len(rows):
        by_reference = {rows[place]["reference"]: rows[place]}
        if place + 1 < len(rows) and _is_of_the_same(rows[place], rows[place + 1]):
            by_reference["EAGER"] = rows[place + 1]
        yield Operator(place, by_reference)
        place += len(by_reference)


def judged(operators: Sequence[Operator], numerics: Json) -> int:
    """Return the number of values with a judged operator; all values for older reports, which lack the number."""
    count = numerics.get("judged")
    return len(operators) if count is None else int(count)


def describe_fused(numerics: Json) -> str:
    """Return how far the timed program and the one with one delegate per operator are off; empty if fusing changes nothing."""
    if not numerics.get("wrong_only_when_fused"):
        return ""
    timed, separate = (
        f"an SQNR of {decibels(numerics[key])}" if numerics[key] is not None else "no SQNR"
        for key in ("timed_sqnr_db", "sqnr_db")
    )
    return f"the outputs of the timed program have {timed}, and {separate} with one delegate per operator"


def _is_of_the_same(row: Json, following: Json) -> bool:
    references = (row["reference"], following["reference"])
    same = all(row[key] == following[key] for key in ("debug_handles", "backend"))
    shape, following_shape = ((candidate["actual"] or {}).get("shape") for candidate in (row, following))
    return references == ("QUANTIZED", "EAGER") and same and shape == following_shape
