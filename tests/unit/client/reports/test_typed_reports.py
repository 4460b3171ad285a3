"""The documents as dataclasses: the same JSON again, the contract's keys, typed values, tables and HTML."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etfarm.client
from etfarm.client import reports
from etfarm.client.reports import (
    Actor,
    CellState,
    Comparison,
    JobResult,
    Latency,
    OperatorKind,
    Operators,
    Report,
    Samples,
    VerdictStatus,
)
from etfarm.client.reports.json_object import OpenEnum
from etfarm.v1 import report_pb2
from etfarm.wire import comparison
from etfarm.wire import report as projection
from etfarm.wire.comparison import Gate, Side
from etfarm.wire.report import BadDocument
from tests.support import documents
from tests.support.documents import HOSTILE
from tests.support.messages import TEXTS, filled
from tests.support.refusals import refuses

REQUIRED = {"id": "r", "cell": "c", "state": "SUCCEEDED"}


def _report(random: Random, share: float) -> dict[str, Any]:
    return {**projection.report_json(filled(report_pb2.Report(), random, share)), **REQUIRED}


def _document(*each: dict[str, Any]) -> dict[str, Any]:
    return projection.loads(json.dumps(documents.document(*each)))


RECORDED = [
    _document(documents.report(**documents.numerics()), documents.report(id="r2", cell="c2", recipe="portable")),
    _document(documents.report(state="FAILED", operators=[], latency=None)),
    _document(),
]


@pytest.mark.parametrize("document", RECORDED, ids=["measured", "failed", "empty"])
def test_a_document_is_the_same_again(document: dict[str, Any]) -> None:
    result = JobResult.from_dict(document)
    assert json.dumps(result.to_dict()) == json.dumps(document), "the order of keys included"
    assert JobResult.loads(json.dumps(document)) == result
    assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result


@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.6, 1.0]))
@settings(max_examples=60, deadline=None)
def test_any_report_is_the_same_again(seed: int, share: float) -> None:
    document = _report(Random(seed), share)
    report = Report.from_dict(document)
    assert json.dumps(report.to_dict()) == json.dumps(document)
    assert report.json() == dict(report) == document
    assert Report.from_dict(report.to_dict()).to_dict() == document


def _objects(value: Any, kind: str = "") -> Any:
    """Yield each object of a parsed document."""
    if isinstance(value, reports.JsonObject):
        yield value
        for field in dataclasses.fields(value):
            yield from _objects(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _objects(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _objects(item)


@pytest.mark.parametrize("name", ["generate_models.py", "generate_reports.py"])
def test_the_classes_are_what_would_be_generated(name: str) -> None:
    script = Path(__file__).resolve().parents[4] / "client" / name
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_classes_know_every_key_of_the_contract() -> None:
    parsed = list(_objects(Report.from_dict(_report(Random(1), 1.0))))
    assert {type(each).__name__ for each in parsed if each.newer_keys} == set()
    assert len({type(each) for each in parsed}) > 50


def test_each_word_of_the_contract_is_a_member_of_its_enum() -> None:
    unknown = set()
    for seed in range(20):
        for each in _objects(Report.from_dict(_report(Random(seed), 1.0))):
            words = [getattr(each, field.name) for field in dataclasses.fields(each)]
            unknown |= {str(word) for word in words if isinstance(word, OpenEnum) and word.name not in type(word).__members__}
    assert unknown <= set(TEXTS), "the values of fields that are texts in the contract"


def test_values_have_their_types() -> None:
    report = JobResult.from_dict(RECORDED[0]).reports[0]
    assert report.state is CellState.SUCCEEDED and report.state.is_terminal
    assert report.latency is not None and report.latency.p50_ns == 1_840_000.0 == report["latency"]["p50_ns"]
    assert report.verdict is not None and report.verdict.status is VerdictStatus.VALID
    assert report.timeline[0].actor is Actor.CLIENT
    assert report.operators is not None and report.operators[1].kind is OperatorKind.KERNEL
    assert str(report.operators[1].source) == "models/resnet.py:31"
    assert report.load is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.latency.p50_ns = 1.0  # type: ignore[misc]


def test_what_a_newer_farm_adds_is_kept() -> None:
    newer = copy.deepcopy(RECORDED[0])
    newer["reports"][0]["state"] = "PAUSED"
    newer["reports"][0]["latency"]["p95_ns"] = [7]
    report = JobResult.from_dict(newer).reports[0]
    assert report.state == "PAUSED" and isinstance(report.state, CellState) and not report.state.is_terminal
    assert report.latency is not None and report.latency["p95_ns"] == [7]
    assert report.to_dict() == newer["reports"][0]
    assert pickle.loads(pickle.dumps(report)) == report


def test_fields_that_an_older_farm_lacked_are_none() -> None:
    report = Report.from_dict({**REQUIRED, "latency": {"p50_ns": 5.0}})
    assert report.latency == Latency(p50_ns=5.0)
    assert (report.operators, report.timeline, report.memory) == (None, (), None)
    assert report.to_dict().keys() == documents.report().keys()


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("latency",), [], r"Report.latency must be an object, got \[\]"),
        (("latency", "p50_ns"), "5", "Report.latency.p50_ns must be a number, got '5'"),
        (("latency", "p50_ns"), True, "must be a number, got True"),
        (("latency", "samples_ns"), [1, 2.5], "must be a list of whole numbers"),
        (("latency", "samples_ns"), [2**64], "must be a list of whole numbers"),
        (("latency", "p50_ci95_ns"), [1.0], "must be a list of 2"),
        (("operators", 1, "op_types"), [None], r"Report.operators\[1\].op_types\[0\] must be text"),
        (("compile", "delegation", "forward", "subgraphs"), 0.5, "compile.delegation.forward.subgraphs must be a whole number"),
        (("id",), 5, "Report.id must be text, got 5"),
    ],
)
def test_a_value_of_another_type_is_named(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    changed = copy.deepcopy(RECORDED[0]["reports"][0])
    inside: Any = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(BadDocument, match=sentence):
        Report.from_dict(changed)


def test_samples_are_integers_of_eight_bytes() -> None:
    samples = Samples(range(1_000_000))
    assert len(samples) == 1_000_000 and samples[-1] == 999_999 and samples[1:3] == [1, 2]
    assert samples == range(1_000_000) and samples != range(999_999) and samples != "x"
    assert len(pickle.dumps(samples)) < 8_001_000
    assert repr(samples) == "Samples([0, 1, 2, 3, 4, 5, … 1,000,000 in all])" and repr(Samples()) == "Samples([])"
    assert hash(Samples([1, 2])) == hash(Samples([1, 2]))
    array = np.asarray(samples)
    assert array.dtype == np.int64 and array.sum() == sum(range(1_000_000)) and not array.flags.writeable
    assert np.shares_memory(array, np.asarray(samples)) and np.asarray(Samples()).shape == (0,)
    assert samples.to_numpy().max() == max(samples)


def test_comparisons_are_the_same_again() -> None:
    base, candidate = (copy.deepcopy(RECORDED[0]) for _ in range(2))
    candidate["reports"][0]["latency"].update(p50_ns=2_000_000.0, p50_ci95_ns=[1_990_000.0, 2_010_000.0])
    candidate["reports"][0]["compile"]["program"]["digest"] = "9" * 64
    for side in (base, candidate):
        spread = {"source": "REPEATS", "runs": 5, "relative_stddev": 0.01, "p50_ci95_ns": None}
        side["reports"][0]["run_spread"] = spread
    sides = Side(base["reports"], base["job"]), Side(candidate["reports"], candidate["job"])
    document = comparison.document(comparison.compare(*sides), Gate.parse(["3%"]))
    parsed = Comparison.from_dict(document)
    assert json.dumps(parsed.to_dict()) == json.dumps(document)
    assert not [each for each in _objects(parsed) if each.newer_keys]
    pair = parsed.pairs[0]
    assert pair.latency is not None and pair.latency.outcome is not None and pair.latency.outcome == "slower"
    assert not parsed.passed and parsed.gate is not None and parsed.gate.reasons[0].metric == "latency"
    failed = comparison.failed(BadDocument("x", "y"))
    assert Comparison.from_dict(failed).to_dict() == failed


def test_operators_and_samples_become_tables() -> None:
    result = JobResult.from_dict(RECORDED[0])
    report = result.reports[0]
    frame = result.to_pandas()
    assert report.operators is not None and len(frame) == 2 * len(report.operators) and set(frame["report"]) == {"r1", "r2"}
    own = report.operators.to_pandas()
    assert list(own["index"]) == [0, 1, 2, 3, 4, 5]
    assert own["p50_ns"].isna().tolist() == [False, False, True, False, False, False]
    assert own.loc[1, "debug_handles"] == [4, 5] and own.loc[1, "line"] == 31
    samples = report.to_pandas("samples")
    assert report.latency is not None
    assert samples["latency_ns"].tolist() == report.latency.samples_ns.tolist()
    series = report.latency.samples_ns.to_pandas()
    assert (series.name, series.index.name, series.dtype) == ("latency_ns", "iteration", np.int64)
    assert len(JobResult.from_dict(RECORDED[1]).to_pandas("samples")) == 0 == len(JobResult.from_dict(RECORDED[2]).to_pandas())


@pytest.mark.parametrize("document", [JobResult.from_dict(RECORDED[0]), JobResult.from_dict(RECORDED[0]).reports[0]])
def test_a_table_that_does_not_exist_is_refused(document: JobResult | Report) -> None:
    with pytest.raises(
        ValueError,
        match=r"^table must be 'operators' or 'samples' or 'generation' or 'tokens' or "
        r"'parts' or 'logits', got 'sample'\.$",
    ):
        document.to_pandas("sample")  # type: ignore[arg-type]


def test_without_pandas_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refuses("EXTRA_MISSING", match=r"pandas is not installed.* Run pip install 'etfarm\[pandas\]'"):
        Operators().to_pandas()


class _Elements(HTMLParser):
    """The elements and the text of a fragment."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        assert not attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_notebooks_show_tables_in_which_names_do_no_harm() -> None:
    hostile = json.loads(json.dumps(RECORDED[0]).replace("resnet8", json.dumps(HOSTILE)[1:-1]).replace("Add (ND)", "$x$<b>"))
    hostile["reports"][1].update(
        state="FAILED", error={"fault": "USER", "reason": "X", "message": HOSTILE, "remedy": None, "stage": None, "metadata": {}}
    )
    result = JobResult.from_dict(hostile)
    assert result.reports[0].operators is not None
    for shown in (result, result.reports[0], result.reports[0].operators):
        fragment = shown._repr_html_()
        elements = _Elements(fragment)
        assert set(elements.names) <= {"table", "thead", "tbody", "tr", "th", "td", "div", "ul", "li"}
        assert "$" not in fragment and ("1.84 ms" in elements.text or "$x$<b>" in elements.text)
    assert HOSTILE.replace("\n", " ") in _Elements(result._repr_html_()).text


def test_public_names_are_pinned() -> None:
    assert etfarm.client.__all__ == [
        "AsyncFarm", "AsyncJob", "AsyncLocalSession", "AsyncReservation", "AsyncSession", "AsyncTokenStream", "CellChanged",
        "Comparison", "DeviceError", "EtfarmError", "Farm", "FarmError", "Generate", "GeneratedTokens", "Job", "JobChanged",
        "JobResult", "LocalSession", "LogLine", "Loop", "ModelSource", "Outputs", "Progress", "Report", "Reservation", "Session",
        "TokenStream", "UserError",
    ]  # fmt: skip
    assert [getattr(etfarm.client, name).__name__ for name in etfarm.client.__all__] == etfarm.client.__all__
    with pytest.raises(AttributeError):
        etfarm.client.nothing  # noqa: B018
    assert reports.__all__ == sorted(reports.__all__)


def test_reports_need_no_library_until_it_is_used() -> None:
    code = "import sys, etfarm.client.reports; print(sorted({'grpc', 'numpy', 'pandas', 'google'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert done.stdout.strip() == "[]"
