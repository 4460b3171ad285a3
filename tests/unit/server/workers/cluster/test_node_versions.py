"""What a node must share with the server, and the sentence that names a difference."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.workers.cluster import versions
from etfarm.server.workers.cluster.versions import describe, describe_python, find_difference

MODULE = Path(versions.__file__).read_text()


def test_a_description_has_the_installed_versions() -> None:
    described = json.loads(describe())
    assert described["torch"] == version("torch")
    assert described["Python"] == "3.11"
    assert find_difference(described, described) == ""


def test_a_difference_names_both_versions() -> None:
    server = {"torch": "2.13.0", "executorch": "1.5.1"}
    assert (
        find_difference({"torch": "2.12.0", "executorch": "1.5.1"}, server) == "It has torch 2.12.0, and the server has 2.13.0."
    )
    assert find_difference({"torch": ""}, {"torch": "2.13.0"}) == "It has torch (not installed), and the server has 2.13.0."
    assert "executorch" in find_difference({}, server)
    another = find_difference({"torch": ""}, {"torch": "2.13.0"}, "/opt/bin/python")
    assert another == "Its /opt/bin/python has torch (not installed), and the server has 2.13.0."


def test_another_python_describes_itself() -> None:
    assert json.loads(describe_python(sys.executable, MODULE)) == json.loads(describe())


def script(folder: Path, text: str, mode: int = 0o755) -> str:
    path = folder / "python"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("#!/bin/sh\necho 3.11\n", 0o755, "does not work as Python: exit code 0, it printed no versions. Create"),
        ("#!/bin/sh\necho no module site >&2; exit 1\n", 0o755, "does not work as Python: exit code 1, no module site. Create"),
        ("#!/bin/sh\nexec sleep 60\n", 0o755, "does not work as Python: it did not end within 0.5 s. Create"),
        ("#!/absent/python\n", 0o755, "does not work as Python: [Errno 2] No such file or directory"),
        ("#!/bin/sh\n", 0o644, "that it can execute. Create"),
    ],
    ids=["prints something else", "fails", "hangs", "without its interpreter", "not executable"],
)
def test_what_does_not_work_as_python_is_a_problem_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mode: int, problem: str
) -> None:
    monkeypatch.setattr(versions, "PYTHON_S", 0.5 if "sleep" in text else 30.0)
    described: dict[str, Any] = json.loads(describe_python(script(tmp_path, text, mode), MODULE))
    sentence = find_difference(described, {"torch": "2.13.0"})
    assert problem in sentence
    assert sentence.endswith("change --compile-python.")
