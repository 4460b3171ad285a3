"""Writes to what operators return that view their tensor, though their schemas do not say so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from etfarm.client.export import ModelSource, export_source
from etfarm.wire.shared_state import written_buffers
from tests.support.exports import export_program, read_program
from tests.support.refusals import refuses


class Model(nn.Module):
    """Has a state, and a body that writes to views."""

    state: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.line, self.dropout = nn.Linear(4, 4), nn.Dropout()
        self.register_buffer("state", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def to_the_view(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    torch.einsum("bchw->bhwc", y)[..., :2] = 0.0
    return m.line(y)


def to_the_tensor(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    last = torch.einsum("b ... -> ... b", y)
    y.mul_(2)
    return last, y


def to_a_diagonal(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    diagonal = torch.einsum("...iji->...ji", y)
    diagonal *= 3
    return y, diagonal


def in_the_order_of_letters(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    torch.einsum("d...cb", y)[0].mul_(3)
    return y


def to_a_sum(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    total = torch.einsum("biji->j", y)
    total += 2
    return y, total


def to_a_product(m: Any, x: Tensor) -> Any:
    y = torch.einsum("bchw,wk->bchk", x, m.line.weight)
    y[0] += 1
    return y + x


def after_a_dropout(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    z = m.dropout(y)
    z += 2
    return y * z, nn.functional.alpha_dropout(z, training=False)


def to_a_state(m: Any, x: Tensor) -> Any:
    torch.einsum("ij->ji", m.state)[0].add_(1)
    return x + m.state


def without_writes(m: Any, x: Tensor) -> Any:
    return torch.einsum("bchw->bhwc", m.dropout(x))


def to_the_tensor_of_a_grid(m: Any, x: Tensor) -> Any:
    y = m.line(x[0, 0])
    rows, columns = torch.meshgrid(y[0], y[1, :3], indexing="ij")
    y.mul_(2)
    return rows + columns


def to_a_part_of_a_grid(m: Any, x: Tensor) -> Any:
    y = m.line(x[0, 0])
    rows, columns = torch.meshgrid(y[0], y[1, :3], indexing="xy")
    rows[0, 0] = 5.0
    return y, rows * columns


def to_a_broadcast(m: Any, x: Tensor) -> Any:
    y = m.line(x[0, 0])
    wide, _ = torch.broadcast_tensors(y[:1], x[0, 0])
    wide[0].mul_(2)
    return y, wide * 1


def clone_of_a_grid(m: Any, x: Tensor) -> Any:
    rows = torch.meshgrid(x[0, 0, 0], x[0, 0, 1], indexing="ij")[0].clone()
    rows[0] = 5.0
    return rows * x[0, 0]


BODIES = (
    to_the_tensor_of_a_grid, to_a_part_of_a_grid, to_a_broadcast, clone_of_a_grid,
    to_the_view, to_the_tensor, to_a_diagonal, in_the_order_of_letters, to_a_sum, to_a_product, after_a_dropout, to_a_state,
    without_writes,
)  # fmt: skip


def saved(model: nn.Module, x: Tensor) -> Any:
    method = export_source(ModelSource.of(copy.deepcopy(model), (x,)), name="m").methods["forward"]
    assert isinstance(method.pt2, bytes) and not method.differs
    return read_program(method.pt2)


@pytest.mark.parametrize("table", [None, {}])
@pytest.mark.parametrize("body", BODIES)
def test_what_is_written_to_a_view_is_read_after_decomposition(body: Any, table: Any) -> None:
    model, x = Model(body).eval(), torch.randn(2, 4, 4, 4)
    program = saved(model, x)
    lowered = program.run_decompositions(table).module()
    for _ in range(2):
        expected, actual = pytree.tree_leaves(model(x)), pytree.tree_leaves(lowered(x))
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(expected, actual, strict=True))


def grid(m: Any, x: Tensor) -> Any:
    rows, columns = torch.meshgrid(x[0, 0, 0], x[0, 0, 1], indexing="ij")
    rows[0] = 5.0
    return rows + columns


def expanded(m: Any, x: Tensor) -> Any:
    return m.line(x)[:1].expand(4, 4, 4, 4).mul_(2)


@pytest.mark.parametrize("body", [grid, expanded])
def test_writes_that_eager_mode_refuses_are_to_be_made_to_a_clone(body: Any) -> None:
    model, x = Model(body).eval(), torch.randn(2, 4, 4, 4)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        model(x)
    with refuses("EXPORT_FAILED", match=r"test_written_views\.py:\d+ .*whose elements share memory") as caught:
        saved(model, x)
    assert "before you write to it: y = y.clone()" in caught.value.remedy  # as `clone_of_a_grid` does


def test_a_grid_of_dynamic_sizes_keeps_them() -> None:
    model, x = Model(to_the_tensor_of_a_grid_of_all).eval(), torch.randn(5, 4)
    source = ModelSource.of(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2, max=9)}})
    program = export_program(source).run_decompositions({}).module()
    for size in (2, 9):
        x = torch.randn(size, 4)
        assert torch.allclose(model(x), program(x), atol=1e-6)


def to_the_tensor_of_a_grid_of_all(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    rows, columns = torch.meshgrid(y[:, 0], y[0], indexing="ij")
    y.mul_(2)
    return rows + columns


@pytest.mark.parametrize(("body", "names"), [(to_a_state, {"state"}), (to_the_view, set())])
def test_a_buffer_that_is_written_through_einsum_is_changed(body: Any, names: set[str]) -> None:
    program = torch.export.export(Model(body).eval(), (torch.randn(2, 4, 4, 4),))
    assert written_buffers(program) == names


def test_a_program_that_writes_nothing_is_left_as_it_is() -> None:
    targets = {str(node.target) for node in saved(Model(without_writes).eval(), torch.randn(2, 4, 4, 4)).graph.nodes}
    assert targets >= {"aten.einsum.default", "aten.dropout.default"}


class Normalized(nn.Module):
    """Writes to the sums of its filters, not to these."""

    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        sums = self.filters.sum(1)
        sums.clamp_(min=1e-5)
        return nn.functional.linear(x, self.filters) / sums


def test_a_buffer_is_not_changed_by_writes_to_what_is_computed_from_it() -> None:
    assert not written_buffers(torch.export.export(Normalized().eval(), (torch.rand(3, 4),)))


def halves(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    first, last = y.chunk(2, 1)
    first.tanh_()
    last.clamp_(-0.1, 0.1)
    return y


def rows(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    for row in y.unbind(0):
        row.relu_()
    m.state = m.state + 1
    return y + m.state


def of_no_gradients(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    with torch.no_grad():
        row = y[0]
    row.mul_(3)
    return y


@pytest.mark.parametrize("body", [halves, rows, of_no_gradients])
def test_writes_that_only_gradients_forbid_are_part_of_the_program(body: Any) -> None:
    model, x = Model(body).eval(), torch.randn(2, 4, 4, 4)
    with pytest.raises(RuntimeError):
        torch.export.export(copy.deepcopy(model), (x,))
    program = saved(model, x).run_decompositions({}).module()
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(model(x), program(x), atol=1e-6)


def weight(m: Any, x: Tensor) -> Any:
    m.line.bias.add_(1)
    return m.line(x)


def part_of_a_weight(m: Any, x: Tensor) -> Any:
    m.line.bias[:2].add_(1)
    return m.line(x)


@pytest.mark.parametrize("body", [weight, part_of_a_weight])
def test_weights_are_to_be_written_without_gradients(body: Any) -> None:
    def without_gradients(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            return body(m, x)

    x = torch.randn(2, 4, 4, 4)
    with refuses("EXPORT_FAILED", match=r"leaf Variable.* `with torch\.no_grad\(\):`"):
        saved(Model(body).eval(), x)
    model = Model(without_gradients).eval()
    program = saved(model, x).run_decompositions({}).module()
    assert all(torch.allclose(model(x), program(x), atol=1e-6) for _ in range(2))


def test_other_errors_are_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(m: Any, x: Tensor) -> Any:
        raise RuntimeError("my own")

    export, modes = torch.export.export, list[bool]()

    def counted(*args: Any, **options: Any) -> Any:
        modes.append(torch.is_grad_enabled())
        return export(*args, **options)

    monkeypatch.setattr(torch.export, "export", counted)
    x = torch.randn(2, 4, 4, 4)
    with refuses("EXPORT_FAILED", match="my own"):
        saved(Model(failing).eval(), x)
    assert modes == [True]
    saved(Model(halves).eval(), x)
    assert modes == [True, True, False]
