"""State that is no buffer is lost on a device, and the report names it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from tests.support.exports import Function
from tests.support.quick_jobs import warned

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


class Offset(nn.Module):
    """A number of calls, in an array of NumPy whose memory the program's constant shares during the export."""

    def __init__(self) -> None:
        super().__init__()
        self.h = np.zeros(3, np.float32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.from_numpy(self.h)
        self.h[:] += 1
        return y


ONE_ROW: Final = Function(lambda x: torch.where(torch.ones(x.shape[:1]).sum() == 1, x * 10, x * 2))
"""Computes something else for one row, by a tensor of the size."""
TWO_ROWS: Final = Function(lambda x: x * 10 if x.shape[0] == 1 else x * 2)
"""Has a branch on the size, so that its minimum is 2."""


def test_the_remedies_for_branches_on_a_size_of_one_work(client: Farm) -> None:
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    for module, minimum, sizes in ((ONE_ROW.eval(), 1, (4, 1, 2)), (TWO_ROWS.eval(), 2, (4, 2))):
        dims = {"x": {0: Dim("n", min=minimum, max=8)}}
        source = ModelSource.of(module, (x,), dynamic_shapes=dims)
        with client.session(source, recipe="portable") as session:
            for size in sizes:
                assert np.allclose(session.run(x[:size].numpy()).array(), module(x[:size]), atol=1e-5), (minimum, size)


class Counter(nn.Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


def test_a_tensor_outside_of_buffers_starts_on_the_device_as_in_the_model(client: Farm) -> None:
    with client.session(ModelSource.of(Counter().eval(), (torch.ones(2),)), recipe="portable") as session:
        assert [session.run(np.ones(2, np.float32)).array().tolist() for _ in range(2)] == [[2, 2], [3, 3]]


ROWS: Final = {"x": {0: Dim("n", min=1, max=8)}}


@pytest.mark.parametrize(
    ("module", "inputs", "shapes", "code", "words"),
    [
        (Accumulator(), torch.ones(3), None, "STATE_FORGOTTEN", ['self.cache["k"]']),
        (Offset(), torch.ones(3), None, "STATE_FORGOTTEN", ["self.h"]),
        (
            Function(lambda x: x * 2 if torch.compiler.is_exporting() else x * 3), torch.rand(4) + 1, None, "PROGRAM_DIFFERS",
            ["differs from the model, called with the example inputs: the output has other values"],
        ),
        (
            TWO_ROWS, torch.rand(4, 3), ROWS, "SIZE_ONE_DIFFERS",
            ["dim 0 of 'x' has the size 1 (the output has other values)", "min=2"],
        ),
    ],
    ids=["state in a dict", "state in an array", "another program", "another size"],
)  # fmt: skip
def test_a_report_names_what_the_program_does_not_do_as_the_model(
    client: Farm, module: nn.Module, inputs: Tensor, shapes: Any, code: str, words: list[str]
) -> None:
    source = ModelSource.of(module.eval(), (inputs,), dynamic_shapes=shapes)
    (report,) = client.compile(source, recipes="portable").result().reports
    (message,) = warned(report, code)
    assert all(each in message for each in words), message


def test_an_array_that_calls_change_is_as_it_was_in_the_first_call(client: Farm) -> None:
    with client.session(ModelSource.of(Offset().eval(), (torch.ones(3),)), recipe="portable") as session:
        assert session.run(np.ones(3, np.float32)).array().tolist() == [1.0, 1.0, 1.0]
