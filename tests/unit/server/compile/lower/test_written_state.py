"""Which values that a program writes to buffers are copied first: those that another write may change, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etfarm.server.compile.lower.written_state import copy_values, return_values


class Model(nn.Module):
    """Has three buffers."""

    a: Tensor
    b: Tensor
    wide: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        for name, width in (("a", 3), ("b", 3), ("wide", 6)):
            self.register_buffer(name, torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def delay(model: Model, x: Tensor) -> Tensor:
    y = x + model.b
    model.b.copy_(model.a)
    model.a.copy_(x)
    return y


def twice(model: Model, x: Tensor) -> Tensor:
    value = x * 3
    model.a.copy_(value)
    model.b.copy_(value)
    return value + model.a


def keep(model: Model, x: Tensor) -> Tensor:
    y = x + model.a
    model.a.copy_(x)
    return y


def put(model: Model, x: Tensor) -> Tensor:
    model.wide[:3] = x.view(3)
    return model.wide * 2


def local(model: Model, x: Tensor) -> Tensor:
    y = torch.zeros(6)
    y[:3] = x
    return y * 2


@pytest.mark.parametrize(
    ("body", "functional", "copies"),
    [
        (delay, False, 1), (delay, True, 1), (twice, False, 1), (keep, False, 0), (keep, True, 0), (put, False, 0),
        (put, True, 0), (local, False, 0), (local, True, 0),
    ],
)  # fmt: skip
def test_only_what_another_write_may_change_is_copied(
    body: Callable[[Any, Tensor], Tensor], functional: bool, copies: int
) -> None:
    program = torch.export.export(Model(body).eval(), (torch.rand(3),))
    if functional:
        program = program.run_decompositions()
    copy_values(program)
    clones = [node for node in program.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert len(clones) == copies
    x = torch.rand(3)
    assert torch.equal(program.module()(x), Model(body)(x))


def average(model: Model, x: Tensor) -> Tensor:
    model.a.mul_(0.5).add_(x)
    return model.a.clone()


def before(model: Model, x: Tensor) -> Tensor:
    value = model.a + x
    old = value.clone()
    value.mul_(2)
    model.a.copy_(value)
    return old


def viewed(model: Model, x: Tensor) -> Tensor:
    old = model.a.view(-1).clone()
    model.a.copy_(x)
    return old


def in_region(model: Model, x: Tensor) -> Tensor:
    value = x * 2
    old = value.clone()
    with torch.no_grad():
        value.add_(1)
    return old


def detached(model: Model, x: Tensor) -> Tensor:
    return (x * 2).detach().clone()


@pytest.mark.parametrize(
    ("body", "functional", "copies"),
    [
        (average, False, 0), (average, True, 0), (detached, False, 0), (detached, True, 0), (before, False, 1), (before, True, 0),
        (viewed, False, 1), (viewed, True, 1), (in_region, False, 1),
    ],
)  # fmt: skip
def test_only_copies_that_no_write_follows_are_not_returned(
    body: Callable[[Any, Tensor], Tensor], functional: bool, copies: int
) -> None:
    program = torch.export.export(Model(body).eval(), (torch.rand(3),))
    if functional:
        program = program.run_decompositions()
    return_values(program)
    left = [node for node in program.graph.nodes if node.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default)]
    assert len(left) == copies
    x, model = torch.rand(3), Model(body)
    exported = program.module()
    for _ in range(2):
        assert torch.equal(exported(x), model(x))
