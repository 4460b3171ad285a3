"""Assertions that a lowered program drops, in programs as torch.export makes, saves and loads them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from etfarm.server.compile.program import assertions  # noqa: E402
from tests.support.exports import Function  # noqa: E402


class Asserts(nn.Module):
    """Checks its values in one of several ways."""

    position: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("position", torch.tensor(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "number":
            torch._check(x.max().item() < 100)
        elif self.kind == "tensor":
            torch._assert_async(x.max() < 100, "too large")
        elif self.kind == "all":
            torch._check_tensor_all(x < 100)
        elif self.kind == "branch":
            return torch.cond(x.sum() > 0, checked_double, torch.neg, (x,))
        elif self.kind == "count":
            indices = torch.nonzero(x > 0.5)
            torch._check(indices.shape[0] < 5)
            return x[: indices.shape[0]]
        elif self.kind == "size":
            size = x.sum().long().item()
            torch._check(size <= 8)
            return x[:size]
        elif self.kind == "found":
            return x[x > 0.5] + x[torch.nonzero(x > 0.5).reshape(-1)]
        elif self.kind == "unique":
            return torch.unique(x)
        elif self.kind == "where":
            return x[torch.where(x > 0.5)[0]]
        elif self.kind == "created":
            return torch.zeros(x.sum().long().item())
        elif self.kind == "narrow":
            return x.narrow(0, x.sum().long().item(), 2)
        elif self.kind in ("apart", "ordered"):
            a, b = torch.nonzero(x > 0.5), torch.nonzero(x > 0.25)
            torch._check(a.shape[0] == b.shape[0] if self.kind == "apart" else a.shape[0] <= b.shape[0])
            return a * 2, b * 2
        elif self.kind == "several":
            position = self.position.item()
            torch._check(position >= 0)
            torch._check(position % 4 == 0)
            torch._check(position < x.shape[0])
            return x.narrow(0, position, 1)
        elif self.kind == "shape":
            torch._check(x.shape[0] < 100)
        return x * 2


def checked_double(x: Tensor) -> Tensor:
    torch._assert_async((x < 100).all(), "")  # without a message, torch.cond drops it
    return x * 2


def described(kind: str) -> str:
    file = io.BytesIO()
    sizes = {"x": {0: torch.export.Dim("n", max=64)}} if kind in ("shape", "found", "several") else None
    torch.export.save(torch.export.export(Asserts(kind).eval(), (torch.rand(8),), dynamic_shapes=sizes), file)
    file.seek(0)
    return assertions.describe(torch.export.load(file), "forward")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("number", r"\(torch._check\(x.max\(\).item\(\) < 100\)\)"),
        ("tensor", r"\(torch._assert_async\(x.max\(\) < 100, \"too large\"\)\)"),
        ("all", r"\(torch._check_tensor_all\(x < 100\)\)"),
        ("branch", r"\(return torch.cond\("),
        ("count", r"u0 < 5 at [^(]+:\d+ \(indices = torch.nonzero\(x > 0.5\)\)"),
        ("apart", r"u0 == u1 at [^(]+:\d+ "),
        ("ordered", r"u0.*u1.* at [^(]+:\d+ "),
        ("created", r"u0 >= 0 at [^(]+:\d+ \(return torch.zeros\("),
        ("narrow", r"at [^(]+:\d+ \(return x.narrow\("),
        ("size", r"u0 <= 8 at [^(]+:\d+ \(size = x.sum\(\).long\(\).item\(\)\)"),
    ],
)
def test_what_a_model_asserts_of_values_is_named_with_its_line(kind: str, line: str) -> None:
    text = described(kind)
    assert re.search(line, text), text
    assert "test_assertions.py:" in text and text.endswith("the device may continue.")


def test_all_conditions_of_a_line_are_named_in_readable_form() -> None:
    text = described("several")
    for condition in ("position.item() >= 0", "position.item() % 4 == 0", "position.item() < x.shape[0]"):
        assert condition in text or f"torch._check({condition.replace('.item()', '')})" in text, text


@pytest.mark.parametrize("kind", ["none", "found", "shape", "unique", "where"])
def test_what_torch_asserts_of_sizes_by_itself_is_not_named(kind: str) -> None:
    assert described(kind) == ""


class LooksNowhere(nn.Module):
    """Operators whose values only PyTorch looks at."""

    def forward(self, x: Tensor, i: Tensor, y: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        constant = torch.nn.functional.one_hot(torch.tensor([0, 1]), 2)
        return torch.nn.functional.one_hot(x % 5, 5), y.index_add(0, i, y[:3]), torch.fmod(x, d), torch.fmod(x, 2), constant


def test_indices_and_divisors_that_only_pytorch_looks_at_are_named_with_their_lines() -> None:
    inputs = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]), torch.rand(4, 3), torch.tensor([1, 2, 3]))
    text = assertions.describe(torch.export.export(LooksNowhere().eval(), inputs), "forward")
    assert re.search(
        r"values from 0 to 4 and i from 0 to 3 and d other than 0 at [^(]+:\d+ \(return torch.nn.functional", text
    ), text
    with pytest.raises((RuntimeError, IndexError, ZeroDivisionError)):
        LooksNowhere()(inputs[0], torch.tensor([-1, 0, 0]), *inputs[2:])


class Bounded(nn.Module):
    """Indices that operators bound: of classes, of a counter, of conditions."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, i: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self.calls.copy_((self.calls + 1) % 4)
        one_hot = torch.nn.functional.one_hot
        classes = one_hot(x.argmax(-1), 5), one_hot(x.topk(2).indices, 5), one_hot((x > 0).long(), 2), one_hot(i.clamp(0, 4), 5)
        bins = one_hot(torch.where(i > 2, 1, 0), 2), one_hot(self.calls, 4), one_hot((x > 0).sum(-1) % 3, 3)
        return *classes, *bins, y.index_add(0, x.argmax(-1), y[:2]), torch.fmod(i, (i % 3).abs() + 1)


def test_indices_that_operators_bound_are_not_named() -> None:
    inputs = torch.rand(2, 5), torch.tensor([1, 2]), torch.rand(5, 3)
    assert assertions.describe(torch.export.export(Bounded().eval(), inputs), "forward") == ""


@pytest.mark.parametrize(
    "indices",
    [
        lambda x: (x.sigmoid() * 4).long(),
        lambda x: ((x.tanh() + 1) * 2).round().long(),
        lambda x: (x.softmax(-1) * 4).floor().int().long(),
        lambda x: x.clamp(0, 4).long(),
        lambda x: F.hardtanh(x, 0.0, 4.0).long(),
        lambda x: (x.unsqueeze(-1) > torch.arange(4.0)).sum(-1),
        lambda x: x.long().abs().clamp(max=4),
        lambda x: torch.min(torch.max(x.long(), torch.tensor(0)), torch.tensor(4)),
        lambda x: x.long() & 3,
        lambda x: (x.long() & 31) >> 3,
        lambda x: torch.div(x.long() & 15, 4, rounding_mode="floor"),
        lambda x: (x.long() & 15) // 4,
        lambda x: torch.tensor([0, 4]),
        lambda x: x.argmax(-1),
    ],
)
@pytest.mark.parametrize("is_decomposed", [False, True])
def test_classes_that_are_in_range_are_not_named(indices: Callable[[Tensor], Tensor], is_decomposed: bool) -> None:
    program = torch.export.export(Function(lambda x: F.one_hot(indices(x), 5) * x.sum().long()), (torch.rand(2, 5),))
    assert assertions.describe(program.run_decompositions() if is_decomposed else program, "forward") == ""


@pytest.mark.parametrize(
    "indices",
    [
        lambda x: (x.sigmoid() * 5).long(),
        lambda x: (x.tanh() * 4).long(),
        lambda x: F.hardtanh(x, 0.0, 5.0).long(),
        lambda x: (x.unsqueeze(-1) > torch.arange(5.0)).sum(-1),
        lambda x: x.long() & 7,
        lambda x: (x.long() & 15) // 3,
        lambda x: x.long() % 5,
        lambda x: torch.min(x.long(), torch.tensor(4)),
        lambda x: torch.tensor([0, 5]) * x[:, 0].long(),
    ],
)
@pytest.mark.parametrize("is_decomposed", [False, True])
def test_classes_that_may_be_outside_are_named(indices: Callable[[Tensor], Tensor], is_decomposed: bool) -> None:
    program = torch.export.export(Function(lambda x: F.one_hot(indices(x), 5)), (torch.rand(2, 5),))
    message = assertions.describe(program.run_decompositions() if is_decomposed else program, "forward")
    assert ("one_hot: Class values must be" if is_decomposed else "values from 0 to 4 at ") in message


@pytest.mark.parametrize(
    "indices",
    [
        lambda m, x: x.argmax(-1) + 1,
        lambda m, x: x.topk(2).indices - 1,
        lambda m, x: m.calls.add_(1),
        lambda m, x: m.calls.sub_(1),
        lambda m, x: torch.zeros(2, dtype=torch.long).copy_(x[:, 0].long()),
        lambda m, x: (x.long() - 9) % 5,
    ],
)
def test_indices_that_may_leave_their_range_are_named(indices: Callable[[Any, Tensor], Tensor]) -> None:
    class Model(Bounded):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return torch.nn.functional.one_hot(indices(self, x), 5)

    assert "values from 0 to 4" in assertions.describe(torch.export.export(Model().eval(), (torch.rand(2, 5),)), "forward")
