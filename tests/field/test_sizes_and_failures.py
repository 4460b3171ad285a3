"""Sizes that break a relation never reach a device, and a failure on a device names the line: jobs and data sets."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from etfarm.client import Farm, ModelSource
from etfarm.client.submit.preparation import prepare
from etfarm.wire.errors import EtfarmError
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="compiles models and runs them on a real runner")

N: Final = Dim("n", min=2, max=16)
K: Final = Dim("k", min=1, max=8)


class Related(nn.Module):
    """Takes groups of four, and two inputs of one length."""

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return x.reshape(-1, 4).sum(1), a + b


class Fragile(nn.Module):
    """Fails where an index is outside of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, t: torch.Tensor) -> Any:
        return t * 2, self.table(t)


RELATED: Final = ModelSource.of(
    Related().eval(),
    (torch.ones(8), torch.ones(3, 2), torch.ones(3, 2)),
    dynamic_shapes={"x": {0: 4 * K}, "a": {0: N}, "b": {0: N}},
)
FRAGILE: Final = ModelSource.of(Fragile().eval(), (torch.tensor([1, 2]),))


def arrays(x: int, a: int, b: int) -> list[np.ndarray]:
    return [np.ones(x, np.float32), np.ones((a, 2), np.float32), np.ones((b, 2), np.float32)]


BROKEN: Final = [
    (arrays(6, 3, 3), "must be a multiple of 4, got 6"),
    (arrays(8, 3, 5), "b.shape[0] == a.shape[0] must hold"),
    (arrays(8, 1, 1), "float32 [2..16, 2]"),
    (arrays(40, 3, 3), "float32 [4..32]"),
]


def test_a_job_refuses_sizes_that_break_a_relation_before_it_is_submitted(client: Farm) -> None:
    model = prepare(RELATED, recipes=["portable"])
    for inputs, words in BROKEN:
        with pytest.raises(EtfarmError) as refused:
            client.bench(model, recipes=["portable"], inputs=inputs)
        assert (refused.value.reason, words in refused.value.message) == ("INPUT_MISMATCH", True), refused.value


def test_a_data_set_names_the_sample_whose_sizes_do_not_fit(client: Farm) -> None:
    samples = [arrays(8, 3, 3), arrays(6, 3, 3)]
    with refuses("INPUT_MISMATCH", match=r"sample 1: .*must be a multiple of 4, got 6"):
        list(client.run_dataset(RELATED, samples, recipe="portable"))


def test_a_report_of_a_failure_on_a_device_names_the_line_and_a_remedy(client: Farm) -> None:
    (report,) = client.bench(FRAGILE, recipes=["portable"], inputs=[np.array([1, 2_000_000])]).result().reports
    assert report.error is not None and "self.table(t)" in report.error.message, report.error
    assert "index is outside" in report.error.remedy
