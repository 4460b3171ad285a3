"""Quantized models as users report them, through a real farm: what is measured, what is said about it, and what helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from tests.support.farm import FarmProcess, etfarm

pytestmark = [pytest.mark.slow(reason="a farm compiles two programs and one for each operator"), pytest.mark.numeric]

MODELS = """
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from etfarm.client.export import ModelSource


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(self.layer(x) * 20)


def twice():
    x = torch.randn(1, 3, 16)
    return ModelSource.of(Twice().eval(), (x,), calibration_inputs=[(x * (1 + k / 8),) for k in range(8)])


def step(carry, x):
    total = carry * 0.5 + x
    return total, total.clone()


class Controlled(nn.Module):
    def forward(self, carry, xs):
        total, rows = scan(step, carry, xs)
        positive = total.sum() > 0
        first = torch.cond(positive, lambda v: v * 2, lambda v: v - 1, [rows])
        return torch.cond(positive, lambda v: v + 10, lambda v: v * 3, [first])


def controlled():
    return Controlled().eval(), (torch.zeros(3), torch.linspace(-1, 1, 12).reshape(4, 3))
"""
STATIC = "xnnpack_pt2e_int8_static_per_channel"
QUICK = ("--warmup", "1", "--iterations", "3", "--min-time", "0", "--threads", "1")


def bench(farm: FarmProcess, folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run bench; return the reports and the printed text."""
    (folder / "models.py").write_text(MODELS)
    done = etfarm("bench", *arguments, *QUICK, "--json", "r.json", "--server", farm.address, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text(), parse_constant=pytest.fail)["reports"], done.stdout


def codes(report: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in report["compile"]["warnings"]]


def test_a_layer_with_two_uses_is_wrong_only_when_fused(farm: FarmProcess, tmp_path: Path) -> None:
    (report,), printed = bench(farm, tmp_path, "models.py:twice", "--recipe", STATIC, "--numerics")
    # That of the device, and not that of the server as well.
    (warning,) = [each["message"] for each in report["compile"]["warnings"] if each["code"] == "FAR_FROM_QUANTIZED_GRAPH"]
    assert "copy_shared_layers = true" in warning and not warning.startswith("forward on the server")
    assert report["numerics"]["wrong_only_when_fused"] and "wrong only when fused" in printed
    assert report["numerics"]["first_bad"] is None and report["numerics"]["sqnr_db"] > 25 > report["numerics"]["timed_sqnr_db"]
    for row in report["accuracy"]:
        assert row["samples"] == 8  # the first calibration sample is the example input
        assert row["sqnr_db_min"] <= row["sqnr_db"] <= row["sqnr_db_max"]


def test_operators_of_branches_and_loops_have_lines(farm: FarmProcess, tmp_path: Path) -> None:
    (report,), _ = bench(farm, tmp_path, "models.py:controlled", "--recipe", "portable")
    assert not [code for code in codes(report) if "ETRECORD" in code]
    lines = {row["source"]["code"].strip() for row in report["operators"] if row["source"]}
    for code in ("lambda v: v * 2", "scan(step, carry, xs)"):
        assert any(code in line for line in lines), lines
    assert all(row["source"] for row in report["operators"] if row["kind"] == "OPERATOR" and "mul" in row["name"])
