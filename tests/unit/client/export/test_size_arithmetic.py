"""What models compute of dynamic sizes: what programs cannot have is refused with a remedy, and the remedy works."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from etfarm.client.export import ModelSource
from etfarm.client.export.errors import DimSpecialized
from tests.support.exports import Function, export_called
from tests.support.refusals import refuses

Body = Callable[[Tensor], Any]
EXAMPLE = 12


def exported(body: Body, dim: Any) -> Body:
    source = ModelSource.of(Function(body).eval(), (torch.rand(EXAMPLE, 4),), dynamic_shapes={"x": {0: dim}})
    called: Body = export_called(source)
    return called


def must_equal(body: Body, other: Body, dim: Any, sizes: Iterable[int]) -> None:
    """Check that a model is exported, and gives what another gives for inputs of these sizes."""
    called = exported(body, dim)
    for size in sizes:
        x = torch.rand(size, 4)
        torch.testing.assert_close(called(x), other(x))


@pytest.mark.parametrize(
    ("factor", "why", "words", "mended"),
    [
        (lambda n: math.ceil(n / 4), "no math.ceil of a size", "-(-n // 4) for math.ceil(n / 4)", lambda n: -(-n // 4)),
        (lambda n: math.floor(n / 4), "no math.floor of a size", "n // 4 for math.floor(n / 4)", lambda n: n // 4),
        (lambda n: round(n * 0.3), "no round of a size", "(3 * n + 5) // 10 for round(n * 0.3)", lambda n: (3 * n + 5) // 10),
        (lambda n: abs(n - 4), "no abs of a size", "torch.tensor(n - 4).abs() for", lambda n: torch.tensor(n - 4).abs()),
        (lambda n: n & 3, "no size & number", "n % 4 for n & 3", lambda n: n % 4),
        (lambda n: n | 3, "no size | number", "n // 4 * 4 + 3 for n | 3", lambda n: n // 4 * 4 + 3),
        (lambda n: torch.sym_sum([n, n, n]), "no torch.sym_sum", "n + k for torch.sym_sum([n, k])", lambda n: n + n + n),
        (lambda n: torch.sym_ite(n > 5, 2, 3), "no torch.sym_ite", "torch.where(torch.tensor(n) > 5, 2, 3) for",
         lambda n: torch.where(torch.tensor(n) > 5, 2, 3)),
        (lambda n: 2**n, "no power whose exponent is a size", "2 ** torch.tensor(n) for 2 ** n", lambda n: 2 ** torch.tensor(n)),
        (lambda n: 0.5**n, "no power whose exponent is a size", "2 ** torch.tensor(n)", lambda n: 0.5 ** torch.tensor(n)),
        (lambda n: n**n, "no power whose exponent is a size", "2 ** torch.tensor(n)", lambda n: n ** torch.tensor(n)),
        (lambda n: n % 2.3, "no remainder that is a fraction", "torch.tensor(n) % 2.5 for", lambda n: torch.tensor(n) % 2.3),
        (lambda n: -n * 0.5 % 3.1, "no remainder that is", "torch.tensor(n) % 2.5", lambda n: torch.tensor(-n * 0.5) % 3.1),
        (lambda n: n**-0.5, "no power of a size", "torch.tensor(n) ** -0.5 for", lambda n: torch.tensor(n) ** -0.5),
    ],
)  # fmt: skip
def test_functions_of_sizes_that_no_archive_has(
    factor: Callable[[Any], Any], why: str, words: str, mended: Callable[[Any], Any]
) -> None:
    with refuses("EXPORT_FAILED") as caught:
        exported(lambda x: x * factor(x.shape[0]), Dim("n", min=2, max=14))
    assert f"programs have {why}" in caught.value.message
    assert "tests/support/exports.py:" in caught.value.message, "the line of the model that calls the function"
    assert words in caught.value.remedy
    must_equal(lambda x: x * mended(x.shape[0]), lambda x: x * factor(x.shape[0]), Dim("n", min=2, max=14), range(2, 15))


@pytest.mark.parametrize("dim", [Dim("n", min=2, max=15), Dim("n", min=3, max=15), 3 * Dim("k", min=1, max=5)])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda x: x[: int(x.shape[0] * 0.5)], "math.trunc(0.5*torch.sym_float(dim 0 of 'x')) == 6"),
        (lambda x: (x[: int(x.shape[0] * 0.5)], x[x.shape[0] // 3 :]), "math.trunc(0.5*torch.sym_float(dim 0 of 'x')) == 6"),
        (lambda x: x * 2 if x.shape[0] * 0.5 > 1.5 else x, "0.5*torch.sym_float(dim 0 of 'x') > 1.5"),
        (lambda x: x * 2 if x.shape[0] & 1 else x, "(dim 0 of 'x' & 1) == 0"),
        (lambda x: x * 2 if x.shape[0] ** 0.5 > 3.4 else x, "torch.sym_float(dim 0 of 'x') ** 0.5 > 3.4"),
    ],
)
def test_conditions_on_floats_of_a_size_need_whole_numbers(body: Body, why: str, dim: Any) -> None:
    with pytest.raises(DimSpecialized) as caught:
        exported(body, dim)
    sentence = (
        "cannot be dynamic as requested: the export fixes what the model computes of it other than with +, -, *, // and %: "
    )
    assert f"{sentence}{why}." in caught.value.message
    assert caught.value.remedy.startswith("Compute sizes with whole numbers: x.shape[0] // 2 for int(x.shape[0] * 0.5), ")


@pytest.mark.parametrize("divide", [lambda n: int(n / 2), lambda n: int(n * 0.5)])
def test_slices_to_a_part_of_a_size_are_exported_in_whole_numbers(divide: Callable[[Any], Any]) -> None:
    with pytest.raises(DimSpecialized) as caught:
        exported(lambda x: x[: divide(x.shape[0])], Dim("n", min=2, max=16))
    assert re.search(r"x\.shape\[0\] // 2 for int\(x\.shape\[0\] (/ 2|\* 0\.5)\)", caught.value.remedy)
    assert "a multiple" in caught.value.remedy and "2 * Dim('k', min=2, max=8)" in caught.value.remedy
    multiple = 2 * Dim("k", min=2, max=8)
    must_equal(lambda x: x[: x.shape[0] // 2], lambda x: x[: divide(x.shape[0])], multiple, range(4, 17, 2))


def test_other_remedies_for_conditions_on_floats_work() -> None:
    must_equal(
        lambda x: x[: -(-x.shape[0] // 4)], lambda x: x[: math.ceil(x.shape[0] / 4)], 4 * Dim("k", min=2, max=4), (8, 12, 16)
    )
    must_equal(
        lambda x: x * 2 if x.shape[0] > 3 else x,
        lambda x: x * 2 if x.shape[0] * 0.5 > 1.5 else x,
        Dim("n", min=4, max=14),
        (4, 9),
    )
    must_equal(lambda x: x * 2 if x.shape[0] % 2 else x, lambda x: x * 2 if x.shape[0] & 1 else x, 2 * Dim("k", max=8), (2, 8))


def test_roots_of_sizes_are_those_of_tensors() -> None:
    refused: tuple[Body, ...] = (lambda x: x * math.sqrt(x.shape[0]), lambda x: x * float(x.shape[0]))
    for body in refused:
        with pytest.raises(DimSpecialized) as caught:
            exported(body, Dim("n", min=2, max=14))
        assert "torch.tensor(x.shape[0]).sqrt() replaces math.sqrt(x.shape[0])" in caught.value.remedy
    must_equal(
        lambda x: x * torch.tensor(x.shape[0]).sqrt(), lambda x: x * math.sqrt(x.shape[0]), Dim("n", min=2, max=14), range(2, 15)
    )
    must_equal(lambda x: x * torch.tensor(x.shape[0]), lambda x: x * float(x.shape[0]), Dim("n", min=2, max=14), range(2, 15))


def test_resizes_by_a_factor_are_not_refused() -> None:
    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x[None, None], scale_factor=1.5, mode="bilinear")

    must_equal(resized, resized, Dim("n", min=2, max=14), range(2, 15))
    must_equal(resized, resized, 3 * Dim("k", min=1, max=4), (3, 6, 12))
