"""The committed patterns of XNNPACK's passes are those that ExecuTorch exports, and give the same programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("executorch")

from etfarm.server.compile.lower import xnnpack_patterns

ROOT = Path(__file__).parents[5]


@pytest.mark.slow(reason="a process exports the patterns, and lowers a network twice")
def test_committed_patterns_are_executorchs_and_lower_to_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.patterns"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    committed = json.loads(xnnpack_patterns.FILE.read_text())
    assert outcome["exported"] == committed, "run server/generate_patterns.py"
    assert outcome["installed"]
    before, after = outcome["programs"]
    assert before == after
    assert outcome["same_composites"] and outcome["new_composites"] == ["etfarm_patterns.twice.default"]


def test_patterns_of_another_executorch_are_not_installed(tmp_path: Path) -> None:
    known = json.loads(xnnpack_patterns.FILE.read_text())
    known["versions"]["executorch"] = "1.4.0"
    (tmp_path / "old.json").write_text(json.dumps(known))
    assert not xnnpack_patterns.install(tmp_path / "old.json")


def test_a_built_graph_is_described_as_it_was() -> None:
    for patterns in ("bilinear_2d", "sdpa"):
        for known in json.loads(xnnpack_patterns.FILE.read_text())[patterns]:
            assert (
                json.loads(json.dumps(xnnpack_patterns.describe(xnnpack_patterns.build(known["nodes"]).graph))) == known["nodes"]
            )
