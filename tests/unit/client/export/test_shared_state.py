"""Buffers that are one object in several methods have one name in their programs, if a method writes to them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from etfarm.client.export import ExportedModel, ModelSource, export_source
from etfarm.client.export.errors import BadModelSource
from etfarm.wire import tensors
from etfarm.wire.shared_state import PREFIX, buffer_names
from tests.support.shared_state import Add, Get, Holder, counter


def buffers(model: ExportedModel) -> dict[str, set[str]]:
    programs = {name: torch.export.load(io.BytesIO(method.pt2)) for name, method in model.methods.items()}  # type: ignore[arg-type]
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
    assert buffers(model) == {"set": {shared, "own"}, "add": {shared, "own"}, "get": {shared}}
    assert model.calls == (("set", None), ("add", None), ("get", None))
    assert dict(source.methods["get"].named_buffers()).keys() == {"held.n"}, "the modules are unchanged"


@pytest.mark.parametrize("source", [two(Add(Holder()), Add(Holder())), two(Get(shared := Holder()), Get(shared))])
def test_buffers_of_their_own_and_constants_keep_their_names(source: ModelSource) -> None:
    model = export_source(source, name="m")
    assert not any(name.startswith(PREFIX) for names in buffers(model).values() for name in names)
    assert model.calls == ()


def test_two_buffers_of_one_name_have_different_ones() -> None:
    one, other = Holder(), Holder()
    methods: dict[str, Any] = {"a": Add(one), "b": Get(one), "c": Add(other), "d": Get(other)}
    source = ModelSource(
        methods={k: m.eval() for k, m in methods.items()}, example_inputs=dict.fromkeys(methods, (torch.ones(2),))
    )
    names = buffers(export_source(source, name="m"))
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
    with pytest.raises(BadModelSource, match=r"calls\[1\] differs from the example inputs of set: '0' is torch.int64"):
        export_source(counter(calls=calls), name="m")


@pytest.mark.parametrize("calls", [[("step", (torch.ones(2),))], [("set", (torch.ones(2),))] * 65, ["set", "get"]])
def test_calls_of_other_methods_too_many_and_what_is_no_call_are_refused(calls: Any) -> None:
    with pytest.raises(BadModelSource):
        counter(calls=calls)
