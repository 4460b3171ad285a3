"""The program of a session, as it is prepared for a farm."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from etfarm.client.sessions import program
from etfarm.client.sessions.program import ServedModel
from etfarm.v1.job_pb2 import JobSpec


def test_the_check_of_a_factory_can_be_sent_to_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(program, "prepare", lambda *_, **options: seen.update(options))
    ServedModel("model.py:make").prepared(tmp_path, JobSpec(methods=["forward"]).methods)
    check = pickle.loads(pickle.dumps(seen["check"]))
    assert check.keywords == {"methods": ["forward"], "inputs": None}
