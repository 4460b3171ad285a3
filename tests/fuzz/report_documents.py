"""Report files of others, read by the client: every format, the command line and a comparison."""

from __future__ import annotations

import json
from typing import Any

from etfarm.wire import report as projection
from etfarm.wire.errors import EtfarmError
from tests.support.documents import document, numerics, report
from tests.support.mutations import read_everywhere

RUNS = 80
TOKENS = (
    b"null",
    b"[]",
    b"{}",
    b"true",
    b'""',
    b'"\\ud800"',
    b"-1",
    b"1e308",
    b"0.0",
    b'"index": 1',
    b'"parent": 0',
    b'"parent": 4',
    b'"kind": "REST"',
    b'"kind": "DELEGATE"',
    b'"state": "FAILED"',
)


def _good() -> dict[str, Any]:
    return document(report(**numerics()), report(id="r2", cell="c2", recipe="portable"))


def seeds() -> list[bytes]:
    """Return documents with all that is measured, and with nothing."""
    failed = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It was killed."}
    created = [_good(), document(report(state="FAILED", error=failed, operators=[], latency=None)), document()]
    return [json.dumps(one).encode() for one in created]


def fuzz(data: bytes) -> None:
    """A document is refused in one sentence, or every format can say it."""
    try:
        projection.loads(data)
    except EtfarmError as error:
        assert str(error)
        return
    sentence = read_everywhere(data.decode(), _good())
    assert sentence is None or sentence
