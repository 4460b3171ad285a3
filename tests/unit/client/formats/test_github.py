"""Annotations and the step summary of GitHub Actions."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etfarm.client.formats import github
from tests.support.comparison_examples import EXAMPLES
from tests.support.documents import document, report

COMMAND = re.compile(r"::(error|warning) ((?:[a-z]+=[^,:\n\r]*)(?:,[a-z]+=[^,:\n\r]*)*)::([^\n\r]*)")


def parse(line: str) -> tuple[str, dict[str, str], str]:
    """Take a workflow command apart, as the runner does."""
    match = COMMAND.fullmatch(line)
    assert match is not None, line
    properties = dict(item.split("=", 1) for item in match[2].split(","))
    for code, letter in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        properties = {name: value.replace(code, letter) for name, value in properties.items()}
    return match[1], properties, match[3].replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def failed(message: str = "It crashed.", **metadata: str) -> dict[str, Any]:
    error = {
        "reason": "PROGRAM_CRASHED", "message": message, "remedy": "Correct it.", "fault": "USER", "stage": "TIMED",
        "metadata": metadata,
    }  # fmt: skip
    return report(id="r2", state="FAILED", error=error)


def test_an_error_is_annotated_at_the_models_line_relative_to_the_checkout() -> None:
    lines = github.workflow_commands(document(failed(source="/home/runner/repo/models/net.py:31")), "/home/runner/repo")
    ((kind, properties, message),) = map(parse, lines)
    assert kind == "error" and message == "It crashed. Correct it."
    assert (properties["file"], properties["line"]) == ("models/net.py", "31")
    assert properties["title"].endswith("PROGRAM_CRASHED") and "resnet8" in properties["title"]


def test_an_error_without_a_line_names_no_file() -> None:
    ((_, properties, _),) = map(parse, github.workflow_commands(document(failed())))
    assert set(properties) == {"title"}


def test_a_failed_requirement_is_annotated_at_the_slowest_line() -> None:
    written = document(report())
    reason = {"report": "r1", "requirement": "--max-p50", "outcome": "worse", "message": "p50 is above --max-p50 1 ms."}
    written["requirements"] = {"valid": False, "min_sqnr_db": None, "max_p50_ns": 1e6, "passed": False, "reasons": [reason]}
    ((kind, properties, message),) = map(parse, github.workflow_commands(written))
    assert (kind, properties["file"], properties["line"]) == ("error", "models/resnet.py", "31") and "above" in message
    reason["outcome"] = "inconclusive"
    assert parse(github.workflow_commands(written)[0])[0] == "warning"


def test_an_invalid_measurement_is_a_warning() -> None:
    reasons = [{"code": "DRIFT", "message": "The median drifted.", "measured": 0.5, "threshold": 0.2}]
    written = document(report(verdict={"status": "INVALID", "reasons": reasons}))
    assert [parse(line)[0] for line in github.workflow_commands(written)] == ["warning"]


def test_a_gate_that_fails_is_an_error_for_each_reason() -> None:
    reasons = [{"pair": 0, "metric": "latency", "code": "WORSE", "message": text} for text in ("5 % slower", "6 % slower: x, y")]
    limits = [{"metric": "latency", "limit": 3.0, "unit": "%"}]
    for outcome, kind in (("failed", "error"), ("inconclusive", "warning")):
        gate = {"limits": limits, "passed": False, "outcome": outcome, "reasons": reasons, "notes": []}
        lines = [parse(line) for line in github.workflow_commands({**EXAMPLES["spread"], "gate": gate})]
        assert [(each, message) for each, _, message in lines] == [(kind, "5 % slower"), (kind, "6 % slower: x, y")]


def test_annotations_beyond_githubs_limit_are_counted() -> None:
    lines = github.workflow_commands(document(*[failed() for _ in range(25)]))
    assert len(lines) == github.MOST and lines[-1].endswith("16 more are in the report.")


@given(st.text(), st.text())
def test_no_message_ends_its_command_or_begins_another(message: str, name: str) -> None:
    for line in github.workflow_commands(document(failed(f"{message}\n::error::x", source=f"{name}:7"))):
        assert parse(line)[2].endswith("Correct it.")


def test_a_long_summary_is_cut_at_a_line() -> None:
    text = github.summary(document(*[failed("m" * 30_000) for _ in range(60)]))
    assert len(text) <= github.MAX_SUMMARY and text.endswith(b"too long for GitHub.\n") and text.startswith(b"|")
    assert github.summary(document(report())).startswith(b"|")
