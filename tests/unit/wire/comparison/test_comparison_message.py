"""The comparison as a message: what a farm sends, and the document that users keep, which must not change by a byte."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings

from etfarm.v1 import comparison_pb2
from etfarm.wire import comparison
from etfarm.wire.comparison import Gate, Side
from etfarm.wire.errors import error_for
from etfarm.wire.messages import fill, from_scalar, to_scalar
from etfarm.wire.report import dumps
from tests.support.comparison_examples import EXAMPLES
from tests.support.comparisons import report, reports, timed

ADDED: dict[str, dict[str, Any]] = {
    "latency": {"same_program": False, "base_spread": None, "candidate_spread": None},
    "operators": {"matched_by": None},
    "errors": {"samples": None, "samples_digest": None},
    "report": {"cores": None, "inputs": None, "inputs_from_job": None, "warmup": None, "timed_ns": None, "runs": None},
}
"""The keys that were added since version 0.1.0, by part, as a document without them is read."""

JOB = {
    "id": "4f1c2d3e5a6b7c8d", "name": None, "labels": {}, "state": "SUCCEEDED", "submitted_at": "2025-01-02T03:04:05Z",
    "finished_at": None, "server_version": "0.1.0",
}  # fmt: skip


def sent(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document that a client writes after the comparison went over the wire."""
    data = fill(comparison_pb2.Comparison(), document).SerializeToString()
    return comparison.document(comparison_pb2.Comparison.FromString(data))


@pytest.mark.parametrize("name", EXAMPLES)
def test_documents_of_each_kind_are_the_same_bytes_after_the_wire(name: str) -> None:
    document = deepcopy(EXAMPLES[name])
    for pair in document["pairs"]:
        for side, part in (("latency", "latency"), ("operators", "operators"), ("base", "report"), ("candidate", "report")):
            if pair[side] is not None:
                pair[side] = {**pair[side], **{key: pair[side].get(key, value) for key, value in ADDED[part].items()}}
        for output in pair["accuracy"]:
            for side, errors in ((side, output[side]) for side in ("base", "candidate") if output[side]):
                output[side] = {**errors, **{key: errors.get(key, value) for key, value in ADDED["errors"].items()}}
        pair.setdefault("generation", None)
    for entry in document["unpaired"]:
        entry["report"] = {**entry["report"], **ADDED["report"]}
    assert dumps(sent(document)) == dumps(document)


@given(reports("b"), reports("k"))
@settings(max_examples=60, deadline=None)
def test_any_comparison_of_a_farm_is_the_same_bytes_after_the_wire(base: dict[str, Any], candidate: dict[str, Any]) -> None:
    compared = comparison.compare(Side([base], JOB), Side([candidate], JOB))
    received = comparison_pb2.Comparison.FromString(compared.SerializeToString())
    assert dumps(comparison.document(received)) == dumps(comparison.document(compared))
    assert dumps(sent(comparison.document(compared))) == dumps(comparison.document(compared))


def test_every_field_of_the_message_stands_in_a_document() -> None:
    used: set[str] = set()

    def note(message: Any) -> None:
        for field, value in message.ListFields():
            used.add(field.full_name)
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            items = value.values() if is_map else value if field.is_repeated else [value]
            for item in items:
                if hasattr(item, "ListFields"):
                    note(item)

    file = Side([timed("b", 1000.0)], file="base.json"), Side([timed("k", 2000.0)], file="candidate.json")
    gates = Gate.parse(["3%", "top1=1%"]), Gate.parse(["3%"], strict=True, accept_invalid=True)
    gated = [comparison.document(comparison.compare(*file), gate) for gate in gates]
    failed = comparison.failed(error_for("USAGE", "It is wrong.", "Right it.", stage="TIMED", option="--x"))
    for document in (*EXAMPLES.values(), *gated, failed):
        note(fill(comparison_pb2.Comparison(), document))
    messages = comparison_pb2.DESCRIPTOR.message_types_by_name
    declared = {
        field.full_name
        for name, message in messages.items()
        if name not in ("CompareRequest", "CompareResponse")
        for field in message.fields
    }
    assert sorted(declared - used) == []


def test_a_key_and_a_word_of_another_version_are_left_out() -> None:
    known = fill(comparison_pb2.LatencyChange(), {"speed": 1, "outcome": "sideways", "method": "paired", "ratio": 2.0})
    assert known == comparison_pb2.LatencyChange(method=comparison_pb2.RATIO_METHOD_PAIRED, ratio=2.0)


def test_a_sum_beyond_64_bits_is_null_and_loses_nothing_else() -> None:
    huge = report("k", memory={"peak_rss_bytes": 1, "planned_bytes": [2**62, 2**62, 2**62]})
    (pair,) = comparison.document(comparison.compare(Side([report("b")], JOB), Side([huge], JOB)))["pairs"]
    assert pair["memory"]["planned_bytes"]["candidate"] is None and pair["memory"]["planned_bytes"]["base"] == 150
    assert pair["memory"]["peak_rss_bytes"]["candidate"] == 1


@pytest.mark.parametrize("value", [True, False, 0, -1, 2**63 - 1, 0.0, -2.5, "", "text", None])
def test_a_scalar_keeps_its_type(value: Any) -> None:
    back = from_scalar(to_scalar(value))
    assert (type(back), back) == (type(value), value)
