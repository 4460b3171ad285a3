"""Models that change a buffer under two names, or by another way, which only a strict export can lower."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source
from etfarm.client.export.mutation import find_shared_buffers
from tests.support.exports import read_program


class Tied(nn.Module):
    """A state that two modules hold, as a cache that a model shares with its attention."""

    state: Tensor
    alias: Tensor

    def __init__(self, *, changed: bool = True) -> None:
        super().__init__()
        state = torch.zeros(3)
        self.register_buffer("state", state)
        self.register_buffer("alias", state)
        self.changed = changed

    def forward(self, x: Tensor) -> Tensor:
        if self.changed:
            self.state.add_(x)
        return x + self.alias + self.state


def test_a_buffer_with_two_names_is_exported_strictly_which_is_reported() -> None:
    lines: list[str] = []
    exported = export_source(ModelSource.of(Tied().eval(), (torch.ones(3),)), name="m", say=lines.append)
    (line,) = lines
    assert "strict = true" in line and "state" in line and "alias" in line
    program = read_program(exported.methods["forward"].pt2)
    assert not find_shared_buffers(program)
    lowerable = program.run_decompositions()
    assert torch.equal(lowerable.module()(torch.ones(3)), torch.full((3,), 3.0))


def test_a_shared_buffer_that_is_only_read_stays_as_it_is() -> None:
    lines: list[str] = []
    export_source(ModelSource.of(Tied(changed=False).eval(), (torch.ones(3),)), name="m", say=lines.append)
    assert not lines


class Parts(nn.Module):
    """A cache whose parts are buffers, which share memory but no element."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)

    def forward(self, x: Tensor) -> Tensor:
        self.keys.add_(x)
        self.values.add_(x)
        return self.keys + self.values


@pytest.mark.parametrize("dim", [0, 1], ids=["in a row", "interleaved"])
def test_parts_of_one_tensor_are_several_buffers(dim: int) -> None:
    cache = torch.zeros(4, 4)
    lines: list[str] = []
    source = ModelSource.of(Parts(*cache.split(2, dim)).eval(), (torch.ones(cache.split(2, dim)[0].shape),))
    exported = export_source(source, name="m", say=lines.append)
    assert not lines
    program = read_program(exported.methods["forward"].pt2)
    (example,), _ = program.example_inputs
    assert torch.equal(program.run_decompositions().module()(example), torch.full(example.shape, 2.0))


def test_views_of_one_memory_are_not_exported_again_since_a_strict_export_has_both_too() -> None:
    cache = torch.zeros(4)
    lines: list[str] = []
    export_source(ModelSource.of(Parts(cache[:3], cache[1:]).eval(), (torch.ones(3),)), name="m", say=lines.append)
    assert not lines


class Cache:
    """An object that is no module."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Hidden(nn.Module):
    """A buffer that is changed by way of an object, as caches of transformers are."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.cache = Cache(self.total)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0])  # becomes a constant, of which a copy is changed
        scale.mul_(2.0)
        self.cache.values.add_(x)
        return self.cache.values * scale


def test_a_buffer_that_is_changed_by_way_of_an_object_is_exported_strictly() -> None:
    lines: list[str] = []
    exported = export_source(ModelSource.of(Hidden().eval(), (torch.ones(3),)), name="m", say=lines.append)
    (line,) = lines
    assert "strict = true" in line and "does not reach as buffers" in line
    program = read_program(exported.methods["forward"].pt2)
    assert list(program.run_decompositions().graph_signature.buffers_to_mutate.values()) == ["total"]


class Scratch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0]).add_(x)


def test_a_changed_copy_of_a_constant_is_no_state() -> None:
    lines: list[str] = []
    export_source(ModelSource.of(Scratch().eval(), (torch.ones(3),)), name="m", say=lines.append)
    assert not lines
