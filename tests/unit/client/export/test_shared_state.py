"""Buffers that are one object in several methods have one name in their programs, if a method writes to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from etfarm.client.export import ExportedMethod, ModelSource, export_source
from etfarm.client.submit.preparation import prepare
from etfarm.client.submit.prepared import PreparedMethod
from etfarm.wire import tensors
from etfarm.wire.recipes import from_toml
from etfarm.wire.shared_state import PREFIX, buffer_names
from tests.support.exports import read_program
from tests.support.refusals import refuses
from tests.support.shared_state import Add, Get, Holder, counter


def buffers(methods: Mapping[str, ExportedMethod | PreparedMethod]) -> dict[str, set[str]]:
    programs = {name: read_program(method.pt2) for name, method in methods.items()}
    for program in programs.values():
        program.module()(torch.ones(2))
    return {name: set(buffer_names(program).values()) for name, program in programs.items()}


def two(first: nn.Module, second: nn.Module) -> ModelSource:
    methods = {"a": first.eval(), "b": second.eval()}
    return ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.ones(2),)))


def test_a_buffer_has_one_name_in_all_methods() -> None:
    source = counter()
    model = export_source(source, name="m")
    shared = f"{PREFIX}state.n"
    assert buffers(model.methods) == {"set": {shared, "own"}, "add": {shared, "own"}, "get": {shared}}
    assert model.calls == (("set", None), ("add", None), ("get", None))
    assert dict(source.methods["get"].named_buffers()).keys() == {"held.n"}, "the modules are unchanged"


@pytest.mark.parametrize("source", [two(Add(Holder()), Add(Holder())), two(Get(shared := Holder()), Get(shared))])
def test_buffers_of_their_own_and_constants_keep_their_names(source: ModelSource) -> None:
    model = export_source(source, name="m")
    assert not any(name.startswith(PREFIX) for names in buffers(model.methods).values() for name in names)
    assert model.calls == ()


class Part(nn.Module):
    """Reads a row of the memory."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.held = holder

    def forward(self, x: Any) -> Any:
        return self.held.n[0] * x


@pytest.mark.remedy("STATE_NOT_SHARED")
def test_a_view_of_another_methods_buffer_is_refused_unless_each_has_its_own() -> None:
    first, second = Holder(), Holder()
    second.n = first.n[None]
    source = two(Add(first), Get(second))
    with refuses("STATE_NOT_SHARED") as refused:
        prepare(source, recipes=["portable"])
    assert refused.value.metadata.items() >= {"buffer": "a: counter.n", "methods": "a,b"}.items()
    assert "share_mutable_buffers = false" in refused.value.remedy and "such as self.cache[0]" in refused.value.remedy
    sentences: list[str] = []
    own = from_toml('recipe = "portable"\n[executorch]\nshare_mutable_buffers = false\n')
    prepare(source, recipes=[own], say=sentences.append)
    assert "a: counter.n and b: held.n are different views of one memory: each method has a state of its own there." in sentences
    # As the remedy says: one buffer, of which forward takes the parts.
    memory = Holder()
    model = export_source(two(Add(memory), Part(memory)), name="m")
    assert model.calls == (("a", None), ("b", None))


def test_views_of_one_memory_in_exported_programs_are_refused() -> None:
    first, second = Holder(), Holder()
    second.n = first.n[None]
    programs = {
        name: torch.export.export(module, (torch.ones(2),)) for name, module in two(Add(first), Get(second)).methods.items()
    }
    with refuses("STATE_NOT_SHARED") as refused:
        prepare(programs)
    assert "recipe" not in refused.value.remedy


def test_parts_of_one_memory_that_do_not_overlap_are_states_of_their_own() -> None:
    (first, second), pool = (Holder(), Holder()), torch.zeros(4)
    first.n, second.n = pool[:2], pool[2:]
    sentences: list[str] = []
    export_source(two(Add(first), Get(second)), name="m", say=sentences.append)
    assert sentences == []


class Reach(nn.Module):
    """Reads the buffer by a list, of which torch.export knows nothing."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.reached = [holder]

    def forward(self, x: Any) -> Any:
        return self.reached[0].n * x


def test_a_buffer_that_a_method_reaches_by_a_list_is_shared() -> None:
    holder = Holder()
    model = export_source(two(Add(holder), Reach(holder)), name="m")
    shared = f"{PREFIX}counter.n"
    assert buffers(model.methods) == {"a": {shared, "own"}, "b": {shared}}
    assert model.calls == (("a", None), ("b", None))


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_buffer_of_several_exported_programs_has_one_name(decomposed: bool) -> None:
    source = counter()
    programs = {name: torch.export.export(module, (torch.ones(2),)) for name, module in source.methods.items()}
    if decomposed:
        programs = {name: program.run_decompositions() for name, program in programs.items()}
    before = {name: (str(program.graph_signature), list(program.state_dict)) for name, program in programs.items()}
    methods = prepare(programs).methods
    shared = f"{PREFIX}state.n"
    assert buffers(methods) == {"set": {shared, "own"}, "add": {shared, "own"}, "get": {shared}}
    after = {name: (str(program.graph_signature), list(program.state_dict)) for name, program in programs.items()}
    assert after == before, "the user's programs are unchanged"
    programs["get"].module()(torch.ones(2))


class Plain:
    """Holds a tensor, and is no module."""

    def __init__(self) -> None:
        self.n = torch.zeros(2)


class Advance(Reach):
    """Adds to the tensor, reached in the same way."""

    def forward(self, x: Any) -> Any:
        self.reached[0].n.add_(x)
        return self.reached[0].n * 1


@pytest.mark.parametrize("holder", [Holder(), Plain()])
def test_a_tensor_that_no_method_reaches_as_a_buffer_is_written_and_shared(holder: Any) -> None:
    model = export_source(two(Advance(holder), Reach(holder)), name="m")
    (shared,) = buffers(model.methods)["b"]
    assert shared.startswith(PREFIX) and buffers(model.methods)["a"] == {shared}
    program = read_program(model.methods["a"].pt2).module()
    assert [program(torch.ones(2)).tolist() for _ in range(2)] == [[1, 1], [2, 2]]


def test_two_buffers_of_one_name_have_different_ones() -> None:
    one, other = Holder(), Holder()
    methods: dict[str, Any] = {"a": Add(one), "b": Get(one), "c": Add(other), "d": Get(other)}
    source = ModelSource(
        methods={k: m.eval() for k, m in methods.items()}, example_inputs=dict.fromkeys(methods, (torch.ones(2),))
    )
    names = buffers(export_source(source, name="m").methods)
    assert names["a"] == {f"{PREFIX}counter.n", "own"} and names["b"] == {f"{PREFIX}counter.n"}
    assert names["c"] == {f"{PREFIX}c.counter.n", "own"} and names["d"] == {f"{PREFIX}c.counter.n"}


def test_calls_are_sent_with_their_inputs() -> None:
    calls = [("set", (torch.full((2,), 5.0),)), ("add", (torch.ones(2),))]
    model = export_source(counter(calls=calls), name="m")
    assert [method for method, _ in model.calls] == ["set", "add"]
    (value,) = tensors.decode(model.calls[0][1])  # type: ignore[arg-type]
    assert value.name == "x" and tensors.to_array(value).tolist() == [5.0, 5.0]  # type: ignore[arg-type]


def test_a_call_that_is_not_like_the_example_inputs_is_named() -> None:
    calls = [("add", (torch.ones(2),)), ("set", (torch.ones(2, dtype=torch.int64),))]
    with refuses("BAD_MODEL_SOURCE", match=r"calls\[1\] differs from the example inputs of set: '0' is torch.int64"):
        export_source(counter(calls=calls), name="m")


@pytest.mark.parametrize("calls", [[("step", (torch.ones(2),))], [("set", (torch.ones(2),))] * 65, ["set", "get"]])
def test_calls_of_other_methods_too_many_and_what_is_no_call_are_refused(calls: Any) -> None:
    with refuses("BAD_MODEL_SOURCE"):
        counter(calls=calls)
