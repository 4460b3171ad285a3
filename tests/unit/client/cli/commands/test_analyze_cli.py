"""`report analyze`: its last line says what became of the reports, and why of some there is nothing to work out."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.cli.commands.report.main import worked_out


def report_of(cached: bool | None = False, state: str = "SUCCEEDED", version: str = "1.2.0") -> dict[str, Any]:
    """Return a report document's state and analysis; without an analysis if `cached` is None."""
    analysis = None if cached is None else {"version": version, "cached": cached, "key": "k", "at": "2025-01-02T03:04:05Z"}
    return {"state": state, "analysis": analysis}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report_of()], "1 of 1 report analyzed again  etfarm 1.2.0"),
        ([report_of(), report_of(cached=True)], "1 of 2 reports analyzed again, 1 known already  etfarm 1.2.0"),
        ([report_of(), report_of(version="1.3.0")], "2 of 2 reports analyzed again  etfarm 1.2.0, 1.3.0"),
        ([report_of(None)], "0 of 1 report analyzed again, 1 only compiled, so nothing ran on a device"),
        (
            [report_of(), report_of(None, "FAILED"), report_of(None, "CANCELLED")],
            "1 of 3 reports analyzed again, 2 not measured to the end, so there is nothing to analyze  etfarm 1.2.0",
        ),
    ],
)
def test_what_became_of_reports_is_counted_and_what_has_no_analysis_is_explained(
    reports: list[dict[str, Any]], expected: str
) -> None:
    assert worked_out(reports) == expected
