"""Splits of dynamic dims, whose number of parts programs fix: what is refused has a remedy, and the remedy works."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client.export import ModelSource
from etfarm.client.export.errors import DimSpecialized
from tests.support.exports import export_called

X = torch.rand(12, 4)


class Splitting(nn.Module):
    """Adds the rows of each of its parts."""

    def __init__(self, split: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part.sum(0) for part in self.split(x)])


class Rows(nn.Module):
    """Adds each three rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, 3)).sum(1)


def exported(module: nn.Module, dim: Any) -> Callable[[Tensor], Tensor]:
    called: Callable[[Tensor], Tensor] = export_called(ModelSource.of(module.eval(), (X,), dynamic_shapes={"x": {0: dim}}))
    return called


def must_work(module: nn.Module, dim: Any, sizes: Sequence[int]) -> None:
    called = exported(module, dim)
    for size in sizes:
        x = torch.rand(size, 4)
        torch.testing.assert_close(called(x), module(x))


@pytest.mark.parametrize(
    ("split", "operator"),
    [
        (lambda x: x.chunk(4), "chunk"),
        (lambda x: torch.tensor_split(x, 4), "tensor_split"),
        (lambda x: torch.vsplit(x, 4), "vsplit"),
        (lambda x: x.split(x.shape[0] // 4), "split"),
    ],
)
def test_a_number_of_parts_needs_a_multiple_of_it(split: Callable[[Tensor], Any], operator: str) -> None:
    module = Splitting(split)
    with pytest.raises(DimSpecialized) as caught:
        exported(module, Dim("n", min=4, max=64))
    sentence = str(caught.value)
    assert f"{operator} cuts it into 4 parts, which must be equal in the program." in sentence
    assert "Dim n cannot be dynamic as requested at " in sentence and "test_splits.py:" in sentence
    assert "4 * Dim('k', min=2, max=16)" in caught.value.remedy
    must_work(module, 4 * Dim("k", min=2, max=16), (8, 12, 64))


@pytest.mark.parametrize("dim", [Dim("n", min=4, max=64), 4 * Dim("n", min=1, max=16)])
def test_parts_of_a_size_need_a_number_of_parts(dim: Any) -> None:
    with pytest.raises(DimSpecialized) as caught:
        exported(Splitting(lambda x: x.split(3)), dim)
    assert "split cuts parts of 3 from it, and the program always has 4 of them" in str(caught.value)
    assert "test_splits.py:" in str(caught.value)
    # Of a multiple, torch.export has raised the minimum before.
    assert re.search(r"\.chunk\(4, 0\), and give the dim as 4 \* Dim\('k', min=[23], max=16\)", caught.value.remedy)
    assert re.search(r"\.unflatten\(0, \(-1, 3\)\), and give it as 3 \* Dim\('k', min=[24], max=21\)", caught.value.remedy)
    must_work(Splitting(lambda x: x.chunk(4, 0)), 4 * Dim("k", min=2, max=16), (8, 64))
    must_work(Rows(), 3 * Dim("k", min=2, max=21), (6, 63))


def test_splits_that_fit_all_sizes_are_not_refused() -> None:
    must_work(Splitting(lambda x: x.split(2, 1)), Dim("n", min=2, max=64), (2, 64))
    must_work(Splitting(lambda x: x.split([3, x.shape[0] - 3])), Dim("n", min=5, max=64), (5, 64))
