"""Sizes that break a relation never reach a device, and a failure on a device names the line: jobs, sessions and data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from etfarm.client import Farm, ModelSource
from etfarm.client.submit.preparation import prepare
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="compiles models and runs them on a real runner")

N: Final = Dim("n", min=2, max=16)
K: Final = Dim("k", min=1, max=8)


class Related(nn.Module):
    """Takes groups of four, and two inputs of one length."""

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return x.reshape(-1, 4).sum(1), a + b


class Fragile(nn.Module):
    """Fails where a divisor is 0, or an index is outside of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> Any:
        return torch.div(a, b, rounding_mode="floor"), self.table(t)


RELATED: Final = ModelSource.of(
    Related().eval(),
    (torch.ones(8), torch.ones(3, 2), torch.ones(3, 2)),
    dynamic_shapes={"x": {0: 4 * K}, "a": {0: N}, "b": {0: N}},
)
FRAGILE: Final = ModelSource.of(Fragile().eval(), (torch.tensor([7, 8]), torch.tensor([2, 3]), torch.tensor([1, 2])))


@pytest.fixture(scope="module")
def client(farm: FarmProcess) -> Iterator[Farm]:
    with farm.client() as opened:
        yield opened


def arrays(x: int, a: int, b: int) -> list[np.ndarray]:
    return [np.ones(x, np.float32), np.ones((a, 2), np.float32), np.ones((b, 2), np.float32)]


BROKEN: Final = [
    (arrays(6, 3, 3), "must be a multiple of 4, got 6"),
    (arrays(8, 3, 5), "b.shape[0] == a.shape[0] must hold"),
    (arrays(8, 1, 1), "float32 [2..16, 2]"),
    (arrays(40, 3, 3), "float32 [4..32]"),
]


def test_a_session_refuses_sizes_that_break_a_relation_and_stays_usable(client: Farm) -> None:
    with client.session(RELATED, recipe="portable") as session:
        for inputs, words in BROKEN:
            with pytest.raises(EtfarmError) as refused:
                session.run(*inputs)
            assert (refused.value.reason, words in refused.value.message) == ("INPUT_MISMATCH", True), refused.value
        assert [output.shape for output in session.run(*arrays(32, 16, 16))] == [(8,), (16, 2)]


def test_a_job_refuses_such_inputs_before_it_is_submitted(client: Farm) -> None:
    model = prepare(RELATED, recipes=["portable"])
    for inputs, words in BROKEN:
        with pytest.raises(EtfarmError) as refused:
            client.bench(model, recipes=["portable"], inputs=inputs)
        assert (refused.value.reason, words in refused.value.message) == ("INPUT_MISMATCH", True), refused.value


def test_a_data_set_names_the_sample_whose_sizes_do_not_fit(client: Farm) -> None:
    samples = [arrays(8, 3, 3), arrays(6, 3, 3)]
    with pytest.raises(EtfarmError, match=r"sample 1: .*must be a multiple of 4, got 6") as refused:
        list(client.run_dataset(RELATED, samples, recipe="portable"))
    assert refused.value.reason == "INPUT_MISMATCH"


def test_a_failure_on_a_device_names_the_line_and_a_remedy(client: Farm) -> None:
    good, zero, far = np.array([1, 2]), np.array([0, 3]), np.array([1, 2_000_000])
    with client.session(FRAGILE, recipe="portable") as session, pytest.raises(EtfarmError) as failed:
        session.run(np.array([7, 8]), zero, good)
    assert "test_sizes_and_failures.py:" in failed.value.message and "aten::div" in failed.value.message
    assert "divisor is 0" in failed.value.remedy
    result = client.bench(FRAGILE, recipes=["portable"], inputs=[np.array([7, 8]), good, far]).result()
    (report,) = result.reports
    assert report.error is not None and "self.table(t)" in report.error.message, report.error
    assert "index is outside" in report.error.remedy
