"""Dynamic dims of which a model takes a quotient as a number: the refusal has the line, and its remedies work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from etfarm.client.export import ModelSource, export_source
from etfarm.client.export.errors import DimSpecialized
from tests.support.exports import Function, export_called, export_program

ANY, MULTIPLE = Dim("n", min=8, max=19), 4 * Dim("k", min=2, max=4)


def loop(x: Tensor) -> Tensor:
    for i in range(x.shape[0] // 4):
        x = x + i
    return x


def scanned(x: Tensor) -> Tensor:
    def step(h: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return h + i, i.clone()

    return scan(step, x, torch.arange(x.shape[0] // 4).float(), dim=0)[0]


def branch(x: Tensor) -> Tensor:
    if x.shape[0] // 4 == 2:
        return x + 1
    return x * 2


def chosen(x: Tensor) -> Tensor:
    return torch.where(torch.tensor(x.shape[0]) // 4 == 2, x + 1, x * 2)


def quotient(x: Tensor) -> Tensor:
    return x * (x.shape[0] // 4)


def source(function: Callable[[Tensor], Tensor], dim: Any, size: int = 8) -> ModelSource:
    x = torch.arange(2.0 * size).reshape(size, 2)
    return ModelSource.of(Function(function).eval(), (x,), dynamic_shapes={"x": {0: dim}} if dim else None)


def must_work(function: Callable[[Tensor], Tensor], dim: Any, size: int = 8) -> None:
    called = export_called(source(function, dim, size))
    for each in (8, 12, 16) if dim else (size,):
        x = torch.rand(each, 2)
        torch.testing.assert_close(called(x), function(x))


@pytest.mark.parametrize("dim", [ANY, MULTIPLE])
@pytest.mark.parametrize(
    ("function", "mended", "why", "remedy"),
    [
        (loop, scanned, "the number of steps of a Python loop", "a scan over torch.arange(n)"),
        (branch, chosen, "a Python branch depends on it", "torch.where and a tensor of the size, torch.tensor(x.shape[0])"),
    ],
)
def test_a_loop_or_branch_over_a_quotient_is_refused_with_its_line(
    dim: Any, function: Callable[[Tensor], Tensor], mended: Callable[[Tensor], Tensor], why: str, remedy: str
) -> None:
    with pytest.raises(DimSpecialized) as caught:
        export_source(source(function, dim), name="m")
    assert f"test_fixed_sizes.py:{function.__code__.co_firstlineno + 1}" in caught.value.metadata["source"]
    assert why in caught.value.message and ("for 8 only" in caught.value.message) == (dim is MULTIPLE)
    assert remedy in caught.value.remedy and caught.value.remedy.startswith("Leave the dim out of dynamic_shapes")
    must_work(mended, dim)
    for size in (8, 12):
        must_work(function, None, size)


def test_a_number_of_a_quotient_is_refused_with_its_line() -> None:
    def divided(x: Tensor) -> Tensor:
        return x * int(x.shape[0] // 4)

    with pytest.raises(DimSpecialized) as caught:
        export_source(source(divided, MULTIPLE), name="m")
    assert "takes a quotient of it as a number" in caught.value.message and "test_fixed_sizes.py:" in caught.value.message
    assert "write x.shape[0] // 2 for int(x.shape[0] / 2)" in caught.value.remedy
    must_work(quotient, MULTIPLE)


def test_the_words_of_torch_are_not_a_remedy() -> None:
    with pytest.raises(DimSpecialized) as caught:
        export_source(source(loop, Dim("n", min=2, max=19), 5), name="m", strict=True)
    assert "TORCH_LOGS" not in str(caught.value) and "Write n = 5" not in caught.value.remedy


def test_sizes_that_fit_their_dim_are_not_refused() -> None:
    must_work(lambda x: x.reshape(-1, 4, 2).sum(1), MULTIPLE)
    must_work(lambda x: x[: x.shape[0] // 2] * 2, MULTIPLE)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool1d(x, 2),
        lambda x: F.max_pool1d(x, 3, 2, padding=1, dilation=2),
        lambda x: F.max_pool1d(x[:, None], kernel_size=4, stride=1),
        nn.MaxPool1d(2, padding=1),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_pool_along_a_dynamic_length_is_exported(pool: Callable[[Tensor], Tensor], strict: bool) -> None:
    x = torch.rand(2, 8)
    length = ModelSource.of(Function(pool).eval(), (x,), dynamic_shapes={"x": {1: ANY}})
    program = export_program(length, strict=strict)
    # A server has no other form of max_pool1d.
    assert not any("max_pool1d" in str(node.target) for node in program.graph.nodes)
    called = program.module()
    for size in (8, 13, 19):
        x = torch.rand(2, size)
        torch.testing.assert_close(called(x), pool(x), rtol=0, atol=0)


def test_a_pool_along_a_static_length_stays_as_it_is() -> None:
    program = export_program(ModelSource.of(Function(lambda x: F.max_pool1d(x, 2)).eval(), (torch.rand(2, 8),)))
    assert "aten.max_pool1d.default" in {str(node.target) for node in program.graph.nodes}


class Places(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(-1, 1, x.shape[0])[:, None]


def test_a_linspace_of_a_size_is_refused_with_its_line_and_an_arange() -> None:
    def mended(x: Tensor) -> Tensor:
        n, a, b = x.shape[0], -1, 1
        return x + (torch.arange(n) * ((b - a) / torch.tensor(n - 1)) + a)[:, None]

    with pytest.raises(DimSpecialized) as caught:
        export_source(ModelSource.of(Places().eval(), (torch.rand(8, 2),), dynamic_shapes={"x": {0: ANY}}), name="m")
    assert f"test_fixed_sizes.py:{Places.forward.__code__.co_firstlineno + 1}" in caught.value.message
    assert "torch.linspace has a fixed number of steps in the program" in caught.value.message
    assert "torch.arange(n) * ((b - a) / torch.tensor(n - 1)) + a for torch.linspace(a, b, n)" in caught.value.remedy
    called = export_called(source(mended, ANY))
    for size in (8, 13, 19):
        x = torch.rand(size, 2)
        torch.testing.assert_close(called(x), Places()(x))


def test_a_linspace_of_another_number_is_not_blamed() -> None:
    def fixed(x: Tensor) -> Tensor:
        return x.reshape(8, 2) * torch.linspace(-1, 1, 2)

    with pytest.raises(DimSpecialized) as caught:
        export_source(source(fixed, ANY), name="m")
    assert "linspace" not in str(caught.value) and "a number in a reshape" in caught.value.remedy


class Ceiling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x[None, None], 2, ceil_mode=True)


class Averages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x[None, None], (2, 1), ceil_mode=True)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x)


@pytest.mark.parametrize(
    ("module", "size", "dim"),
    [
        (Ceiling(), 8, 2 * Dim("k", min=4, max=20)),
        (Averages(), 8, 2 * Dim("k", min=4, max=20)),
        (Halves(), 8, 2 * Dim("k", min=4, max=20)),
        (Distances(), 30, Dim("n", min=26, max=40)),
    ],
)
def test_an_operator_that_limits_a_size_is_named_with_its_line_and_a_dim_that_works(
    module: nn.Module, size: int, dim: Any
) -> None:
    x = torch.rand(size, 2)
    with pytest.raises(DimSpecialized) as caught:
        export_source(ModelSource.of(module.eval(), (x,), dynamic_shapes={"x": {0: Dim("n", min=8, max=40)}}), name="m")
    assert (
        f" at tests/unit/client/export/test_fixed_sizes.py:{module.forward.__code__.co_firstlineno + 1}: " in caught.value.message
    )
    assert ("min=4, max=20" if size == 8 else "min=26, max=40") in caught.value.remedy
    called = export_called(ModelSource.of(module.eval(), (x,), dynamic_shapes={"x": {0: dim}}))
    for each in (26, 28, 40):
        x = torch.rand(each, 2)
        torch.testing.assert_close(called(x), module(x))


def test_a_quotient_in_no_condition_is_not_blamed() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * (x.shape[0] // 4)
            return torch.cat([y[:3], y[10:]]) if x.shape[0] > 9 else y

    with pytest.raises(DimSpecialized) as caught:
        export_source(ModelSource.of(Scaled().eval(), (torch.rand(8, 2),), dynamic_shapes={"x": {0: ANY}}), name="m")
    assert f"test_fixed_sizes.py:{Scaled.forward.__code__.co_firstlineno + 1}:" not in caught.value.message
