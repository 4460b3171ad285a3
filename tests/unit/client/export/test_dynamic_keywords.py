"""Dynamic shapes of arguments that forward takes by `**kwargs`, which torch.export takes in no form."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client.export import ModelSource, export_source
from etfarm.wire.errors import EtfarmError
from tests.support.exports import read_program
from tests.support.refusals import refuses

N: Final = Dim("n", max=8)
ROWS: Final = {0: N}


class Difference(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["x"] - 2 * inputs["y"]


class Mixed(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, scale: Tensor, **others: Any) -> Tensor:
        return x * scale + 2 * rest[0] - others["z"] * others["pair"]["a"]


def rows(n: int) -> Tensor:
    return torch.randn(n, 3)


def program_of(source: ModelSource, strict: bool = False) -> Any:
    (method,) = export_source(source, name="m", strict=strict).methods.values()
    assert isinstance(method.pt2, bytes) and not method.differs
    return read_program(method.pt2).module()


def difference(shapes: Any) -> ModelSource:
    return ModelSource.of(Difference().eval(), (), example_kwargs={"y": rows(4), "x": rows(4)}, dynamic_shapes=shapes)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [{"inputs": {"x": ROWS, "y": ROWS}}, {"x": ROWS, "y": ROWS}, ({"y": ROWS, "x": ROWS},)],
    ids=["below", "beside", "tuple"],
)
def test_each_form_gives_a_program_of_all_sizes(shapes: Any, strict: bool) -> None:
    source = difference(shapes)
    program = program_of(source, strict)
    for n in (2, 5, 8):
        x, y = rows(n), rows(n)
        assert torch.equal(program(x=x, y=y), x - 2 * y)
    assert "forward" not in vars(source.methods["forward"])


@pytest.mark.parametrize("strict", [False, True])
def test_keywords_beside_other_arguments_are_dynamic(strict: bool) -> None:
    def inputs(n: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (rows(n), rows(n)), {"pair": {"a": rows(n), "b": rows(2)}, "scale": rows(1), "z": rows(n)}

    args, kwargs = inputs(4)
    shapes = {"x": ROWS, "rest": (ROWS,), "others": {"z": ROWS, "pair": {"a": ROWS, "b": None}}}
    model = Mixed().eval()
    program = program_of(ModelSource.of(model, args, example_kwargs=kwargs, dynamic_shapes=shapes), strict)
    for n in (2, 8):
        args, kwargs = inputs(n)
        assert torch.allclose(program(*args, **kwargs), model(*args, **kwargs))


def test_keywords_that_are_left_out_are_static() -> None:
    kwargs = {"pair": {"a": rows(1)}, "scale": rows(1), "z": rows(1)}
    shapes = {"x": ROWS, "rest": (ROWS,), "others": None}
    program = program_of(ModelSource.of(Mixed().eval(), (rows(4), rows(4)), example_kwargs=kwargs, dynamic_shapes=shapes))
    assert program(rows(2), rows(2), **kwargs).shape == (2, 3)


@pytest.mark.remedy("DYNAMIC_SHAPES_FORM")
def test_the_form_that_a_refusal_writes_is_taken() -> None:
    class First(nn.Module):
        def forward(self, **inputs: Any) -> Tensor:
            return inputs["pair"][0]["a"] + 1

    kwargs = {"pair": ({"a": rows(4), "b": rows(2)}, rows(2))}
    with refuses("DYNAMIC_SHAPES_FORM", match="names 'inputs', and forward is called with pair") as refused:
        program_of(ModelSource.of(First().eval(), (), example_kwargs=kwargs, dynamic_shapes={"inputs": ROWS}))
    written = eval(remedy_code(refused.value), {"Dim": Dim})
    program = program_of(ModelSource.of(First().eval(), (), example_kwargs=kwargs, dynamic_shapes=written))
    assert program(pair=({"a": rows(7), "b": rows(2)}, rows(2))).shape == (7, 3)


def remedy_code(error: EtfarmError) -> str:
    return error.remedy.removeprefix("Write ").removesuffix(" for forward.")


@pytest.mark.remedy("DYNAMIC_SHAPES_FORM")
def test_a_keyword_that_no_parameter_can_have_needs_another_name() -> None:
    class Sum(nn.Module):
        def forward(self, **inputs: Tensor) -> Tensor:
            first, second = inputs.values()
            return first + second

    def source(name: str) -> ModelSource:
        return ModelSource.of(
            Sum().eval(), (), example_kwargs={name: rows(4), "y": rows(4)}, dynamic_shapes={"inputs": {name: ROWS, "y": ROWS}}
        )

    for name, other in (("a-b", "a_b_0"), ("class", "class_0")):
        with refuses("DYNAMIC_SHAPES_FORM", match=f"forward takes '{name}' by \\*\\*inputs") as refused:
            program_of(source(name))
        assert other in refused.value.remedy
        assert program_of(source(other))(**{other: rows(7), "y": rows(7)}).shape == (7, 3)
