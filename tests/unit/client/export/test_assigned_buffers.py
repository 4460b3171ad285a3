"""What a model assigns to its buffers is kept from call to call, also in submodules, of which torch.export forgets it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source
from etfarm.wire.shared_state import PREFIX
from etfarm.wire.written_inputs import written_inputs
from tests.support.exports import export_called, read_program


class State(nn.Module):
    """Two buffers."""

    n: Tensor
    m: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(2))
        self.register_buffer("m", torch.ones(2))


class Step(nn.Module):
    """A call that changes the state of a submodule, or its own."""

    def __init__(self, body: Callable[[Any, Tensor], Any], state: State | None) -> None:
        super().__init__()
        self.body = body
        if state is None:
            self.register_buffer("n", torch.zeros(2))
            self.register_buffer("m", torch.ones(2))
        self.state = state

    def forward(self, x: Tensor) -> Any:
        return self.body(self.state if self.state is not None else self, x)


def accumulate(state: Any, x: Tensor) -> Tensor:
    state.n = state.n + x
    state.n = state.n * 2
    return state.n + 1


def delay(state: Any, x: Tensor) -> dict[str, Tensor]:
    former = state.n
    state.n = x
    return {"former": former, "difference": x - former}


def swap(state: Any, x: Tensor) -> Tensor:
    state.n, state.m = state.m, state.n
    return state.n * x


def add(state: Any, x: Tensor) -> Tensor:
    former = state.n
    state.n += x
    return former * state.n


def read(state: Any, x: Tensor) -> Tensor:
    return state.n * x


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("body", [accumulate, delay, swap, add])
def test_calls_give_what_eager_pytorch_gives(body: Callable[[Any, Tensor], Any], is_nested: bool) -> None:
    step = Step(body, State() if is_nested else None).eval()
    eager = copy.deepcopy(step)
    program = export_called(ModelSource.of(step, (torch.ones(2),)))
    for x in torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]]):
        torch.testing.assert_close(program(x.clone()), eager(x.clone()))
    assert all(value.tolist() in ([0, 0], [1, 1]) for value in step.buffers()), "the model is unchanged"


@pytest.mark.parametrize("body", [accumulate, delay, swap, add])
def test_a_buffer_that_is_none_does_not_move_what_is_assigned_to_the_next_one(body: Callable[[Any, Tensor], Any]) -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", None)
            self.register_buffer("n", torch.zeros(2))
            self.register_buffer("m", torch.ones(2))

        def forward(self, x: Tensor) -> Any:
            return body(self, x), self.m * 2

    module = Optional().eval()
    eager = copy.deepcopy(module)
    program = export_called(ModelSource.of(module, (torch.ones(2),)))
    for x in torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]]):
        torch.testing.assert_close(program(x.clone()), eager(x.clone()))


def test_what_is_assigned_to_a_buffer_that_is_none_is_not_written_to_an_input() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("former", None)

        def forward(self, x: Tensor) -> Tensor:
            y = x[:1] if self.former is None else x[:1] + self.former
            self.former = y * 2
            return y

    sentences = list[str]()
    model = export_source(ModelSource.of(Late().eval(), (torch.ones(2),)), name="m", say=sentences.append)
    assert written_inputs(read_program(model.methods["forward"].pt2)) == {}
    assert sentences == [
        "The program forgets what the model keeps in self.former: make that a buffer, and write to it with copy_()."
    ]


def test_an_assigned_buffer_is_shared() -> None:
    state, x = State(), (torch.ones(2),)
    methods: dict[str, nn.Module] = {"step": Step(accumulate, state).eval(), "read": Step(read, state).eval()}
    model = export_source(ModelSource(methods=methods, example_inputs={"step": x, "read": x}), name="m")
    assert model.calls == (("step", None), ("read", None))
    programs = [read_program(method.pt2) for method in model.methods.values()]
    assert all(f"{PREFIX}state.n" in program.state_dict for program in programs)


def test_a_strict_export_that_forgets_an_assignment_is_announced() -> None:
    def write_and_assign(state: Any, x: Tensor) -> Tensor:
        state.m.add_(x)
        state.n = state.n + x
        return state.n * state.m

    step, sentences = Step(write_and_assign, State()).eval(), list[str]()
    step.other = step.state  # two names of one buffer, for which a strict export is needed
    export_source(ModelSource.of(step, (torch.ones(2),)), name="m", say=sentences.append)
    assert "strict = true" in sentences[0]
    assert sentences[1:] == ["That program forgets what the model assigns to other.n, state.n: write to it with copy_()."]


def test_a_write_in_place_is_not_taken_for_an_assignment_that_a_strict_export_forgets() -> None:
    class Sums(nn.Module):
        n: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(2))
            self.sums = [torch.zeros(2)]  # for which a strict export is needed

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.n += x
            self.sums[0].add_(x)
            return self.n * 2, self.sums[0] * 3

    sums, sentences = Sums().eval(), list[str]()
    eager = copy.deepcopy(sums)
    model = export_source(ModelSource.of(sums, (torch.ones(2),)), name="m", say=sentences.append)
    assert model.methods["forward"].forgotten == () and len(sentences) == 1 and "strict = true" in sentences[0]
    program = read_program(model.methods["forward"].pt2).module()
    for x in torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]]):
        torch.testing.assert_close(program(x), eager(x))


def test_an_assignment_of_another_shape_is_said() -> None:
    def grow(state: Any, x: Tensor) -> Tensor:
        state.n = torch.cat([state.n, x])
        return state.n * 1

    sentences: list[str] = []
    model = export_source(ModelSource.of(Step(grow, State()).eval(), (torch.ones(2),)), name="m", say=sentences.append)
    assert model.methods["forward"].forgotten == ("state.n",)
    assert sentences == ["The program forgets what the model assigns to its buffer state.n: a tensor of another shape or dtype."]


def test_an_assignment_of_none_is_said() -> None:
    def drop(state: Any, x: Tensor) -> Tensor:
        y = state.n + x
        state.n = None
        return y

    sentences: list[str] = []
    export_source(ModelSource.of(Step(drop, State()).eval(), (torch.ones(2),)), name="m", say=sentences.append)
    assert sentences == ["The program forgets what the model assigns to its buffer state.n: None."]
