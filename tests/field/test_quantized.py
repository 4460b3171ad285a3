"""Quantized models as users report them, through a real farm: what is measured, what is said about it, and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("executorch")

from tests.support.farm import FarmProcess
from tests.support.quick_jobs import QUICK_OPTIONS, bench

pytestmark = [pytest.mark.slow(reason="a farm compiles a program and one for each operator"), pytest.mark.numeric]

MODELS = """
import torch
from torch import nn
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
"""


def test_a_layer_with_two_uses_is_wrong_only_when_fused(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    arguments = ("models.py:twice", "--recipe", "xnnpack_pt2e_int8_static_per_channel", "--numerics")
    document, printed = bench(farm, tmp_path, *arguments, *QUICK_OPTIONS)
    (report,) = document["reports"]
    # That of the device, and not that of the server as well.
    (warning,) = [each["message"] for each in report["compile"]["warnings"] if each["code"] == "FAR_FROM_QUANTIZED_GRAPH"]
    assert "copy_shared_layers = true" in warning and not warning.startswith("forward on the server")
    assert report["numerics"]["wrong_only_when_fused"] and "wrong only when fused" in printed
    assert report["numerics"]["first_bad"] is None and report["numerics"]["sqnr_db"] > 25 > report["numerics"]["timed_sqnr_db"]
    for row in report["accuracy"]:
        assert row["samples"] == 8  # the first calibration sample is the example input
        assert row["sqnr_db_min"] <= row["sqnr_db"] <= row["sqnr_db_max"]
