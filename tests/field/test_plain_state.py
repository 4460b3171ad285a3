"""State that is no buffer is lost on a device, and the report names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

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


class Offset(nn.Module):
    """A number of calls, in an array of NumPy whose memory the program's constant shares during the export."""

    def __init__(self) -> None:
        super().__init__()
        self.h = np.zeros(3, np.float32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.from_numpy(self.h)
        self.h[:] += 1
        return y


def test_an_array_that_calls_change_is_named_and_as_it_was_in_the_first_call(farm: FarmProcess) -> None:
    source = ModelSource.of(Offset().eval(), (torch.ones(3),))
    with farm.client() as client:
        (report,) = client.compile(source, recipes="portable").result().reports
        assert report.compile is not None
        (warning,) = [each for each in report.compile.warnings if each.code == "STATE_FORGOTTEN"]
        assert "self.h" in warning.message
        with client.session(source, recipe="portable") as session:
            assert session.run(np.ones(3, np.float32)).array().tolist() == [1.0, 1.0, 1.0]


class OneRow(nn.Module):
    """Computes something else for one row, by a tensor of the size."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.ones(x.shape[:1]).sum() == 1, x * 10, x * 2)


class TwoRows(nn.Module):
    """Has a branch on the size, and a minimum of 2."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 10 if x.shape[0] == 1 else x * 2


def test_the_remedies_for_branches_on_a_size_of_one_work(farm: FarmProcess) -> None:
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    for module, minimum, sizes in ((OneRow().eval(), 1, (4, 1, 2)), (TwoRows().eval(), 2, (4, 2))):
        dims = {"x": {0: Dim("n", min=minimum, max=8)}}
        source = ModelSource.of(module, (x,), dynamic_shapes=dims)
        with farm.client() as client, client.session(source, recipe="portable") as session:
            for size in sizes:
                assert np.allclose(session.run(x[:size].numpy()).array(), module(x[:size]), atol=1e-5), (minimum, size)


class Exporting(nn.Module):
    """Computes something else while it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.compiler.is_exporting() else x * 3


def test_a_report_says_that_the_program_differs_from_the_model(farm: FarmProcess) -> None:
    with farm.client() as client:
        (report,) = client.compile(ModelSource.of(Exporting().eval(), (torch.rand(4) + 1,))).result().reports
    assert report.compile is not None
    (warning,) = [each for each in report.compile.warnings if each.code == "PROGRAM_DIFFERS"]
    assert "differs from the model, called with the example inputs: the output has other values" in warning.message


class Counter(nn.Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


def test_a_tensor_outside_of_buffers_starts_on_the_device_as_in_the_model(farm: FarmProcess) -> None:
    with (
        farm.client() as client,
        client.session(ModelSource.of(Counter().eval(), (torch.ones(2),)), recipe="portable") as session,
    ):
        assert [session.run(np.ones(2, np.float32)).array().tolist() for _ in range(2)] == [[2, 2], [3, 3]]


def test_a_report_names_the_sizes_at_which_a_program_differs(farm: FarmProcess) -> None:
    dims = {"x": {0: Dim("n", min=1, max=8)}}
    with farm.client() as client:
        (report,) = client.compile(ModelSource.of(TwoRows().eval(), (torch.rand(4, 3),), dynamic_shapes=dims)).result().reports
    assert report.compile is not None
    (warning,) = [each for each in report.compile.warnings if each.code == "SIZE_ONE_DIFFERS"]
    assert "dim 0 of 'x' has the size 1 (the output has other values)" in warning.message and "min=2" in warning.message
