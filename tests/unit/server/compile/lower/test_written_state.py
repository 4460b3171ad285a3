"""Which values that a program writes to buffers are copied first: those that another write may change, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etfarm.server.compile.lower.written_state import cast_copies, copy_values, return_values
from etfarm.server.workers.pool import Workers
from tests.support.compiling import STATIC, compiled, sample, sqnr_db


class Model(nn.Module):
    """Has buffers and a layer."""

    a: Tensor
    b: Tensor
    wide: Tensor
    square: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer = body, nn.Linear(3, 3)
        for name, *shape in (("a", 3), ("b", 3), ("wide", 6), ("square", 3, 3)):
            self.register_buffer(name, torch.zeros(shape))

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


def assigned(model: Model, x: Tensor) -> Tensor:
    model.a += (model.layer(x) - model.a) * 0.5
    return model.a.clone()


def written_later(model: Model, x: Tensor) -> Tensor:
    value = x * 2
    old = value.clone()
    model.a.copy_(value)
    return old


def transposed(model: Model, x: Tensor) -> Tensor:
    model.square[0] += x
    turned = model.square.t()
    old = turned.clone()
    model.square = turned
    return old


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
        (viewed, False, 1), (viewed, True, 1), (in_region, False, 1), (assigned, False, 0), (assigned, True, 0),
        (written_later, False, 0), (written_later, True, 0), (transposed, False, 1), (transposed, True, 0),
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
    exported = program.run_decompositions({}).module()  # torch itself refuses to write a tensor's transpose to it
    for _ in range(2):
        assert torch.equal(exported(x), model(x))


class Cast(nn.Module):
    """Has a state in half precision, and one of integers."""

    state: Tensor
    count: Tensor

    def __init__(self, body: Callable[[Cast, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer = body, nn.Linear(16, 16)
        self.register_buffer("state", torch.zeros(1, 16, dtype=torch.float16))
        self.register_buffer("count", torch.zeros(1, 16, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def last(m: Cast, x: Tensor) -> Tensor:
    y = m.layer(x + m.state.float())
    m.state.copy_(x)
    return y + m.state.float()


def not_read(m: Cast, x: Tensor) -> Tensor:
    y = m.layer(x) + m.count
    m.count.copy_(x * 3)
    return y


def in_part(m: Cast, x: Tensor) -> Tensor:
    m.state[:, 3:5] = x[:, 3:5]
    m.count[:, :] = m.state.float() * 3
    return m.layer(x) + m.count.float()


def without_gradients(m: Cast, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.copy_(x)
    return m.layer(x) - m.state.float()


CASTS = [last, not_read, in_part, without_gradients]


@pytest.mark.parametrize("body", CASTS)
def test_values_that_are_copied_to_another_dtype_are_cast(body: Callable[[Cast, Tensor], Tensor]) -> None:
    program, model = torch.export.export(Cast(body).eval(), (torch.rand(1, 16),)), Cast(body).eval()
    cast_copies(program)
    functional = program.run_decompositions({}).module()
    for _ in range(3):
        x = torch.randn(1, 16)
        assert torch.equal(functional(x), model(x))


@pytest.mark.slow(reason="compiles")
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("make", "shape"),
    [*((partial(Cast, body), (1, 16)) for body in CASTS), (partial(Model, assigned), (3,)), (partial(Model, average), (3,))],
)
@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32", STATIC])
async def test_written_state_is_as_in_eager_mode(
    make: Callable[[], nn.Module], shape: tuple[int, ...], recipe: str, workers: Workers, tmp_path: Path
) -> None:
    from executorch.runtime import Runtime

    calls = [torch.randn(shape) for _ in range(8)]
    files = [sample(tmp_path / f"{index}.ett", x) for index, x in enumerate(calls)]
    answer = await compiled(
        workers, tmp_path / "compiled", lambda: torch.export.export(make().eval(), (calls[0],)), recipe,
        calibration={"forward": files},
    )  # fmt: skip
    method = Runtime.get().load_program(answer.pte).load_method("forward")
    assert method is not None
    model = make().eval()
    with torch.no_grad():
        results = [(model(x), method.execute((x,))[0].clone()) for x in calls]
    expected, actual = (torch.cat(each) for each in zip(*results, strict=True))
    assert sqnr_db(expected, actual) > (25 if recipe == STATIC else 100)
