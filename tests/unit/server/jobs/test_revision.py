"""Reports analyzed again: what cannot be any more stays as it was, part by part, and a page's token is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs.records.history import History, Wanted
from etfarm.server.jobs.revision import keep
from etfarm.server.state.engine import Database
from etfarm.server.state.paging import BadPageToken
from etfarm.v1 import report_pb2
from etfarm.v1.report_pb2 import Report

EAGER, QUANTIZED = report_pb2.REFERENCE_EAGER, report_pb2.REFERENCE_QUANTIZED


def worked_out(*references: report_pb2.Reference.ValueType, places: bool = True, gap: bool = True) -> Report:
    """A report of two outputs and two operators."""
    report = Report(id="r", cell="c")
    for reference in references:
        for output in ("a", "b"):
            report.accuracy.add(output=output, reference=reference, sqnr_db=20)
    report.profile.p50_ns = 3000
    report.trace_times.digest = f"times of operators with{'' if places else 'out'} places"
    for index in range(2):
        report.operators.add(index=index, name="add", module="layer" if places else None)
    report.numerics.program.digest = "p"  # always there with --numerics
    if gap:
        report.numerics.threshold_db = 10
        report.numerics.first_bad = 1
        report.numeric_gap.add(ops=["add"])
        report.numeric_gap.add(ops=["mul"], first_bad=True)
    return report


def test_accuracy_against_a_reference_that_is_gone_stays() -> None:
    before, created = worked_out(EAGER, QUANTIZED), worked_out(QUANTIZED)
    before.compile.warnings.add(code="ANALYSIS_OLD", message="of then")
    for row in created.accuracy:
        row.sqnr_db = 30
    keep(before, created)
    assert [(row.output, row.reference, row.sqnr_db) for row in created.accuracy] == [
        ("a", EAGER, 20), ("b", EAGER, 20), ("a", QUANTIZED, 30), ("b", QUANTIZED, 30),
    ]  # fmt: skip
    assert [warning.code for warning in created.compile.warnings] == ["ANALYSIS_OLD"]


def test_a_numeric_gap_that_stays_keeps_its_first_bad_operator() -> None:
    before, created = worked_out(EAGER), worked_out(EAGER, gap=False)
    keep(before, created)
    assert (created.numerics, list(created.numeric_gap)) == (before.numerics, list(before.numeric_gap))


def test_operators_that_lost_their_places_are_those_of_then() -> None:
    before, created = worked_out(EAGER), worked_out(EAGER, places=False)
    created.profile.p50_ns = 4000
    keep(before, created)
    assert (created.profile, list(created.operators)) == (before.profile, list(before.operators))
    assert created.trace_times == before.trace_times


def test_what_is_all_there_is_new() -> None:
    before, created = worked_out(EAGER), worked_out(EAGER, QUANTIZED)
    before.compile.warnings.add(code="ANALYSIS_OLD", message="of then")
    created.profile.p50_ns = 4000
    created.numerics.first_bad = 0
    expected = Report.FromString(created.SerializeToString())
    keep(before, created)
    assert created == expected


@pytest.mark.parametrize("token", ["999999999999999999.abcd", "x.y", "1", "-1.abcd"])
async def test_a_page_token_of_nobody_is_refused(token: str, tmp_path: Path) -> None:
    database = Database(tmp_path / "farm.sqlite")
    await database.open()
    try:
        with pytest.raises(BadPageToken) as refused:
            await History(database, lambda scope: ()).page(Wanted("net"), 10, token, EVERYTHING)
    finally:
        database.close()
    assert refused.value.reason == "BAD_PAGE_TOKEN" and refused.value.remedy
