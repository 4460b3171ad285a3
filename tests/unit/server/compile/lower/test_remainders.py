"""Remainders of numbers that may be negative: as Python computes them, also in sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

pytest.importorskip("executorch")

from etfarm.server.compile.lower import remainders
from tests.support.compiling import lowered_here, run

pytestmark = pytest.mark.filterwarnings("ignore:This API and all of its related functionality")

Body = Callable[..., Any]


class Model(nn.Module):
    """Computes with a layer's output, and with the size of its input or with a number that is its second input."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor, number: Tensor | None = None) -> Any:
        return self.body(self.line(x), x.shape[0] if number is None else number.item())


def lowered(body: Body, recipe: str, inputs: tuple[Tensor, ...]) -> tuple[Model, bytes]:
    """Return a model with its program, which is made in this process."""
    model = Model(body).eval()
    shapes = None if len(inputs) > 1 else {"x": {0: Dim("n", min=4, max=16)}}
    return model, lowered_here(torch.export.export(model, inputs, dynamic_shapes=shapes), recipe)


def must_equal(model: Model, pte: bytes, samples: Iterable[tuple[Tensor, ...]]) -> None:
    for inputs in samples:
        torch.testing.assert_close(run(pte, inputs)[0], model(*inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.slow(reason="lowers models")
@pytest.mark.numeric
@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32"])
@pytest.mark.parametrize(
    "body",
    [
        lambda y, n: y * (torch.arange(n) >= -n % 4)[:, None],
        lambda y, n: y * ((n * n - 40) % 7) + n % 3,
        lambda y, n: y * (7 % (6 - n + n * n // 64 * 20 - 1)),
        lambda y, n: F.pad(y, (0, 0, 0, -n % 4)),
        lambda y, n: torch.cat([y, y.new_zeros(-n % 4 + 2, 4)]),
    ],
)
def test_remainders_of_sizes(body: Body, recipe: str) -> None:
    model, pte = lowered(body, recipe, (torch.rand(6, 4),))
    must_equal(model, pte, ((torch.rand(size, 4),) for size in (4, 6, 7, 9, 15, 16)))


@pytest.mark.slow(reason="lowers models")
@pytest.mark.numeric
@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32"])
@pytest.mark.parametrize("body", [lambda y, n: y * ((n - 1) % 4), lambda y, n: y * (n % -4), lambda y, n: y * (9 % (2 * n + 1))])
def test_remainders_of_numbers_of_tensors(body: Body, recipe: str) -> None:
    model, pte = lowered(body, recipe, (torch.rand(2, 4), torch.tensor([3])))
    must_equal(model, pte, ((torch.rand(2, 4), torch.tensor([number])) for number in (3, 1, 0, -1, -6)))


def test_only_remainders_of_numbers_that_may_be_negative_are_changed() -> None:
    def body(y: Tensor, n: int) -> Tensor:
        return y * (n % 4) + (n - 4) % 5 + (n - 5) % 6

    program = torch.export.export(Model(body), (torch.rand(6, 4),), dynamic_shapes={"x": {0: Dim("n", min=4, max=16)}})
    remainders.compute_as_python(program)
    assert [node.args[1] for node in program.graph.nodes if node.target is operator.mod] == [4, 5, 6, 6]
