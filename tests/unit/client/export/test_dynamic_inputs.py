"""Dims and numbers that a program cannot have as they are asked for: what is said, and what can be exported instead."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client.export import ModelSource, export_source, splits
from etfarm.client.export import errors as e
from etfarm.wire.errors import EtfarmError
from tests.support.exports import export_called, export_program


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, data: Tensor) -> Tensor:
        self.cache[0 : data.shape[0], 0 : data.shape[1]] = data
        return self.cache * 1


class Except(nn.Module):
    """Multiplies data, except of a size, or of every multiple of it."""

    def __init__(self, size: int, every: bool = False) -> None:
        super().__init__()
        self.size, self.every = size, every

    def forward(self, data: Tensor) -> Tensor:
        length = data.shape[1] % self.size if self.every else data.shape[1] - self.size
        return data * 2 if length != 0 else data


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("model", "low", "high", "example", "remedy", "mended"),
    [
        (Filled(), 2, 8, 5, "a smaller max (7)", (2, 7)),
        (Except(8), 2, 8, 5, "a smaller max (7)", (2, 7)),
        (Except(3), 3, 8, 5, "a larger min (4)", (4, 8)),
        (Except(2), 0, 8, 5, "a larger min (3)", (3, 8)),
        (Except(4), 2, 8, 5, "a larger min (5)", (5, 8)),
        (Except(4), 2, 8, 3, "a smaller max (3)", (2, 3)),
        (Except(4, every=True), 2, 9, 6, "a larger min (5) and a smaller max (7)", (5, 7)),
    ],
)
def test_a_size_that_the_model_excludes_is_reported_with_bounds_that_can_be_exported(
    model: nn.Module, low: int, high: int, example: int, remedy: str, mended: tuple[int, int], strict: bool
) -> None:
    def source(least: int, most: int) -> ModelSource:
        shapes = {"data": {0: Dim("b", min=2, max=4), 1: Dim("s", min=least, max=most)}}
        return ModelSource.of(model.eval(), (torch.ones(3, example),), dynamic_shapes=shapes)

    with pytest.raises(e.DimSpecialized) as caught:
        export_source(source(low, high), name="m", strict=strict)
    assert caught.value.remedy == f"Give the dim {remedy}, or export it as static."
    assert export_source(source(*mended), name="m", strict=strict).methods


class Computed(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, x.shape[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "low", "remedy", "mended"),
    [
        (lambda x, n: x[: min(n, 5)], 2, "a larger min (5)", Dim("n", min=5, max=16)),
        (lambda x, n: x * 2 if n // 2 != 1 else x, 2, "a larger min (4)", Dim("n", min=4, max=16)),
        (lambda x, n: x * 2 if 16 - n != 1 else x, 2, "a smaller max (14)", Dim("n", min=2, max=14)),
        (
            lambda x, n: x[-(n // 2) :], 4, "as a multiple, 2 * Dim('k', min=2, max=8), with example inputs of such a size",
            2 * Dim("k", min=2, max=8),
        ),
    ],
)  # fmt: skip
def test_conditions_on_what_is_computed_of_a_size_have_a_dim_that_can_be_exported(
    body: Any, low: int, remedy: str, mended: Any
) -> None:
    def source(dim: Any) -> ModelSource:
        return ModelSource.of(Computed(body).eval(), (torch.ones(6, 3),), dynamic_shapes={"x": {0: dim}})

    with pytest.raises(e.DimSpecialized) as caught:
        export_source(source(Dim("n", min=low, max=16)), name="m")
    assert caught.value.remedy == f"Give the dim {remedy}, or export it as static."
    assert export_source(source(mended), name="m").methods


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (lambda x, n: torch.eye(8)[:, :n] @ x, "n = Dim('n', max=7)"),  # torch suggests max=8, and excludes 8
        (lambda x, n: F.linear(x.T.contiguous()[None, :, :4], torch.eye(4)), "n = Dim('n', min=5, max=16)"),
        (lambda x, n: x[-4:] @ torch.eye(3).T, "n = Dim('n', min=4, max=16)"),
    ],
)
def test_a_suggested_range_leaves_out_the_sizes_at_its_ends_that_the_model_excludes(body: Any, remedy: str) -> None:
    def source(dim: Any) -> ModelSource:
        return ModelSource.of(Computed(body).eval(), (torch.ones(6, 3),), dynamic_shapes={"x": {0: dim}})

    with pytest.raises(e.DimSpecialized) as caught:
        export_source(source(Dim("n", max=16)), name="m")
    assert caught.value.remedy == f"Write {remedy}, or remove what limits the size from the model."
    assert export_source(source(eval(remedy.partition(" = ")[2], {"Dim": Dim})), name="m").methods


class Upsampled(nn.Module):
    """Strided convolutions and a transposed one, before a layer of the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.head = nn.Conv1d(1, 8, 10, 5), nn.Conv1d(8, 16, 3, 2), nn.Linear(8, 6)
        self.up = nn.ConvTranspose1d(16, 8, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.deep(self.down(x))).transpose(1, 2))


class Reshaped(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y.reshape(x.shape)


@pytest.mark.remedy("DIM_SPECIALIZED")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("model", "inputs", "shapes", "words", "others"),
    [
        (
            Upsampled(), (torch.randn(1, 1, 200),), lambda n: {"x": {2: n(60, 800)}}, "Dim.DYNAMIC(min=60, max=800)",
            [[(1, 1, size)] for size in (60, 200, 333, 800)],
        ),
        (
            Reshaped(), (torch.randn(4, 4), torch.randn(2, 8)), lambda n: {"x": None, "y": {0: n(1, 16), 1: Dim("q", max=16)}},
            "Dim.DYNAMIC(max=16)", [[(4, 4), size] for size in ((2, 8), (4, 4), (8, 2))],
        ),
    ],
    ids=["convolutions", "relation"],
)  # fmt: skip
def test_what_only_a_reshape_excludes_is_exported_with_conditions(
    model: nn.Module, inputs: Any, shapes: Any, words: str, others: Any, strict: bool
) -> None:
    def source(make: Any) -> ModelSource:
        return ModelSource.of(model.eval(), inputs, dynamic_shapes=shapes(make))

    with pytest.raises(e.DimSpecialized) as caught:
        export_source(source(lambda low, high: Dim("n", min=low, max=high)), name="m", strict=strict)
    assert caught.value.remedy.startswith(f"Write {words}, which needs no proof, in place of Dim n, ")
    assert "L[" not in caught.value.message
    called = export_program(source(lambda low, high: eval(words, {"Dim": Dim}))).module(check_guards=False)
    for sizes in others:
        args = [torch.randn(size) for size in sizes]
        torch.testing.assert_close(called(*args), model(*args), atol=1e-5, rtol=1e-4)


def test_a_branch_is_not_left_to_a_condition_beside_a_reshape() -> None:
    def body(x: Tensor, n: int) -> Tensor:
        return Upsampled()(x.reshape(1, 1, -1)) * (2 if n != 300 else 1)

    shapes = {"x": {0: Dim("n", min=60, max=800)}}
    with pytest.raises(e.DimSpecialized) as caught:
        export_source(ModelSource.of(Computed(body).eval(), (torch.ones(200),), dynamic_shapes=shapes), name="m")
    assert "DYNAMIC" not in caught.value.remedy


def joined(body: Any, low: int, high: int) -> ModelSource:
    shapes = {"x": {0: Dim("n", min=low, max=high)}}
    return ModelSource.of(Computed(body).eval(), (torch.ones(6, 3),), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("body", "padded"),
    [
        (lambda x, n: torch.cat([x, torch.zeros(16 - n, 3)]), lambda x, n: F.pad(x, (0, 0, 0, 16 - n))),
        (lambda x, n: torch.cat([x, torch.zeros(-n % 4, 3)]), lambda x, n: F.pad(x, (0, 0, 0, -n % 4))),
    ],
)
def test_a_join_with_what_may_be_empty_is_named_with_a_pad(body: Any, padded: Any) -> None:
    with pytest.raises(e.DimSpecialized) as caught:
        export_source(joined(body, 2, 16), name="m")
    assert re.search(r" at \S+\.py:\d+: torch\.cat gets a tensor that is empty for some", caught.value.message)
    assert caught.value.remedy.startswith("Pad with ") and "pad(y, (0, 0, 0, 16 - n)) for " in caught.value.remedy
    called = export_called(joined(padded, 2, 16))
    for size in (2, 8, 13, 16):
        x = torch.rand(size, 3)
        assert torch.equal(called(x), body(x, size))


def test_the_pad_is_named_where_the_line_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "place_in", lambda text, base: None)
    with pytest.raises(e.DimSpecialized) as caught:
        export_source(joined(lambda x, n: torch.cat([x, torch.zeros(16 - n, 3)]), 2, 16), name="m")
    assert caught.value.remedy.startswith("Pad with ") and "None" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "low", "high"),
    [(lambda x, n: torch.cat([x, torch.zeros(16 - n, 3)]), 2, 14), (lambda x, n: torch.cat([x, x[: n - 2]]), 4, 16)],
)
def test_a_join_with_what_is_long_enough_for_all_sizes_is_exported(body: Any, low: int, high: int) -> None:
    with pytest.raises(e.DimSpecialized) as caught:
        export_source(joined(body, 2, 16), name="m")
    assert "a range in which that tensor always has a size of 2 or more" in caught.value.remedy
    assert export_source(joined(body, low, high), name="m").methods


class Numbers(nn.Module):
    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        return x[:, options["at"][0] :] * options["by"]


class At(nn.Module):
    def forward(self, x: Tensor, start_pos: Any) -> Tensor:
        return x * start_pos


POSITION: Final = "start_pos"


@pytest.mark.parametrize(
    ("module", "inputs", "shapes", "name", "kind"),
    [
        (At(), (4,), {POSITION: Dim.DYNAMIC}, POSITION, "int"),
        (At(), (4,), (None, Dim.DYNAMIC(max=6)), POSITION, "int"),
        (At(), (4,), (None, Dim("p", max=6)), POSITION, "int"),
        (At(), (4,), (None, Dim.AUTO), POSITION, "int"),
        (At(), (0.5,), (None, Dim.DYNAMIC), POSITION, "float"),
        (Numbers(), ({"at": [1], "by": 2},), (None, {"at": [Dim.DYNAMIC], "by": None}), "options_at_0", "int"),
    ],
)
def test_a_number_that_is_to_be_dynamic_is_refused(
    module: nn.Module, inputs: tuple[Any, ...], shapes: Any, name: str, kind: str
) -> None:
    with pytest.raises(EtfarmError) as caught:
        export_source(ModelSource.of(module.eval(), (torch.ones(1, 3), *inputs), dynamic_shapes=shapes), name="m")
    error = caught.value
    assert error.stage == "TORCH_EXPORT"
    assert (error.reason, error.metadata["argument"]) == ("UNSUPPORTED_INPUT", name)
    assert f"input {name!r} is a dynamic {kind}: programs of ExecuTorch take numbers that vary only as tensors" in error.message
    assert ("index with it" if kind == "int" else "torch.tensor(0.5)") in error.remedy


def test_the_remedies_for_dynamic_numbers_can_be_exported() -> None:
    for value, shapes in ((torch.tensor(4), (None, None)), (torch.tensor(0.5), None), (4, (None, None)), (4, (None, Dim.STATIC))):
        source = ModelSource.of(At().eval(), (torch.ones(1, 3), value), dynamic_shapes=shapes)
        assert export_source(source, name="m").methods["forward"].input_names == ("x", "start_pos")
