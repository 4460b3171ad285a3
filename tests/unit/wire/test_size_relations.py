"""Relations between the sizes of inputs, as torch.export has them, and what inputs break."""

from __future__ import annotations

import io
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.export import Dim

from etfarm.client.submit.input_types import InputMismatch, SizesDoNotFit, require_fitting
from etfarm.server.compile.inputs import SizesDoNotFit as RefusedByServer
from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.inspect.signature import of_exported
from etfarm.wire.pt2 import ArchiveFacts, read_archive
from etfarm.wire.size_relations import find_broken, relations_of
from etfarm.wire.tensors import Tensor

N: Final = Dim("n", min=2, max=16)
K: Final = Dim("k", min=1, max=8)


class Related(nn.Module):
    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return x.reshape(-1, 4).sum(1), a.sum(0), b.sum(0)


class Equal(nn.Module):
    def forward(self, first: torch.Tensor, rest: dict[str, torch.Tensor]) -> Any:
        return first + rest["second"]


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.reshape(3, -1) * 2


_UNKNOWN: Final = ("x.shape[9] == 3", "y.shape[0] == 3", "x.shape[0] // 0 == 3")
"""Relations of sizes that the inputs do not have."""

SHAPES: Final = {"x": {0: 4 * K}, "a": {0: N}, "b": {0: 2 * N + 1}}


def exported(module: nn.Module, *args: Any, **options: Any) -> tuple[ArchiveFacts, Any]:
    """Return what the client and what the server know of an export."""
    program = torch.export.export(module.eval(), args, **options)
    file = io.BytesIO()
    torch.export.save(program, file)
    return read_archive(file.getvalue()), of_exported(program)


def values(facts: ArchiveFacts, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [
        Tensor(name, "float32", shape, bytes(torch.zeros(shape).numpy().nbytes))
        for name, shape in zip(facts.input_names, shapes, strict=True)
    ]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("module", "args", "shapes", "fitting", "broken"),
    [
        (Related(), (torch.ones(8), torch.ones(3, 2), torch.ones(7, 2)), SHAPES, [(32,), (16, 2), (33, 2)], ""),
        (Related(), (torch.ones(8), torch.ones(3, 2), torch.ones(7, 2)), SHAPES, [(6,), (3, 2), (7, 2)], "multiple of 4, got 6"),
        (Related(), (torch.ones(8), torch.ones(3, 2), torch.ones(7, 2)), SHAPES, [(8,), (3, 2), (8, 2)], "b.shape[0] = 8"),
        (Equal(), (torch.ones(3), {"second": torch.ones(3)}), ({0: N}, {"second": {0: N}}), [(5,), (5,)], ""),
        (Equal(), (torch.ones(3), {"second": torch.ones(3)}), ({0: N}, {"second": {0: N}}), [(5,), (4,)], "rest_second.shape[0]"),
        (Rows(), (torch.ones(6),), ({0: Dim.AUTO(min=3, max=30)},), [(9,)], ""),
        (Rows(), (torch.ones(6),), ({0: Dim.AUTO(min=3, max=30)},), [(10,)], "x.shape[0] must be a multiple of 3, got 10"),
    ],
)
def test_client_and_server_refuse_sizes_that_break_a_relation(
    module: nn.Module, args: Any, shapes: Any, fitting: list[tuple[int, ...]], broken: str, strict: bool
) -> None:
    facts, method = exported(module, *args, dynamic_shapes=shapes, strict=strict)
    inputs = values(facts, *fitting)
    if not broken:
        require_fitting("forward", inputs, facts.input_types, facts.relations)
        check_inputs("forward", method, inputs)
        return
    with pytest.raises(SizesDoNotFit) as by_client:
        require_fitting("forward", inputs, facts.input_types, facts.relations)
    with pytest.raises(RefusedByServer) as by_server:
        check_inputs("forward", method, inputs)
    assert broken in by_client.value.message and by_client.value.message == by_server.value.message
    assert by_client.value.reason == by_server.value.reason == "INPUT_MISMATCH"


@pytest.mark.parametrize(("shape", "fits"), [((2,), True), ((16,), True), ((1,), False), ((17,), False)])
def test_a_size_outside_of_its_range_is_refused_with_the_range(shape: tuple[int, ...], fits: bool) -> None:
    facts, _ = exported(Equal(), torch.ones(3), {"second": torch.ones(3)}, dynamic_shapes=({0: N}, {"second": {0: N}}))
    inputs = values(facts, shape, shape)
    if fits:
        require_fitting("forward", inputs, facts.input_types, facts.relations)
        return
    with pytest.raises(InputMismatch, match=r"the model takes float32 \[2\.\.16\]") as refused:
        require_fitting("forward", inputs, facts.input_types, facts.relations)
    assert "in these ranges" in (refused.value.remedy or "")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0", "x.shape[0].__class__ == 1", "9**9**9 == x.shape[0]", "x.shape[0]", "(" * 299,
        "x.shape[0] < 3", "max(x.shape[0]) == 1", "1 << 99 == x.shape[0]", "x.shape[0] == 3" + " " * 300, "'a' * 9 == x.shape[0]",
        *_UNKNOWN, "-" * 280 + "1 == x.shape", "x.shape[0] == y", "\0 == 1",
    ],
)  # fmt: skip
def test_other_text_is_no_relation(text: str) -> None:
    assert find_broken([text], {"x": (5, 5)}) == ""
    assert relations_of({"x": [5, 5]}, [text.replace("x.shape", "L['x'].size()")]) == [] or text in _UNKNOWN


def test_a_relation_of_many_sizes_shows_each() -> None:
    relations = relations_of({"a": ["s0", "s1"], "b": ["s2"]}, ["L['b'].size()[0] == L['a'].size()[0]*L['a'].size()[1]"])
    assert find_broken(relations, {"a": (2, 3), "b": (6,)}) == ""
    assert find_broken(relations, {"a": (2, 3), "b": (5,)}).endswith("got b.shape[0] = 5, a.shape[0] = 2, a.shape[1] = 3")


def test_dims_of_a_symbol_that_no_dim_is_are_related_to_each_other() -> None:
    equal = relations_of({"a": ["2*s0"], "b": ["2*s0"]}, [])
    assert equal == ["a.shape[0] % 2 == 0", "b.shape[0] % 2 == 0", "b.shape[0] == a.shape[0]"]
    relations = relations_of({"a": ["2*s0"], "b": ["3*s0 + 1"], "c": ["s0 - 1"]}, [])
    assert find_broken(relations, {"a": (4,), "b": (7,), "c": (1,)}) == ""
    for broken in ((6, 7, 2), (4, 10, 1), (4, 7, 2)):
        assert find_broken(relations, dict(zip("abc", ((size,) for size in broken), strict=True))), broken


def test_a_guard_that_is_nested_too_deeply_is_left_out() -> None:
    assert relations_of({"x": [5]}, ["-" * 260 + "L['x'].size()[0] == 3", "L['x'].size()[0] == 5"])[-1] == "x.shape[0] == 5"
