"""JUnit XML of reports and comparisons."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.client.formats import junit
from tests.support.comparison_examples import EXAMPLES
from tests.support.documents import HOSTILE, document, report

COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def suite_of(text: bytes) -> ElementTree.Element:
    """Parse the XML and check it by the rules of Apache Ant's schema (JUnit.xsd by Windy Road); return the suite."""
    root = ElementTree.fromstring(text)
    assert (root.tag, root.attrib, [child.tag for child in root]) == ("testsuites", {}, ["testsuite"])
    (suite,) = root
    assert set(suite.attrib) == {
        "name", "package", "id", "hostname", "timestamp", "tests", "failures", "errors", "skipped", "time",
    }  # fmt: skip
    assert len(suite.attrib["timestamp"]) == len("2026-01-02T03:04:05") and suite.attrib["name"]
    tags = [child.tag for child in suite]
    cases = suite.findall("testcase")
    assert tags == ["properties", *["testcase"] * len(cases), "system-out", "system-err"]
    assert all(set(each.attrib) == {"name", "value"} for each in suite[0])
    for case in cases:
        assert set(case.attrib) == {"name", "classname", "time"} and float(case.attrib["time"]) >= 0
        assert len(case) <= 1 and all(each.tag in COUNTS.values() and len(each) == 0 for each in case)
        assert all(set(each.attrib) == ({"type", "message"} if each.tag != "skipped" else set()) for each in case)
    assert int(suite.attrib["tests"]) == len(cases)
    for attribute, tag in COUNTS.items():
        assert int(suite.attrib[attribute]) == sum(case.find(tag) is not None for case in cases)
    return suite


def results(text: bytes) -> dict[str, str]:
    """Return each case's outcome by its name."""
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in suite_of(text).findall("testcase")}


def failed(**changes: Any) -> dict[str, Any]:
    error = {"reason": "PROGRAM_CRASHED", "message": "It crashed.", "remedy": "Correct it.", "fault": "USER", "stage": "TIMED"}
    return report(id="r2", cell="c2", recipe="portable", state="FAILED", error=error, **changes)


def test_each_cell_is_a_case() -> None:
    cancelled = report(id="r3", cell="c3", recipe="xnnpack_int8", state="CANCELLED")
    suite = suite_of(junit.write(document(report(), failed(), cancelled)))
    outcomes = [case[0].tag if len(case) else "passed" for case in suite.findall("testcase")]
    assert outcomes == ["passed", "error", "skipped"]
    assert [case.attrib["classname"] for case in suite.findall("testcase")] == [
        "etfarm.resnet8.xnnpack_fp32", "etfarm.resnet8.portable", "etfarm.resnet8.xnnpack_int8",
    ]  # fmt: skip
    error = suite.find("testcase/error")
    assert error is not None and error.attrib == {"type": "PROGRAM_CRASHED", "message": "It crashed."}
    assert error.text == "It crashed.\nCorrect it."


def test_each_requirement_is_a_case_for_each_report() -> None:
    written = document(report(), failed())
    reason = {"report": "r1", "requirement": "--max-p50", "outcome": "worse", "message": "p50 is above --max-p50 1 ms."}
    written["requirements"] = {"valid": True, "min_sqnr_db": None, "max_p50_ns": 1e6, "passed": False, "reasons": [reason]}
    gates = {name.partition(":")[0]: outcome for name, outcome in results(junit.write(written)).items() if name[0] == "-"}
    assert gates == {"--require-valid": "passed", "--max-p50": "failure"}
    reason["outcome"] = "inconclusive"
    assert "error" in results(junit.write(written)).values()


def test_a_command_that_failed_is_a_case() -> None:
    written = document(error={"reason": "SERVER_UNREACHABLE", "message": "No answer.", "remedy": "", "fault": "FARM"})
    assert results(junit.write(written)) == {"command": "error"}


def gate_of(*reasons: tuple[str | None, str], outcome: str) -> dict[str, Any]:
    """Return a GATE with limits of latency and size, and these reasons by metric and code."""
    limits = [{"metric": "latency", "limit": 3.0, "unit": "%"}, {"metric": "size", "limit": 1.0, "unit": "%"}]
    reasons = [{"pair": 0, "metric": metric, "code": code, "message": f"because of {code}"} for metric, code in reasons]
    return {"limits": limits, "passed": not reasons, "outcome": outcome, "reasons": reasons, "notes": []}


@pytest.mark.parametrize(
    ("gate", "latency", "size"),
    [
        (gate_of(outcome="passed"), "passed", "passed"),
        (gate_of(("latency", "WORSE"), outcome="failed"), "failure", "passed"),
        (gate_of(("size", "WORSE"), ("latency", "TOO_FEW"), outcome="failed"), "error", "failure"),
        (gate_of(("latency", "NO_SPREAD"), outcome="inconclusive"), "error", "passed"),
        (gate_of((None, "MISSING"), outcome="failed"), "failure", "failure"),
    ],
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_pair_and_gate_of_a_comparison_is_a_case(name: str, gate: dict[str, Any], latency: str, size: str) -> None:
    compared = {**EXAMPLES[name], "gate": gate}
    text = junit.write(compared)
    known = results(text)
    assert (known["--gate latency=3%"], known["--gate size=1%"]) == (latency, size)
    cells = [case for case in suite_of(text).findall("testcase") if case.attrib["classname"] != "etfarm.gates"]
    assert len(cells) == len(compared["pairs"]) + len(compared["unpaired"])


@given(st.text())
def test_no_name_ends_its_attribute(name: str) -> None:
    hostile = report(model={"name": name, "digest": "0" * 64}, state="FAILED")
    hostile["error"] = {
        "reason": "X",
        "message": f"{name}{HOSTILE}]]>",
        "remedy": name,
        "fault": "USER",
        "stage": "",
        "metadata": {},
    }
    assert list(results(junit.write(document(hostile))).values()) == ["error"]
