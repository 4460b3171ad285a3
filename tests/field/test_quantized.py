"""Quantized models as users report them, through a real farm: what is measured, what is said about it, and what helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from tests.support.farm import FarmProcess, etfarm

pytestmark = [pytest.mark.slow(reason="a farm compiles eight programs"), pytest.mark.numeric]

MODELS = """
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from etfarm.client.export import ModelSource


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


X = torch.linspace(-1, 1, 128).reshape(2, 64)


def int8():
    model = Net().eval()
    quantize_(model, Int8WeightOnlyConfig())
    return model, (X,)


def four_bits():
    def transform(method, module):
        config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
        quantize_(module, config)
        return module

    return ModelSource.of(Net().eval(), (X,), source_transforms=[transform])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(self.layer(x) * 20)


def twice():
    x = torch.randn(1, 3, 16)
    return ModelSource.of(Twice().eval(), (x,), calibration_inputs=[(x * (1 + k / 8),) for k in range(8)])


class Branches(nn.Module):
    def forward(self, x):
        positive = x.sum() > 0
        first = torch.cond(positive, lambda v: v * 2, lambda v: v - 1, [x])
        return torch.cond(positive, lambda v: v + 10, lambda v: v * 3, [first])


def branches():
    return Branches().eval(), (torch.ones(2, 3),)


def step(carry, x):
    total = carry * 0.5 + x
    return total, total.clone()


class Scanned(nn.Module):
    def forward(self, carry, xs):
        return scan(step, carry, xs)


def scanned():
    return Scanned().eval(), (torch.zeros(3), torch.linspace(-1, 1, 12).reshape(4, 3))
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


def test_quantized_weights_run_as_they_are(farm: FarmProcess, tmp_path: Path) -> None:
    (int8, four_bits), _ = bench(
        farm, tmp_path, "models.py:int8", "models.py:four_bits", "--recipe", "xnnpack_fp32", "--no-profile"
    )
    (row,) = int8["accuracy"]
    assert row["sqnr_db"] > 130 and row["samples"] == 1
    assert row["sqnr_db"] == row["sqnr_db_min"] == row["sqnr_db_max"]
    assert four_bits["accuracy"][0]["sqnr_db"] > 40


def test_a_layer_with_two_uses_is_named_with_what_helps(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "copied.toml").write_text(f'recipe = "{STATIC}"\ncopy_shared_layers = true\n')
    (plain,), printed = bench(farm, tmp_path, "models.py:twice", "--recipe", STATIC, "--numerics")
    (copied,), _ = bench(farm, tmp_path, "models.py:twice", "--recipe", "copied.toml", "--no-profile")
    assert "FAR_FROM_QUANTIZED_GRAPH" in codes(plain) and "FAR_FROM_QUANTIZED_GRAPH" not in codes(copied)
    assert plain["numerics"]["wrong_only_when_fused"] and "wrong only when fused" in printed
    assert plain["numerics"]["first_bad"] is None and plain["numerics"]["sqnr_db"] > 25 > plain["numerics"]["timed_sqnr_db"]
    quantized = next(row for row in copied["accuracy"] if row["reference"].startswith("quantized"))
    assert quantized["sqnr_db"] > 30
    for row in (*plain["accuracy"], *copied["accuracy"]):
        assert row["samples"] == 8  # the first calibration sample is the example input
        assert row["sqnr_db_min"] <= row["sqnr_db"] <= row["sqnr_db_max"]


def test_operators_of_branches_and_loops_have_lines(farm: FarmProcess, tmp_path: Path) -> None:
    reports, _ = bench(farm, tmp_path, "models.py:branches", "models.py:scanned", "--recipe", "portable")
    for report, expected in zip(reports, ("lambda v: v * 2", "return scan(step, carry, xs)"), strict=True):
        assert not [code for code in codes(report) if "ETRECORD" in code]
        lines = [row["source"]["code"] for row in report["operators"] if row["source"]]
        assert any(expected in line for line in lines)
        assert all(row["source"] for row in report["operators"] if row["kind"] == "OPERATOR" and "mul" in row["name"])
