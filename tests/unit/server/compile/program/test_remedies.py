"""Remedies, each applied to the small model that got it: the sentence names the cause and the line, and what it says helps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from functorch.experimental.control_flow import map as mapped  # noqa: E402
from torch import nn  # noqa: E402
from torch._higher_order_ops.scan import scan  # noqa: E402
from torch._higher_order_ops.while_loop import while_loop  # noqa: E402
from torch.export import Dim  # noqa: E402
from torchao.core.config import AOBaseConfig  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup  # noqa: E402
from torchao.utils import unwrap_tensor_subclass  # noqa: E402

from etfarm.server.compile.program.gelu import describe_exact  # noqa: E402
from etfarm.server.compile.program.suspects import find_remainders  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.v1.compile_pb2 import OperatorDelegation  # noqa: E402
from etfarm.wire.errors import UserError  # noqa: E402
from tests.support.compiling import compiled  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="each test compiles in children")]


class Function(nn.Module):
    """A model that is one function of some tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Any) -> Any:
        return self.function(*x)


class Scaled(nn.Module):
    """Adds a weight, which may be channels last."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        weight = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight.contiguous() if contiguous else weight)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.weight, self.weight * 1.0


def sliced(x: torch.Tensor, *, checks: bool) -> torch.Tensor:
    i = (x.argmax() * 0).item()
    if checks:
        torch._check(i >= 0)
        torch._check(i + 2 <= x.shape[0])
    return x[i : i + 2]


def positive(x: torch.Tensor) -> Any:
    values = torch.masked_select(x, x > 0)
    torch._check(values.shape[0] <= 12)
    return torch.nonzero(x > 0), values


def branches(x: torch.Tensor) -> Any:
    p = x.sum() > 0
    a = torch.cond(p, lambda v: v * 2, lambda v: v - 1, [x])
    b = torch.cond(p, lambda v: v + 10, lambda v: v * 3, [x])
    return a, b, a + b


def chosen(x: torch.Tensor) -> Any:
    p = x.sum() > 0
    a = torch.where(p, x * 2, x - 1)
    b = torch.where(p, x + 10, x * 3)
    return a, b, a + b


class Exits(nn.Module):
    """Uses a layer within a branch, too, or a copy of it."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.exit = nn.Linear(3, 3)
        self.early = self.exit if shared else copy.deepcopy(self.exit)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda v: self.early(v), lambda v: v * 2, [self.exit(x)])


class Chosen(nn.Module):
    """Computes a layer that torchao has quantized within a branch or loop, or outside of it."""

    def __init__(self, config: AOBaseConfig, kind: str = "cond", *, is_outside: bool = False) -> None:
        super().__init__()
        self.a, self.kind, self.is_outside = nn.Linear(64, 64), kind, is_outside
        quantize_(self, config)
        unwrap_tensor_subclass(self)

    def forward(self, x: torch.Tensor) -> Any:
        match self.kind, self.is_outside:
            case "cond", False:
                return torch.cond(x.sum() > 0, lambda v: self.a(v), lambda v: v * 2, [x])
            case "cond", True:
                return torch.where(x.sum() > 0, self.a(x), x * 2)
            case "map", False:
                return mapped(lambda v: self.a(v), x)
            case "scan", False:
                return scan(lambda total, v: (total + v, self.a(v)), torch.zeros(64), x)[1]
        return torch.stack([self.a(v[None])[0] for v in x.unbind()])


class Viewed(nn.Module):
    """Changes a buffer, of which another is a part, or takes that part."""

    def __init__(self, *, is_part: bool) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("head", self.cache[0] if is_part else None)

    def forward(self, x: torch.Tensor) -> Any:
        self.cache.copy_(torch.cat([x, self.cache[:-1]]))
        return (self.cache[0] if self.head is None else self.head) * 2


def loop(i: torch.Tensor, x: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5), (i, x))


def unrolled(i: torch.Tensor, x: torch.Tensor) -> Any:
    for _ in range(5):
        x = torch.where(i < 5, x * 1.5, x)
        i = torch.where(i < 5, i + 1, i)
    return i, x


class Table(nn.Module):
    """Adds a weight of any dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.weight.to(torch.float32)


def weights(config: AOBaseConfig) -> nn.Module:
    """Return a linear layer that torchao quantized, as the client sends it."""
    layer = nn.Sequential(nn.Linear(64, 8)).eval()
    quantize_(layer, config)
    return unwrap_tensor_subclass(layer)


def dynamic(dtype: torch.dtype, granularity: PerGroup | PerAxis, mapping: MappingType) -> AOBaseConfig:
    """Return torchao's configuration for weights of a dtype, with zero points or without."""
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity, weight_mapping_type=mapping)


def circular(x: torch.Tensor, dim: int, p: int = 1) -> torch.Tensor:
    return torch.cat([x.narrow(dim, x.shape[dim] - p, p), x, x.narrow(dim, 0, p)], dim)


def by_depth(x: torch.Tensor) -> torch.Tensor:
    """Return what a 3-D convolution with CUBE gives."""
    steps = [F.conv2d(x[0, :, step : step + 3].transpose(0, 1), CUBE[:, :, step]) for step in range(2)]
    return torch.stack(steps).sum(0).transpose(0, 1)[None]


def spectrum(x: torch.Tensor) -> torch.Tensor:
    n, r = x.shape[-1], torch.fft.rfft(x).abs()
    return torch.cat([r, r[..., 1 : (n + 1) // 2].flip(-1)], -1)


WAVES: Final = torch.rand(2, 12, 5)
CUBE: Final = torch.arange(48.0).reshape(3, 2, 2, 2, 2)
VOLUME: Final = torch.rand(1, 2, 4, 5, 6)
NORM: Final = nn.BatchNorm1d(3).eval()
NORM_2D: Final = nn.BatchNorm2d(2).eval()
ROWS: Final = torch.rand(4, 3)
WIDE: Final = torch.rand(2, 64)
FOUR_DIMS: Final = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
FOUR_BITS: Final = dynamic(torch.int4, PerGroup(32), MappingType.SYMMETRIC)
X: Final = torch.tensor([[0.5, -1.0, 2.0], [3.0, -0.25, 1.0]])
SIX: Final = torch.rand(2, 1, 2, 1, 3, 4)
GRAY: Final = torch.rand(1, 1, 7, 5)
ONE: Final = GRAY.to(memory_format=torch.channels_last)
EXPANDED: Final = torch.ones(1, 3).expand(2, 3)
INTEGERS: Final = torch.arange(-4, 8, dtype=torch.int32)
LAST: Final = torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)
CASES: Final[dict[str, tuple[nn.Module, tuple[Any, ...], nn.Module, tuple[Any, ...], Any, list[str]]]] = {
    "a function in training mode": (
        Function(lambda x: F.dropout(x + 1, 0.5)), (X,),
        Function(lambda x: F.dropout(x + 1, 0.5, training=False)), (X,),
        None, ["TRAINING_MODE", "test_remedies.py:", "training=self.training"],
    ),
    "dropout of attention": (
        Function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)), (X[None],),
        Function(lambda x: F.scaled_dot_product_attention(x, x, x)), (X[None],),
        None, ["TRAINING_MODE", "test_remedies.py:", "dropout_p=0.0"],
    ),
    "a weight of another memory format": (
        Scaled(contiguous=False), (LAST,), Scaled(contiguous=True), (LAST.contiguous(),),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "memory formats: give ", "weight", "contiguous_format"],
    ),
    "one channel, channels last": (
        nn.Conv2d(1, 5, 1), (ONE,), nn.Conv2d(1, 5, 1), (ONE.clone(memory_format=torch.contiguous_format),),
        None, ["PROGRAM_CANNOT_RUN", "memory formats", "give input the usual one", "contiguous_format"],
    ),
    "a Fourier transform along another dim": (
        Function(lambda x: torch.fft.rfft(x, dim=1).abs()), (WAVES,),
        Function(lambda x: torch.fft.rfft(x.transpose(1, -1).contiguous()).abs().transpose(1, -1)), (WAVES,),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "rfft(x.transpose(dim, -1).contiguous()).abs().transpose(dim, -1)"],
    ),
    **{
        f"both sides of a spectrum of {n}": (
            Function(lambda x: torch.fft.fft(x).abs()), (torch.rand(2, n),), Function(spectrum), (torch.rand(2, n),),
            None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "torch.cat([r, r[..., 1 : (n + 1) // 2].flip(-1)], -1) is"],
        )
        for n in (7, 8)
    },
    "pads of both signs": (
        Function(lambda x: F.pad(x, [3, -4, -2, 5, 1, 3, -3, -3], value=7.0)), (torch.ones(3, 9, 7, 8, 8),),
        Function(lambda x: F.pad(x[:, 3:-3, :, 2:, :-4], [3, 0, 0, 5, 1, 3], value=7.0)), (torch.ones(3, 9, 7, 8, 8),),
        None, ["test_remedies.py:", "slices instead of negative pads"],
    ),
    "shifts": (
        Function(lambda x: (x << 2, x >> 1)), (INTEGERS,),
        Function(lambda x: (x * 2**2, torch.div(x, 2**1, rounding_mode="floor"))), (INTEGERS,),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "has no kernel", "x * 2**n for x << n"],
    ),
    "only numbers": (
        Function(lambda x: (x.shape[0] * 2, 3)), (X,), Function(lambda x: (x.shape[0] * 2, 3, x.sum())), (X,),
        ({0: Dim("n", min=2, max=8)},), ["STAGE_FAILED", "numbers only", "Return a tensor beside"],
    ),
    "a loop": (
        Function(loop), (torch.tensor(0), X), Function(unrolled), (torch.tensor(0), X),
        None, ["STAGE_FAILED", "torch.while_loop at ", "test_remedies.py:", "torch.where"],
    ),
    "an expanded example": (
        Function(lambda x: x + 1), (EXPANDED,), Function(lambda x: x + 1), (EXPANDED.contiguous(),),
        None, ["STAGE_FAILED", "elements repeat in memory: x_0", ".contiguous()"],
    ),
    "sizes that depend on values": (
        Function(positive), (torch.randn(3, 4, generator=torch.Generator().manual_seed(9)),),
        Function(lambda x: torch.where(x > 0, x, 0.0)), (X,),
        None, ["OUTPUTS_DIFFER", "aten::nonzero at ", "test_remedies.py:", "torch.where"],
    ),
    "indices by columns": (
        Function(lambda x: x[torch.nonzero(x > 0).squeeze(1)]), (X[0],),
        Function(lambda x: x[torch.nonzero(x > 0).clone(memory_format=torch.contiguous_format).squeeze(1)]), (X[0],),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "column-major", "torch.nonzero(c).clone(memory_format="],
    ),
    "indices of where": (
        Function(lambda x: x[torch.where(x > 0)[0]]), (X[0],),
        Function(lambda x: x[torch.nonzero(x > 0).clone(memory_format=torch.contiguous_format)[:, 0]]), (X[0],),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "take [:, 0] of that copy for torch.where(c)[0]"],
    ),
    "a column of indices": (
        Function(lambda x: x[torch.nonzero(x > 0)[:, 0]] * 2), (X[0],),
        Function(lambda x: x[torch.nonzero(x > 0).clone(memory_format=torch.contiguous_format)[:, 0]] * 2), (X[0],),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "torch.nonzero(c).clone(memory_format="],
    ),
    "a size of a later dim": (
        Function(lambda x: x[:, x[0, :, 0, 0] > 0]), (FOUR_DIMS,),
        Function(lambda x: torch.where((x[0, :, 0, 0] > 0)[:, None, None], x, 0.0)), (FOUR_DIMS,),
        None, ["DATA_DEPENDENT_BRANCH", "in aten::index at ", "test_remedies.py:", "torch.where(c[:, None, None], x, 0.0)"],
    ),
    "a size of the last dim": (
        Function(lambda x: x.index_select(3, torch.where(x[0, 0, 0] > 0)[0])), (FOUR_DIMS,),
        Function(lambda x: x.transpose(0, 3)[x[0, 0, 0] > 0]), (FOUR_DIMS,),
        None, ["in aten::index_select at ", "test_remedies.py:", "x.transpose(0, 1)[c] for x[:, c]"],
    ),
    "bounds outside of uint8": (
        Function(lambda x: (torch.clamp(x, min=-129), torch.clamp(x, 1, 300))), (INTEGERS.to(torch.uint8),),
        Function(lambda x: (x * 1, torch.clamp(x, 1, 255))), (INTEGERS.to(torch.uint8),),
        None, ["PROGRAM_CANNOT_RUN", "not min=-129 (uint8 has 0 to 255) of aten::clamp at ", "max=300 (", "Give a bound within"],
    ),
    "bounds outside of int8": (
        Function(lambda x: torch.clamp(x, -1000, 300)), (INTEGERS.to(torch.int8),),
        Function(lambda x: torch.clamp(x.to(torch.int32), -1000, 300).to(x.dtype)), (INTEGERS.to(torch.int8),),
        None, ["not min=-1000 and max=300 (int8 has -128 to 127) of", "torch.clamp(x.to(torch.int32), a, b).to(x.dtype)"],
    ),
    "an index without a dim": (
        Function(lambda x: x[x.argmax()]), (X[0],), Function(lambda x: x[x.argmax().reshape(1)].squeeze(0)), (X[0],),
        None, ["DATA_DEPENDENT_BRANCH", "test_remedies.py:", "x[i.reshape(1)].squeeze(0) instead of x[i]"],
    ),
    "a slice at a number": (
        Function(lambda x: sliced(x, checks=False)), (X[0],), Function(lambda x: sliced(x, checks=True)), (X[0],),
        None, ["DATA_DEPENDENT_BRANCH", "test_remedies.py:", "torch._check(i >= 0)", "torch._check(i + n <= x.shape[0])"],
    ),
    "unsigned integers": (
        Function(lambda x: x + 1), (INTEGERS.to(torch.uint16),), Function(lambda x: x + 1), (INTEGERS,),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "does not support this dtype", "int32"],
    ),
    "float8": (
        Table(torch.rand(2, 3).to(torch.float8_e4m3fn)), (X,), Table(torch.rand(2, 3)), (X,),
        None, ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "does not compute in float8", "in fp32"],
    ),
    "fake quantization": (
        Function(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)), (X,), Function(lambda x: x * 1.0), (X,),
        None, ["STAGE_FAILED", "aten::fake_quantize", "test_remedies.py:", "Use the model without fake quantization"],
    ),
    "dynamic activations, portable": (
        weights(Int8DynamicActivationIntxWeightConfig(weight_granularity=PerAxis(0))), (WIDE,),
        weights(Int8WeightOnlyConfig()), (WIDE,),
        None, ["UNSUPPORTED_QUANTIZED_OP", "torchao::", "portable, too, takes Int8WeightOnlyConfig"],
    ),
    "weights of 4 bits, xnnpack": (
        weights(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))), (WIDE,),
        weights(Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))), (WIDE,),
        None, ["UNSUPPORTED_QUANTIZED_OP", "torchao::", "with int4 weights in groups of a multiple of 32"],
    ),
    **{
        f"quantized activations within a {kind}, {recipe}": (
            Chosen(FOUR_BITS, kind), (WIDE,), mended, (WIDE,),
            None,
            [
                "UNSUPPORTED_QUANTIZED_OP", "torchao::", "test_remedies.py:", "torch.where(c, self.a(x), y)",
                "torch.stack([self.a(v[None])[0] for v in x.unbind()])", "Int8WeightOnlyConfig",
            ],
        )
        for kind in ("cond", "map", "scan")
        for recipe, mended in (
            ("xnnpack", Chosen(FOUR_BITS, kind, is_outside=True)),
            ("weights, xnnpack", Chosen(Int8WeightOnlyConfig(), kind)),
            ("weights, portable", Chosen(Int8WeightOnlyConfig(), kind)),
        )
    },
    **{
        f"weights of {bits} bits in groups, xnnpack": (
            weights(dynamic(dtype, PerGroup(32), MappingType.SYMMETRIC)), (WIDE,),
            weights(mended), (WIDE,), None,
            ["STAGE_FAILED", f"groups only in 4 bits, but they have {bits} bits in aten::linear", "a range per channel (PerAxis"],
        )
        for bits, dtype, mended in (
            (8, torch.int8, Int8DynamicActivationIntxWeightConfig(weight_granularity=PerAxis(0))), (2, torch.int2, FOUR_BITS),
        )
    },
    **{
        f"zero points of {bits} bits, xnnpack": (
            weights(dynamic(dtype, granularity, MappingType.ASYMMETRIC)), (WIDE,),
            weights(dynamic(dtype, granularity, MappingType.SYMMETRIC)), (WIDE,), None,
            ["UNSUPPORTED_QUANTIZED_OP", "which XNNPACK ignores: 0, aten::linear.", "weight_mapping_type=MappingType.SYMMETRIC"],
        )
        for bits, dtype, granularity in ((4, torch.int4, PerGroup(32)), (8, torch.int8, PerAxis(0)))
    },
    "remainders of integers": (
        Function(lambda x: x % 4), (INTEGERS.abs(),),
        Function(lambda x: x - torch.div(x, 4, rounding_mode="floor") * 4), (INTEGERS,),
        None, ["REMAINDERS_TRUNCATED", "aten::remainder at ", "test_remedies.py:", "rounding_mode='floor'"],
    ),
    "a layer of another dtype": (
        NORM, (X.half(),), Function(lambda x: NORM(x.float()).half()), (X.half(),),
        None, ["PROGRAM_CANNOT_RUN", "batch_norm", "layer(x.float()).half()"],
    ),
    "channels last within": (
        Function(lambda x: NORM_2D(x.contiguous(memory_format=torch.channels_last))), (LAST.contiguous() + 1,),
        Function(lambda x: NORM_2D(x)), (LAST.contiguous() + 1,),
        None, ["PROGRAM_CANNOT_RUN", "The model changes the memory format itself: aten::", "test_remedies.py:"],
    ),
    "weights in channels last, xnnpack": (
        nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last), (LAST.contiguous(),), nn.Conv2d(2, 4, 2), (LAST.contiguous(),),
        None, ["STAGE_FAILED", "weight is channels last", "Leave out model.to(memory_format=torch.channels_last)"],
    ),
    "rows of a loop": (
        Function(lambda x: mapped(lambda row: row.sin(), x)), (X,), Function(lambda x: mapped(lambda row: row.sin(), x)), (ROWS,),
        ({0: Dim("n", min=2, max=4)},), ["DYNAMIC_DIM_LOST", "dim 0 of 'x_0' (2..4, at most 2", "inputs of the largest sizes"],
    ),
    "rows of a loop whose results are added": (
        Function(lambda x: mapped(lambda row: row.sin(), x) + x), (ROWS,),
        Function(lambda x: scan(lambda carry, row: (carry.clone(), row.sin()), torch.zeros(1), x)[1] + x), (ROWS,),
        ({0: Dim("n", min=2, max=4)},),
        ["PROGRAM_CANNOT_RUN", "at its smallest inputs", "of map at ", "test_remedies.py:", "write the loop as a scan"],
    ),
    "rows of dynamic sizes": (
        Function(lambda x: mapped(lambda row: row.sin() + 1, x)), (X,), Function(lambda x: x.sin() + 1), (X,),
        ({1: Dim("n", min=2, max=4)},),
        ["PROGRAM_CANNOT_RUN", "of map at ", "test_remedies.py:", "fixed sizes only", "to all rows at once"],
    ),
    "a circular pad of a dynamic size, xnnpack": (
        Function(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")), (GRAY,),
        Function(nn.Sequential(Function(lambda x: circular(circular(x, -1), -2)), nn.Conv2d(1, 2, 3))), (GRAY,),
        ({3: Dim("w", min=3, max=9)},),
        ["PROGRAM_CANNOT_RUN", "of aten::pad at ", "test_remedies.py:", "torch.cat([x[..., -p:], x, x[..., :p]], -1)"],
    ),
    "a circular pad of a dynamic size": (
        Function(lambda x: F.pad(x, (2, 2), mode="circular") + 1), (GRAY[0],), Function(lambda x: circular(x, -1, 2) + 1),
        (GRAY[0],), ({2: Dim("w", min=3, max=9)},),
        ["PROGRAM_CANNOT_RUN", "of aten::pad at ", "test_remedies.py:", "torch.cat([x[..., -p:], x, x[..., :p]], -1)"],
    ),
    "an adaptive max pool of a dynamic size": (
        Function(lambda x: F.adaptive_max_pool2d(x, 1)), (GRAY,), Function(lambda x: x.amax((2, 3), keepdim=True)), (GRAY,),
        ({3: Dim("w", min=3, max=9)},),
        ["PROGRAM_CANNOT_RUN", "test_remedies.py:", "Use x.amax((2, 3), keepdim=True) for F.adaptive_max_pool2d(x, 1)"],
    ),
    "a 3-D convolution": (
        Function(lambda x: F.conv3d(x, CUBE)), (VOLUME,), Function(by_depth), (VOLUME,),
        None, ["PROGRAM_CANNOT_RUN", "aten::convolution at ", "test_remedies.py:", "no convolutions in 3-D"],
    ),
    "a buffer that is a part of another": (
        Viewed(is_part=True), (torch.ones(1, 3),), Viewed(is_part=False), (torch.ones(1, 3),), None,
        ["STAGE_FAILED", "one buffer, and take parts of it in forward, such as self.cache[0]"],
    ),
    "batch statistics": (
        nn.BatchNorm1d(2, track_running_stats=False), (X[None],), nn.InstanceNorm1d(2), (X[None],), None,
        ["TRAINING_MODE", "batch_norm", "always computes those of the batch"],
    ),
    "seven dims": (
        Function(lambda x: x.unsqueeze(0) + x.unsqueeze(1)), (SIX,),
        Function(lambda x: x.flatten(1).unsqueeze(0) + x.flatten(1).unsqueeze(1)), (SIX,),
        None, ["PROGRAM_CANNOT_RUN", "aten::", "test_remedies.py:", "at most 6 dims", "Reshape to at most six dims"],
    ),
    "an approximated GELU, xnnpack": (
        Function(lambda x: F.gelu(x, approximate="tanh")), (X,),
        Function(lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))), (X,),
        None, ["GELU_NOT_APPROXIMATED", "aten::gelu at ", "test_remedies.py:", "1 + torch.tanh(0.7978845608 * (x + 0.044715"],
    ),
    "a resize by a scale, xnnpack": (
        Function(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear")), (GRAY,),
        Function(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear", recompute_scale_factor=True)), (GRAY,),
        None, ["RESIZE_NOT_DELEGATED", "aten::upsample_bilinear2d at ", "test_remedies.py:", "recompute_scale_factor=True"],
    ),
    "dynamic sizes in channels last, xnnpack": (
        nn.Conv2d(1, 2, 3), (ONE,), nn.Conv2d(1, 2, 3), (ONE.clone(memory_format=torch.contiguous_format),),
        {2: Dim("h", min=4, max=9), 3: Dim("w", min=4, max=9)},
        ["PROGRAM_CANNOT_RUN", "formats: give input the usual one with .clone(memory_format=torch.contiguous_format)"],
    ),
    "a dynamic batch in channels last, xnnpack": (
        nn.Conv2d(1, 2, 3), (ONE.repeat_interleave(2, 0).to(memory_format=torch.channels_last),),
        nn.Conv2d(1, 2, 3), (torch.rand(2, 1, 7, 5),), {0: Dim("batch", max=4)},
        ["PROGRAM_CANNOT_RUN", "formats: give input the usual one with .clone(memory_format=torch.contiguous_format)"],
    ),
    "branches": (
        Function(branches), (X,), Function(chosen), (X,),
        None, ["BRANCH_OUTPUTS_COPIED", "torch.cond at ", "test_remedies.py:", "torch.where"],
    ),
    "a weight within a branch and a delegate": (
        Exits(shared=True), (X,), Exits(shared=False), (X,),
        None, ["STAGE_FAILED", "weight early.weight to a delegate and to cond at ", "test_remedies.py:", "copy.deepcopy"],
    ),
}  # fmt: skip


def test_steps_along_the_depth_are_a_convolution_in_3d() -> None:
    torch.testing.assert_close(by_depth(VOLUME), F.conv3d(VOLUME, CUBE))


@pytest.mark.parametrize("n", [7, 8])
def test_a_mirrored_half_is_a_spectrum(n: int) -> None:
    x = torch.rand(2, n)
    torch.testing.assert_close(spectrum(x), torch.fft.fft(x).abs())


def test_a_transform_along_the_last_dim_is_one_along_another() -> None:
    mended = CASES["a Fourier transform along another dim"][2]
    torch.testing.assert_close(mended(WAVES), torch.fft.rfft(WAVES, dim=1).abs())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_remainders_that_cannot_be_negative_integers_are_not_named(dtype: torch.dtype) -> None:
    program = torch.export.export(Function(lambda x: x % 4), (torch.ones(3, dtype=dtype),))
    assert find_remainders(program) == ""


class Counts(nn.Module):
    """Counts its calls by some step, and returns a remainder of the count."""

    def __init__(self, step: int, *, in_place: bool) -> None:
        super().__init__()
        self.step, self.in_place = step, in_place
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Any) -> Any:
        if self.in_place:
            self.calls.add_(self.step)
        else:
            self.calls.copy_(self.calls + self.step)
        return x + self.calls % 4


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("functional", [False, True])
def test_remainders_of_counters_are_not_named_unless_they_count_down(in_place: bool, functional: bool) -> None:
    for step in (1, -1):
        program = torch.export.export(Counts(step, in_place=in_place), (torch.ones(3),))
        if functional:
            program = program.run_decompositions({})
        assert (find_remainders(program) == "") == (step > 0)


def test_an_exact_gelu_and_one_outside_of_delegates_are_not_named() -> None:
    row = OperatorDelegation(op="aten_gelu_default", delegated=1)
    exact, tanh = (torch.export.export(nn.GELU(approximate=kind), (X,)) for kind in ("none", "tanh"))
    assert describe_exact(exact, [row]) == ""
    assert describe_exact(tanh, [OperatorDelegation(op="aten_gelu_default")]) == ""
    assert "aten::gelu" in describe_exact(tanh, [row])
    x = torch.linspace(-8, 8, 10001, dtype=torch.float64)
    assert (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max() < 0.0005


@pytest.mark.remedy("DATA_DEPENDENT_BRANCH", "UNSUPPORTED_QUANTIZED_OP", "PROGRAM_CANNOT_RUN", "STAGE_FAILED")
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", CASES)
async def test_a_remedy_helps(workers: Workers, tmp_path: Path, name: str) -> None:
    broken, inputs, mended, other_inputs, shapes, words = CASES[name]
    on_xnnpack = name in ("seven dims", "a weight within a branch and a delegate") or name.endswith("xnnpack")
    recipe = "xnnpack_fp32" if on_xnnpack else "portable"

    def make(module: nn.Module, args: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: torch.export.export(module.eval(), args, dynamic_shapes=(shapes,) if shapes else None)

    try:
        result = (await compiled(workers, tmp_path / "broken", make(broken, inputs), recipe)).result
        sentences = " ".join(f"{warning['code']} {warning['message']}" for warning in result["warnings"])
    except UserError as error:
        sentences = f"{error.reason} {error}"
    missing = [word for word in words if word not in sentences]
    assert not missing, f"{missing} not in: {sentences}"
    result = (await compiled(workers, tmp_path / "mended", make(mended, other_inputs), recipe)).result
    # Where a remedy is a torch._check, the report says that programs do not check it.
    others = [warning["message"] for warning in result["warnings"] if warning["code"] != "ASSERTIONS_DROPPED"]
    assert others == []
    assert all(check["ran"] and not check["why"] for check in result["checks"]) and result["checks"]
