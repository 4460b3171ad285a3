"""Reading back what `--json` wrote: whole, of an older version too, and clear about anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etfarm.wire import report
from tests.support.documents import completed
from tests.support.report_keys import documented_keys


def written() -> dict[str, Any]:
    message = {
        "id": "r1", "state": "SUCCEEDED", "model": {"name": "net"}, "latency": {"samples_ns": [1, 2], "p50_ns": 1.5},
        "operators": [{"index": 0, "name": "aten::add.out", "source": {"file": "net.py", "line": 3, "code": "x + y"}}],
        "compile": {
            "delegation": {"forward": {"subgraphs": 1, "operators": [{"op": "aten_add_tensor"}]}},
            "stages": [{"stage": "TO_EXECUTORCH", "methods": {"forward": 2.0}}],
        },
        "error": {"reason": "PROGRAM_CRASHED", "message": "It crashed."},
    }  # fmt: skip
    return report.document(None, (), None) | {"reports": [completed(message)]}


def test_what_was_written_is_read_back() -> None:
    document = written()
    assert report.loads(report.dumps(document)) == document


def test_keys_that_an_older_version_did_not_have_are_there_as_of_nothing() -> None:
    older = json.loads(report.dumps(written()))
    (one,) = older["reports"]
    for parent, key in (
        (one, "numerics"), (one, "runs"), (one, "run_spread"), (one["latency"], "drift"), (one["operators"][0], "sources"),
        (one["operators"][0], "times_ns"),
        (one["compile"], "modules"), (one["compile"]["delegation"]["forward"]["operators"][0], "places"),
        (one["compile"]["stages"][0], "methods"), (one["error"], "remedy"),
    ):  # fmt: skip
        del parent[key]
    (result,) = report.loads(json.dumps(older))["reports"]
    assert set(result) == set(documented_keys())
    assert result["numerics"] is result["latency"]["drift"] is result["operators"][0]["times_ns"] is None
    assert result["runs"] == [] and result["run_spread"] is None
    assert result["compile"]["modules"] is result["error"]["remedy"] is None
    assert result["operators"][0]["sources"] == result["compile"]["delegation"]["forward"]["operators"][0]["places"] == []
    assert result["compile"]["stages"][0]["methods"] == {}


def test_keys_of_a_newer_version_stay() -> None:
    newer = json.loads(report.dumps(written()))
    newer["reports"][0]["energy"] = {"joules": 3}
    assert report.loads(json.dumps(newer))["reports"][0]["energy"] == {"joules": 3}


@pytest.mark.remedy("BAD_REPORT_DOCUMENT")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff\xfe\x00", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"schema": "etfarm.report/1", "reports": []' + "]" * 9, "not JSON"),
        ('{"schema": "etfarm.report/1", "reports": [{"latency": {"p50_ns": NaN}}]}', "NaN is not a JSON number"),
        ("[]", "names no schema"),
        ('{"schema": "etfarm.comparison/1"}', "'etfarm.comparison/1', not etfarm.report/1"),
        ('{"schema": "etfarm.report/1"}', "no list of reports"),
        ('{"schema": "etfarm.report/1", "reports": [7]}', r"reports\[0\] is not an object"),
        ('{"schema": "etfarm.report/1", "reports": [{"operators": {}}]}', r"reports\[0\].operators is not a list"),
        ('{"schema": "etfarm.report/1", "reports": [{"operators": [3]}]}', r"operators\[0\] is not an object"),
        ('{"schema": "etfarm.report/1", "reports": [{"latency": []}]}', r"reports\[0\].latency is not an object"),
        ('{"schema": "etfarm.report/1", "reports": [{"latency": 3}]}', r"reports\[0\].latency is not an object"),
        ('{"schema": "etfarm.report/1", "reports": [{"latency": {"p50_ns": "3"}}]}', 'latency.p50_ns is "3", not a number'),
        ('{"schema": "etfarm.report/1", "reports": [{"latency": {"p50_ns": 1e999}}]}', "p50_ns is Infinity, not a number"),
        ('{"schema": "etfarm.report/1", "reports": [{"memory": {"planned_bytes": 3}}]}', "memory.planned_bytes is not a list"),
        ('{"schema": "etfarm.report/1", "reports": [{"memory": {"peak_rss_bytes": true}}]}', "is true, not a whole number"),
        ('{"schema": "etfarm.report/1", "reports": [{"recipe": 3}]}', r"reports\[0\].recipe is 3, not a text"),
        ('{"schema": "etfarm.report/1", "reports": [], "job": 3}', "Its job or its error is not an object"),
        ('{"schema": "etfarm.report/1", "reports": [{"compile": {"delegation": {"f": 1}}}]}', r"delegation.f is not an object"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str | bytes, expected: str) -> None:
    with pytest.raises(report.BadDocument, match=expected) as caught:
        report.loads(text)
    assert "--json" in caught.value.remedy
    assert report.loads(report.dumps(written()))


@pytest.mark.parametrize(("key", "first_beyond"), [("threads", 1 << 31), ("memory", 1 << 63)])
def test_a_whole_number_fits_into_its_field(key: str, first_beyond: int) -> None:
    for value in (first_beyond - 1, 1 - first_beyond, first_beyond, -first_beyond):
        (one,) = (document := written())["reports"]
        one[key] = {"peak_rss_bytes": value} if key == "memory" else value
        if abs(value) < first_beyond:
            assert report.loads(json.dumps(document))
        else:
            with pytest.raises(report.BadDocument, match=f"is {value}, not a whole number"):
                report.loads(json.dumps(document))
