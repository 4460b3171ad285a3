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

from etfarm.server.compile.program import double_precision, special_values  # noqa: E402
from etfarm.server.compile.program.large_integers import describe  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.v1.compile_pb2 import OperatorDelegation  # noqa: E402
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
        lambda x: x.sum(1) + torch.fmod(x, 7).sum(1),
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: x.float() ** x,
        lambda x: (x % 7) ** (x % 7),
        lambda x: (x & 15).byte() ** (x & 7).byte(),
        lambda x: 3 ** x.argmax(1),
        lambda x: x.clamp(0, 1) ** x,
    ],
)
def test_exact_powers_and_small_integers_are_not_named(function: Callable[..., Any]) -> None:
    assert described(function, SMALL) == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x**x,
        lambda x: 3**x,
        lambda x: (x % 7) ** (x & 31),
        lambda x: x.byte() ** (x % 7).byte(),
        lambda x: x.short() ** x.short(),
    ],
)
def test_powers_that_may_be_inexact_are_named(function: Callable[..., Any]) -> None:
    assert "test_special_values.py:" in described(function, SMALL)


def test_programs_without_example_inputs_are_described() -> None:
    program = torch.export.export(Function(lambda x: x**x).eval(), (SMALL,))
    program.example_inputs = None
    assert "above 2**53" in describe(program)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x.float(), (4,)),
        lambda x: F.adaptive_avg_pool2d(x.double(), 1),
        lambda x: F.avg_pool2d(x.double(), 2).sum(1),
        lambda x: F.batch_norm(x.double(), torch.zeros(1).double(), torch.ones(1).double()),
    ],
)
def test_float64_that_is_exact_is_not_named(function: Callable[..., Any]) -> None:
    assert double_precision.describe(torch.export.export(Function(function).eval(), (IMAGE,))) == ""


ROOT: Final = Function(lambda x: torch.where(torch.rsqrt(x) == float("inf"), 0, torch.rsqrt(x)))
NAN, INF = torch.nan, torch.inf
IMAGE: Final = torch.rand(1, 1, 4, 4)
DOUBLE: Final = IMAGE.double()
BAD: Final = IMAGE.index_fill(3, torch.tensor([1]), 100.0)
INNER: Final = torch.where(torch.eye(4) * torch.tensor([0, 0, 1, 0]) > 0, 100.0, IMAGE)
BELOW: Final = IMAGE.index_fill(2, torch.tensor([3]), 100.0)
LARGEST: Final = torch.finfo(torch.float32).max


def pooled(x: Any, *, is_before: bool) -> Any:
    bad = x > 90
    if is_before:
        return F.max_pool2d(x.masked_fill(bad, NAN), 2)
    return torch.where(F.max_pool2d(bad.float(), 2) > 0, NAN, F.max_pool2d(x, 2))


def resized(x: Any) -> Any:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def normalized(x: Any, dims: Any) -> Any:
    y = x - x.mean(dims, keepdim=True)
    return y / (y.square().mean(dims, keepdim=True) + 1e-5).sqrt()


def without_huge(x: Any, number: Any) -> Any:
    return torch.sigmoid(torch.where(x > 90, torch.tensor(number), x * 2).unsqueeze(0))


CASES: Final = {
    "pow of tensors": (
        lambda x: (x + 1) ** torch.full_like(x, 2), lambda x: (x + 1) ** 2, SMALL, LARGE + 2**27, "x**2, which is exact",
    ),
    "pow of int16": (
        lambda x: x ** (x - x + 4), lambda x: x**4, SMALL.short(), (SMALL + 300).short(), "float64",
    ),
    "pow by a tensor": (
        lambda x: x ** ((x & 1) + 1), lambda x: torch.where((x & 1) + 1 > 1, x * x, x), SMALL, LARGE + 2**27,
        "torch.where(n > 1, x * x, x)",
    ),
    "a layer norm of float64": (
        lambda x: F.layer_norm(x, (4,)), lambda x: normalized(x, -1), DOUBLE, DOUBLE + 1e6, "aten::layer_norm at ",
    ),
    "a group norm of float64": (
        lambda x: F.group_norm(x, 1), lambda x: normalized(x, (1, 2, 3)), DOUBLE, DOUBLE + 1e6, "aten::group_norm at ",
    ),
    "an adaptive pool of float64": (
        lambda x: F.adaptive_avg_pool2d(x - 1, 2) - 1e8, lambda x: F.avg_pool2d(x - 1, 2) - 1e8, DOUBLE, DOUBLE + 1e8,
        "F.avg_pool2d",
    ),
    "rsqrt": (ROOT, lambda x: torch.where(x > 0, torch.rsqrt(x), 0), SMALL + 0.5, SMALL - 2.0, "torch.where(x > 0"),
    "isinf": (
        lambda x: (y := torch.rsqrt(x)).masked_fill(torch.isinf(y), 0), lambda x: (y := x.pow(-0.5)).masked_fill(y.isinf(), 0),
        SMALL + 0.5, SMALL - 2.0, "x.pow(-0.5)",
    ),
    "a root of infinity": (
        lambda x: x.masked_fill(x > 90, INF).sqrt(), lambda x: x.masked_fill(x > 90, INF).pow(0.5), IMAGE, BAD, "x.pow(0.5)",
    ),
    "an infinite root": (
        lambda x: torch.isinf(x.sqrt()) * x.clamp(max=9), lambda x: torch.isinf(x.pow(0.5)) * x.clamp(max=9),
        IMAGE, BAD / (BAD < 90), "infinities there: aten::sqrt at ",
    ),
    "sigmoid of a huge number": (
        lambda x: torch.sigmoid(x + (x > 90).float() * -1e30), lambda x: torch.sigmoid(x + (x > 90).float() * -1e4),
        IMAGE, BAD, "-1e4 for -1e30",
    ),
    "sigmoid of a huge constant": (
        lambda x: without_huge(x, 1e30), lambda x: without_huge(x, 1e4), IMAGE, BAD, "aten::sigmoid at ",
    ),
    "SiLU": (lambda x: F.silu(x.masked_fill(x > 90, -1e30)), lambda x: F.silu(x.masked_fill(x > 90, -1e4)), IMAGE, BAD, "::silu"),
    "exp of NaN": (
        lambda x: x.masked_fill(x > 90, NAN).exp(), lambda x: torch.where(x > 90, NAN, x.exp()), IMAGE, BAD,
        "torch.where(m, torch.nan, torch.exp(x))",
    ),
    "exp that is NaN": (
        lambda x: (y := x.exp()).masked_fill(y.isnan(), -1.0), lambda x: x.exp().masked_fill(x.isnan(), -1.0),
        IMAGE, BAD.masked_fill(BAD > 90, NAN), "look for it before them",
    ),
    "softplus of NaN": (
        lambda x: F.softplus(torch.where(x > 90, NAN, x)), lambda x: torch.where(x > 90, NAN, F.softplus(x)), IMAGE, BAD,
        "aten::softplus at ",
    ),
    "maximum of NaN": (
        lambda x: torch.maximum(x.masked_fill(x > 90, NAN), x * 0), lambda x: torch.maximum(x, x * 0).masked_fill(x > 90, NAN),
        IMAGE, BAD, "aten::maximum at ",
    ),
    "a pool of NaN": (
        partial(pooled, is_before=True), partial(pooled, is_before=False), IMAGE, BAD, "aten::max_pool2d at ",
    ),
    "a pool that is NaN": (
        lambda x: torch.isnan(F.max_pool2d(x, 2)) * 2.0, lambda x: (F.max_pool2d(torch.isnan(x).float(), 2) > 0) * 2.0,
        IMAGE, BAD.masked_fill(BAD > 90, NAN), "look for it before",
    ),
    "a root of the largest number": (
        lambda x: x.masked_fill(x > 90, LARGEST).sqrt(), lambda x: x.masked_fill(x > 90, LARGEST).pow(0.5), IMAGE, BAD,
        "x.pow(0.5)",
    ),
    "log of the largest number": (
        lambda x: (x.masked_fill(x > 90, LARGEST).log() > 90) * 1.0, lambda x: (x.masked_fill(x > 90, 1e38).log() > 90) * 1.0,
        IMAGE + 0.1, BAD + 0.1, "1e38 for torch.finfo(torch.float32).max",
    ),
    "sin of a large number": (
        lambda x: torch.sin(x + (x > 90).float() * 1.7e9), lambda x: torch.sin((x + (x > 90).float() * 1.7e9).double()).float(),
        IMAGE, BAD, "aten::sin at ",
    ),
    "GLU": (
        lambda x: F.glu(x.masked_fill(x > 90, -1e30), 2), lambda x: F.glu(x.masked_fill(x > 90, -1e4), 2), IMAGE, BELOW, "::glu",
    ),
    "log of a tiny number": (
        lambda x: (x + 1e-45).log().log_softmax(2), lambda x: (x + 1e-37).log().log_softmax(2),
        IMAGE + 0.1, torch.zeros(1, 1, 4, 4), "1e-37 for 1e-45",
    ),
    "log of a tiny bound": (
        lambda x: torch.isfinite(x.clamp(min=1e-40).log()) * 1.0, lambda x: torch.isfinite(x.clamp(min=1e-37).log()) * 1.0,
        IMAGE + 0.1, torch.zeros(1, 1, 4, 4), "aten::log at ",
    ),
    "a root of a tiny number": (
        lambda x: torch.isnan((x.abs() + 1e-40).rsqrt()) * 1.0, lambda x: torch.isnan((x.abs() + 1e-37).rsqrt()) * 1.0,
        IMAGE + 0.1, torch.zeros(1, 1, 4, 4), "aten::rsqrt at ",
    ),
    "a division by a tiny number": (
        lambda x: x / (x.abs() + 1e-40), lambda x: x / (x.abs() + 1e-37), IMAGE + 0.1, torch.zeros(1, 1, 4, 4), "aten::div at ",
    ),
    "max of NaN": (
        lambda x: torch.max(x.masked_fill(x > 90, NAN), x * 0), lambda x: torch.max(x, x * 0).masked_fill(x > 90, NAN),
        IMAGE, BAD, "aten::max at ",
    ),
    "an infinity that is interpolated": (
        lambda x: resized(x.masked_fill(x > 90, -INF)), lambda x: torch.where(resized((x > 90).float()) > 0, -INF, resized(x)),
        IMAGE, INNER, "aten::upsample_bilinear2d at ",
    ),
}  # fmt: skip


@pytest.mark.slow(reason="compiles in children")
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", CASES)
async def test_a_remedy_is_right_where_the_warning_applies(workers: Workers, tmp_path: Path, name: str) -> None:
    function, remedy, example, special, words = CASES[name]
    of_floats = example.is_floating_point()
    recipe, code = {
        torch.float32: ("xnnpack_fp32", "SPECIAL_VALUES_DIFFER"), torch.float64: ("portable", "FLOAT64_INEXACT"),
    }.get(example.dtype, ("portable", "LARGE_INTEGERS_INEXACT"))  # fmt: skip
    expected = Function(function)(special)
    for model, is_right in ((function, False), (remedy, True)):
        make = partial(torch.export.export, Function(model).eval(), (example,))
        compilation = await compiled(workers, tmp_path / str(is_right), make, recipe)
        warnings = {warning["code"]: warning["message"] for warning in compilation.result["warnings"]}
        assert set(warnings) == (set() if is_right else {code})
        assert is_right or ("test_special_values.py:" in warnings[code] and words in warnings[code])
        (output,) = run(compilation.pte, [special])
        is_equal = torch.allclose(output, expected, equal_nan=True) if of_floats else torch.equal(output, expected)
        assert is_equal == is_right


DELEGATED: Final = [
    OperatorDelegation(op=f"aten_{name}_default", delegated=1)
    for name in (
        "sigmoid",
        "exp",
        "sqrt",
        "rsqrt",
        "maximum",
        "minimum",
        "max_pool2d",
        "avg_pool2d",
        "add",
        "clamp",
        "mul",
        "div",
        "log",
        "sin",
        "cos",
        "upsample_bilinear2d",
    )
]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.SiLU(), nn.MaxPool2d(2), nn.Sigmoid(), nn.Softplus()),
        Function(lambda x: x.masked_fill(x > 90, -INF).softmax(-1).sigmoid()),
        Function(lambda x: (x + (x > 90).float() * torch.finfo(torch.float32).min).softmax(-1).sqrt()),
        Function(lambda x: torch.sigmoid(x.masked_fill(x > 90, -INF))),
        Function(lambda x: torch.sigmoid(x.masked_fill(x > 90, -1e9))),
        Function(lambda x: torch.sigmoid(F.conv2d(x.masked_fill(x > 90, -1e30), torch.ones(1, 1, 1, 1)))),
        Function(lambda x: torch.sigmoid(x.clamp(-1e30, 1e30) / 1e30)),
        Function(lambda x: x.masked_fill(x > 90, -INF).exp().sqrt()),
        Function(lambda x: torch.nan_to_num(x).exp()),
        Function(lambda x: torch.rsqrt(x) * (x > 0)),
        Function(lambda x: torch.sin(x * 1e4) + torch.cos(x.masked_fill(x > 90, -1e9).softmax(-1))),
        Function(lambda x: (x + torch.finfo(torch.float32).tiny).log() / (x.clamp(min=1e-12) + 1e-30)),
        Function(lambda x: (x * 1e-40 + 1.0).log() + (x + 1e-45) / (x + 2.0) + (x + 1e-45) * 3.0),
        Function(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").masked_fill(x.max() > 90, -INF)),
        Function(lambda x: x.masked_fill(x > 90, NAN).max(-1)[0] + x.masked_fill(x > 90, NAN).clamp(min=0.0)[..., 0]),
    ],
)
def test_ordinary_models_get_no_alarm(model: nn.Module) -> None:
    assert special_values.describe(torch.export.export(model.eval(), (IMAGE,)), DELEGATED) == ""


def test_operators_outside_of_delegates_are_not_named() -> None:
    program = torch.export.export(Function(lambda x: x.masked_fill(x > 90, INF).sqrt()), (IMAGE,))
    assert "aten::sqrt at " in special_values.describe(program, DELEGATED)
    assert special_values.describe(program, [OperatorDelegation(op="aten_sqrt_default")]) == ""
