"""Wrong outputs for a job's own inputs, or beside masked ones: a report on a real farm names them, and its remedy helps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from tests.support.exports import Function
from tests.support.quick_jobs import QUICK, warned

pytestmark = [pytest.mark.slow(reason="programs are compiled and run on a farm"), pytest.mark.numeric]


def measure(client: Farm, source: ModelSource, recipe: str, **options: Any) -> tuple[Any, list[str]]:
    """Return a report with its warnings of wrong outputs, of the compilation and of the device."""
    (report,) = client.bench(source, recipes=recipe, **QUICK, **options).result().reports
    return report, warned(report, "LOW_ACCURACY", "OUTPUTS_DIFFER")


def test_nan_for_the_jobs_inputs_is_named_and_portable_helps(client: Farm) -> None:
    source = ModelSource.of(Function(torch.sigmoid).eval(), (torch.rand(4),))
    inputs = {"x": np.array([1e30, 1, 2, 3], np.float32)}
    report, (message,) = measure(client, source, "xnnpack_fp32", inputs=inputs)
    assert message.startswith("On the device, forward is far from the model: ")
    assert "has NaN in 1 of 4 elements where the model gives numbers. Compile it with the recipe portable" in message
    assert report.accuracy[0].nan_count == 1
    assert measure(client, source, "portable", inputs=inputs)[1] == []


class Masked(nn.Module):
    """Logits of which a mask excludes some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(8) > 5
        return self.layer(x).masked_fill(mask, float("-inf"))


def test_masked_logits_beyond_the_calibration_are_named_and_calibrating_with_them_helps(client: Farm) -> None:
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    recipe, inputs = "xnnpack_pt2e_int8_static_per_channel", {"x": x.numpy() * 100}
    report, messages = measure(client, ModelSource.of(Masked().eval(), (x,)), recipe, inputs=inputs)
    assert report.accuracy[0].sqnr_db is not None and report.accuracy[0].sqnr_db < 10
    assert len(messages) == 1 and messages[0].startswith("On the device, forward is far from the model: ")
    assert " dB, less than the 10 dB that quantization should keep. Calibrate static scales with inputs like these" in messages[0]
    report, messages = measure(client, ModelSource.of(Masked().eval(), (x * 100,)), recipe, inputs=inputs)
    assert not messages and report.accuracy[0].sqnr_db > 20


def test_what_the_compilation_warns_of_is_not_repeated_for_the_device(client: Farm) -> None:
    source = ModelSource.of(Function(lambda x: (x % 4).float() + 0.5).eval(), (torch.arange(-8, 0),))  # truncates
    report, messages = measure(client, source, "portable")
    assert not report.accuracy[0].equal
    assert len(messages) == 1 and messages[0].startswith("forward gives other results than eager PyTorch: ")
