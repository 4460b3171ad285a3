"""Report files that somebody edited or another tool wrote: each is shown, or refused in one sentence, and never a traceback."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from etfarm.wire import report as projection
from tests.support.documents import document, numerics, report
from tests.support.mutations import mutated, read_everywhere

PAIRED = {"base_cell": "c1", "ratio": 0.5, "ratio_ci95": [0.49, 0.51], "rounds": 24, "process_pairs": 8, "ratios": [0.5, 0.5]}
ERROR = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It was killed.", "metadata": {"a": "b"}}

SEEDS = [
    document(report(**numerics()), report(id="r2", cell="c2", recipe="portable", interleaved=PAIRED)),
    document(report(state="FAILED", error=ERROR, operators=[], latency=None), error=report(error=ERROR)["error"]),
]


@pytest.mark.slow(reason="shows hundreds of mutated documents")
@pytest.mark.parametrize("created", SEEDS, ids=["measured", "failed"])
def test_a_document_with_one_value_exchanged_is_shown_or_refused(created: dict[str, Any]) -> None:
    good = projection.loads(json.dumps(created))
    assert read_everywhere(json.dumps(created), good) is None
    refused = shown = 0
    for text, what in mutated(created, seed=20261121, number=400):
        try:
            sentence = read_everywhere(text, good)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        refused, shown = refused + (sentence is not None), shown + (sentence is None)
    assert refused > 100 and shown > 50


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("reports", 0, "memory", "planned_bytes"), [None], r"planned_bytes\[0\] is null, not a whole number"),
        (("reports", 0, "latency", "p50_ci95_ns"), [1, None], r"p50_ci95_ns\[1\] is null, not a number"),
        (("reports", 0, "latency", "p50_ci95_ns"), [1], "p50_ci95_ns is not a lower and an upper bound"),
        (("reports", 0, "operators", 1, "op_types"), [None], r"op_types\[0\] is null, not a text"),
        (("reports", 0, "device"), {}, r"reports\[0\].device has no id"),
        (("reports", 0, "model"), {}, r"reports\[0\].model has no name"),
        (("reports", 0, "model", "name"), "\ud800", "surrogates not allowed"),
        (("reports", 0, "compile", "stages", 0, "methods"), {"f": "x"}, r"methods.f is \"x\", not a number"),
        (("reports", 0), {}, r"reports\[0\] has no id"),
        (("error",), {"message": 3}, "error.message is 3, not a text"),
        (("job",), {}, "job has no id"),
        (("job", "labels"), {"a": 1}, "job.labels.a is 1, not a text"),
        (("job", "submitted_at"), 5, "job.submitted_at is 5, not a text"),
    ],
)
def test_what_the_contract_does_not_have_is_named(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    created = copy.deepcopy(SEEDS[0])
    inside: Any = created
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(projection.BadDocument, match=expected):
        projection.loads(json.dumps(created))


def test_missing_labels_are_absent() -> None:
    created = copy.deepcopy(SEEDS[0])
    created["job"]["labels"] = None
    result = projection.loads(json.dumps(created))
    assert result["job"]["labels"] == {}
    assert read_everywhere(json.dumps(created), result) is None


def test_an_empty_interval_is_read_as_unknown() -> None:
    created = copy.deepcopy(SEEDS[0])
    created["reports"][0]["operators"][0]["mean_ci95_ns"] = []
    result = projection.loads(json.dumps(created))
    assert result["reports"][0]["operators"][0]["mean_ci95_ns"] is None
    assert read_everywhere(json.dumps(created), result) is None
