"""Tests of the server's log: what its lines have of an error."""

from __future__ import annotations

import pytest
import structlog

from etfarm.server.operation import logs
from etfarm.wire.errors import FarmError, error_for


def logged(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line of a log that says that something has failed by an error."""
    logs.configure()
    try:
        raise error
    except type(error):
        structlog.get_logger().exception("it has failed")
    return capsys.readouterr().err


def test_an_error_with_a_reason_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    line = logged(error_for("FENCED", "This server no longer leads.", "Try again."), capsys)
    assert "error='FENCED: This server no longer leads. Try again.'" in line
    assert "exception=" not in line and "exc_info" not in line


@pytest.mark.parametrize("error", [FarmError("etfarm has a bug."), ValueError("42")], ids=["internal", "other"])
def test_the_traceback_of_what_must_be_debugged_stays(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    line = logged(error, capsys)
    assert "exception='Traceback" in line and str(error) in line


def test_an_error_that_is_passed_is_one_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    structlog.get_logger().error("it has failed", exc_info=error_for("FENCED", "This server no longer leads."))
    assert "error='FENCED: This server no longer leads.'" in capsys.readouterr().err
