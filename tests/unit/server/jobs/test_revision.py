"""Reports analyzed again: what cannot be any more stays as it was, part by part, and a page's token is checked."""

from __future__ import annotations

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
    """Return a report of two outputs and two operators."""
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


def test_rows_against_the_quantized_program_stay_with_their_warning() -> None:
    for references, kept in (((EAGER,), ["FAR_FROM_QUANTIZED_GRAPH"]), ((QUANTIZED,), [])):
        before, created = worked_out(EAGER, QUANTIZED), worked_out(*references)
        before.compile.warnings.add(code="FAR_FROM_QUANTIZED_GRAPH", message="far")
        keep(before, created)
        assert [warning.code for warning in created.compile.warnings] == kept


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


def test_runs_whose_samples_are_gone_stay_with_their_spread_and_warnings() -> None:
    before, created = worked_out(EAGER), worked_out(EAGER)
    for p50_ns in (5, 6, 9):
        before.runs.add(p50_ns=p50_ns)
    before.run_spread.runs = 3
    before.latency.p50_ns = 6.5
    before.compile.warnings.add(code="RUNS_LEFT_OUT", message="of then")
    keep(before, created)
    assert (list(created.runs), created.run_spread, created.latency) == (list(before.runs), before.run_spread, before.latency)
    assert [warning.code for warning in created.compile.warnings] == ["RUNS_LEFT_OUT"]


def test_a_trace_keeps_its_verdict_when_the_samples_it_was_compared_with_are_gone() -> None:
    before, created = worked_out(EAGER), worked_out(EAGER)
    before.latency.p50_ns = 1500
    before.profile.traced_ratio, before.profile.event_cost_ns = 2.0, 30
    before.profile.verdict.status = report_pb2.VERDICT_STATUS_INVALID
    before.profile.verdict.reasons.add(code="TRACING_SLOW")
    created.profile.verdict.status = report_pb2.VERDICT_STATUS_VALID
    created.profile.iterations = 10
    keep(before, created)
    assert (created.profile.traced_ratio, created.profile.event_cost_ns, created.profile.iterations) == (2.0, 30, 10)
    assert created.profile.verdict == before.profile.verdict


def test_what_is_all_there_is_new() -> None:
    before, created = worked_out(EAGER), worked_out(EAGER, QUANTIZED)
    before.compile.warnings.add(code="ANALYSIS_OLD", message="of then")
    created.profile.p50_ns = 4000
    created.numerics.first_bad = 0
    expected = Report.FromString(created.SerializeToString())
    keep(before, created)
    assert created == expected


@pytest.mark.parametrize("token", ["999999999999999999.abcd", "x.y", "1", "-1.abcd"])
async def test_an_unknown_page_token_is_refused(token: str, database: Database) -> None:
    with pytest.raises(BadPageToken) as refused:
        await History(database, lambda scope: ()).page(Wanted("net"), 10, token, EVERYTHING)
    assert refused.value.reason == "BAD_PAGE_TOKEN" and refused.value.remedy
