"""What a node must share with the server, and the sentence that names a difference."""

from __future__ import annotations

import json
from importlib.metadata import version

from etfarm.server.workers.cluster.versions import describe, find_difference


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
