"""bench --numerics through a real farm: which operator is right, by the user's lines, and a timed program that is not touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from tests.support.farm import FarmProcess
from tests.support.quick_jobs import QUICK_OPTIONS, bench

pytestmark = pytest.mark.slow(reason="a farm compiles two programs for each job")

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.out = nn.Linear(8, 4)

    def forward(self, image):
        x = torch.relu(self.conv(image))
        x = x.mean((2, 3))
        return self.out(x)


def net():
    torch.manual_seed(0)
    return Net().eval(), (torch.rand(1, 3, 16, 16),)
"""
LINES = ("x = torch.relu(self.conv(image))", "x = x.mean((2, 3))", "return self.out(x)")
STATIC = "xnnpack_pt2e_int8_static_per_channel"


def measure(farm: FarmProcess, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the only report of the net and the printed text."""
    (folder / "net.py").write_text(NET)
    document, printed = bench(farm, folder, "net.py:net", *arguments, *QUICK_OPTIONS)
    (report,) = document["reports"]
    return report, printed


def test_operators_are_compared_by_line_and_the_timed_program_is_unchanged(farm: FarmProcess, tmp_path: Path) -> None:
    plain, _ = measure(farm, tmp_path, "--recipe", STATIC)
    report, printed = measure(farm, tmp_path, "--recipe", STATIC, "--numerics")
    assert plain["numerics"] is None and plain["numeric_gap"] is None
    assert report["compile"]["program"] == plain["compile"]["program"] and report["compile"]["cached"]
    assert report["recipe_digest"] == plain["recipe_digest"]
    assert [row["name"] for row in report["operators"]] == [row["name"] for row in plain["operators"]]
    assert len(report["latency"]["samples_ns"]) == report["measurement"]["iterations"] >= 3
    phases = [(phase["actor"], phase["phase"]) for phase in report["timeline"]]
    assert phases.index(("DEVICE", "TRACED")) < phases.index(("DEVICE", "NUMERICS"))

    assert report["numerics"]["program"]["digest"] not in ("", report["compile"]["program"]["digest"])
    assert report["numerics"]["is_timed_program"] is False
    assert report["numerics"]["threshold_db"] > 0 and report["numerics"]["first_bad"] is None
    rows = report["numeric_gap"]
    assert {row["reference"] for row in rows} == {"QUANTIZED", "EAGER"}
    sources = [row["source"] for row in rows if row["source"]]
    assert all(NET.splitlines()[one["line"] - 1].strip() == one["code"] and one["file"].endswith("net.py") for one in sources)
    assert tuple(dict.fromkeys(one["code"] for one in sources)) == LINES
    assert all(row["snr_db"] > 15 for row in rows if row["reference"] == "QUANTIZED")
    assert not [warning for warning in report["compile"]["warnings"] if "NUMERICS" in warning["code"]]
    assert "no bad operator" in printed


def test_without_a_delegate_the_timed_program_itself_is_compared(farm: FarmProcess, tmp_path: Path) -> None:
    report, _ = measure(farm, tmp_path, "--recipe", "portable", "--numerics")
    assert report["numerics"]["is_timed_program"] is True
    assert report["numerics"]["program"] == report["compile"]["program"]
    assert {row["reference"] for row in report["numeric_gap"]} == {"EAGER"}
    assert all(row["backend"] is None and row["snr_db"] > 100 for row in report["numeric_gap"])
    assert next(op for row in report["numeric_gap"] for op in row["ops"]).startswith("aten.convolution")
