"""State that is no buffer is lost on a device, and the report names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource
from tests.support.farm import FarmProcess

pytestmark = [pytest.mark.slow(reason="programs are compiled and run on a farm"), pytest.mark.numeric]


class Accumulator(nn.Module):
    """A sum over calls, in a dict of an attribute."""

    cache: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.cache = {"k": torch.zeros(3)}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["k"] = self.cache["k"] + x
        return self.cache["k"] * 1


def test_a_report_names_the_state_that_is_forgotten(farm: FarmProcess) -> None:
    source = ModelSource.of(Accumulator().eval(), (torch.ones(3),))
    with farm.client() as client:
        report = client.bench(source, recipes="portable", min_time_s=0.0, iterations=3).result().report
    assert report.compile is not None
    (warning,) = [each for each in report.compile.warnings if each.code == "STATE_FORGOTTEN"]
    assert 'self.cache["k"]' in warning.message
