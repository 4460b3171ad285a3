"""Values for which ExecuTorch computes something else than PyTorch, which the example inputs do not show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from etfarm.server.compile.program.large_integers import describe  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from tests.support.compiling import compiled, run  # noqa: E402

pytestmark = pytest.mark.numeric

SMALL: Final = torch.arange(6).reshape(2, 3) + 2
LARGE: Final = SMALL + 2**25
MASK: Final = torch.tensor([[1, 1, 0], [1, 0, 0]])


class Function(nn.Module):
    """A model that is one function of some tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Any) -> Any:
        return self.function(*x)


def described(function: Callable[..., Any], *inputs: Any) -> str:
    return describe(torch.export.export(Function(function).eval(), inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x.sum((0, 1)),
        lambda x: x.sum(1, dtype=torch.float64).long(),
        lambda x: x.int().sum(1),
        lambda x: (x > 2).sum(1),
        lambda x: (x > 2).long().sum(1),
        lambda x: F.one_hot(x, 9).sum(1),
        lambda x: x.argsort(1).sum(1),
        lambda x: (x % 7).sum(1),
        lambda x: x.clamp(max=9).sum(1),
        lambda x: torch.arange(9)[x].sum(1),
        lambda x: torch.arange(x.shape[1]).sum(0) + x,
        lambda x: 2**x,
        lambda x: x.float() ** 2,
        lambda x: torch.fmod(x.int(), 7),
        lambda x: x * x,
        lambda x: x.new_ones(3).sum(0) + x.new_zeros(3).sum(0) + x.new_full((3,), 4).sum(0),
        lambda x: torch.empty_like(x).fill_(2).sum(1),
        lambda x: torch.minimum(x, torch.full_like(x, 9)).sum(1),
        lambda x: torch.minimum(torch.tensor(9), x).sum(1),
        lambda x: x.clamp_max(9).sum(1),
        lambda x: torch.zeros(2, 9, dtype=torch.long).scatter(1, x, 1).sum(1),
        lambda x: torch.zeros(2, 9, dtype=torch.long).scatter_add(1, x, torch.ones_like(x)).sum(1),
        lambda x: torch.zeros(9, dtype=torch.long).index_put((x,), torch.tensor(1)).sum(0),
        lambda x: torch.zeros(2, 9, dtype=torch.long).index_fill(1, x[0], 1).sum(1),
        lambda x: torch.zeros(2, 9, dtype=torch.long).index_copy(1, x[0], torch.ones(2, 3, dtype=torch.long)).sum(1),
    ],
)
def test_exact_operators_and_small_integers_are_not_named(function: Callable[..., Any]) -> None:
    assert described(function, SMALL) == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=0).sum(1),
        lambda x: torch.minimum(x, x + 1).sum(1),
        lambda x: torch.minimum(x, x.max()).sum(1),
        lambda x: torch.zeros(2, 9, dtype=torch.long).scatter(1, x % 9, x).sum(1),
        lambda x: torch.zeros(2, 9, dtype=torch.long).index_copy(1, x[0] % 9, x).sum(1),
        lambda x: torch.zeros(9, dtype=torch.long).index_put((x % 9,), x).sum(0),
        lambda x: x.scatter(1, x % 3, 0).sum(1),
    ],
)
def test_sums_of_what_is_written_are_named(function: Callable[..., Any]) -> None:
    assert "above 2**24" in described(function, SMALL)


def test_programs_without_example_inputs_are_described() -> None:
    program = torch.export.export(Function(lambda x: x.sum(1)).eval(), (SMALL,))
    program.example_inputs = None
    assert "above 2**24" in describe(program)


def test_a_sum_of_a_mask_is_not_named() -> None:
    assert described(lambda x, mask: x.masked_fill(mask == 0, 0), SMALL, MASK) == ""
    assert described(lambda mask: mask.sum(1), MASK) == ""


ROOT: Final = Function(lambda x: torch.where(torch.rsqrt(x) == float("inf"), 0, torch.rsqrt(x)))
CASES: Final = {
    "sum": (lambda x: x.sum(1), lambda x: x.sum(1, dtype=torch.float64).long(), SMALL, LARGE, "above 2**24"),
    "sum of int32": (
        lambda x: x.sum(1, dtype=torch.int32), lambda x: x.sum(1, dtype=torch.float64).int(), SMALL.int(), LARGE.int(),
        "dtype=torch.float64",
    ),
    "pow": (lambda x: x**2, lambda x: x * x, SMALL, LARGE + 2**27, "x * x for x**2"),
    "pow of int32": (lambda x: x**2, lambda x: x * x, SMALL.int(), (SMALL + 46340).int(), "46341**2"),
    "pow of tensors": (
        lambda x: (x + 1) ** torch.full_like(x, 2), lambda x: (x + 1) * (x + 1), SMALL, LARGE + 2**27, "float64",
    ),
    "fmod": (
        lambda x: torch.fmod(x, 1000), lambda x: x - torch.div(x, 1000, rounding_mode="trunc") * 1000, SMALL, LARGE + 2**60,
        "rounding_mode='trunc'",
    ),
    "rsqrt": (ROOT, lambda x: torch.where(x > 0, torch.rsqrt(x), 0), SMALL + 0.5, SMALL - 2.0, "torch.where(x > 0"),
    "isinf": (
        lambda x: (y := torch.rsqrt(x)).masked_fill(torch.isinf(y), 0), lambda x: (y := x.pow(-0.5)).masked_fill(y.isinf(), 0),
        SMALL + 0.5, SMALL - 2.0, "x.pow(-0.5)",
    ),
}  # fmt: skip


@pytest.mark.slow(reason="compiles in children")
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", CASES)
async def test_a_remedy_is_right_where_the_warning_applies(workers: Workers, tmp_path: Path, name: str) -> None:
    function, remedy, example, special, words = CASES[name]
    of_floats = example.is_floating_point()
    recipe, code = ("xnnpack_fp32", "INFINITY_IS_NAN") if of_floats else ("portable", "LARGE_INTEGERS_INEXACT")
    expected = Function(function)(special)
    for model, is_right in ((function, False), (remedy, True)):
        make = partial(torch.export.export, Function(model).eval(), (example,))
        compilation = await compiled(workers, tmp_path / str(is_right), make, recipe)
        warnings = {warning["code"]: warning["message"] for warning in compilation.result["warnings"]}
        assert set(warnings) == (set() if is_right else {code})
        assert is_right or ("test_special_values.py:" in warnings[code] and words in warnings[code])
        (output,) = run(compilation.pte, [special])
        assert torch.equal(output, expected) == is_right
