"""Quantized models with batch norms that cannot be folded into the layer before them are near the model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

pytest.importorskip("executorch")

from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from etfarm.server.compile.lower import batch_norms, build, quantize
from etfarm.server.workers.pool import Workers
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, compiled, run, sample

pytestmark = pytest.mark.numeric


def norm(kind: type[nn.Module] = nn.BatchNorm2d, channels: int = 4) -> nn.Module:
    """Return a batch norm that is far from the identity."""
    result = kind(channels)
    assert isinstance(result.running_mean, Tensor) and isinstance(result.running_var, Tensor)
    result.running_mean.normal_(0.2, 0.7)
    result.running_var.uniform_(0.3, 4)
    return result


class Heads(nn.Module):
    """A convolution that is shared by levels, with a batch norm for each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 2)
        self.norms = nn.ModuleList(norm() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        levels = (x, x[:, :, 1:, 1:] * 0.9, x[:, :, 2:, 2:] * 1.1)
        return tuple(self.out(F.relu(n(self.conv(y))).mean((2, 3))) for y, n in zip(levels, self.norms, strict=True))


class Levels(nn.Module):
    """Convolutions that two levels of different ranges share, with a batch norm for each level."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.conv, self.out = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1)
        self.norms = nn.ModuleList(norm(channels=8) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = F.relu(self.stem(x))
        levels = (fine, F.relu(self.down(fine)))
        return [self.out(F.relu(n(self.conv(y)))) for y, n in zip(levels, self.norms, strict=True)]


class FirstUse(nn.Module):
    """A convolution with two uses, of which the first one has a batch norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(4, 4, 3, padding=1), norm(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.conv(F.relu(self.norm(self.conv(x))))).mean((2, 3)))


class Around(FirstUse):
    """A path leads around the batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.out(F.relu(self.norm(y) + y).mean((2, 3)))


class Returned(FirstUse):
    """What the batch norm takes is an output as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return self.out(F.relu(self.norm(y)).mean((2, 3))), y


class Two(FirstUse):
    """Two batch norms take the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.other = norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return self.out(self.norm(y).relu().mean((2, 3))), self.out(self.other(y).relu().mean((2, 3)))


class InPlace(nn.Module):
    """An activation in place is behind a batch norm that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return F.relu_(self.norm(y)) * 2, y


class Layer(nn.Module):
    """A linear layer with a path around its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(8, 4), norm(nn.BatchNorm1d), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(1)[:, :8])
        return self.out(F.relu(self.norm(y)) + y)


class SharedBias(nn.Module):
    """Two convolutions have one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.second.bias = self.first.bias
        self.first_norm, self.second_norm = norm(), norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.second_norm(self.second(self.first_norm(self.first(x))))


class Dropped(FirstUse):
    """Dropout, which lowering removes, is between a convolution with two uses and its batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.drop = norm(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.norm(self.drop(self.conv(x))) + self.other(self.drop(self.conv(x * 2)))).mean((2, 3)))


class WeightNorm(nn.Module):
    """The weight of a convolution is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), norm(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Transposed(nn.Module):
    """A transposed convolution has groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose2d(4, 4, 4, 2, 1, groups=groups, bias=False), norm()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Volumes(nn.Module):
    """A transposed convolution of volumes has groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose3d(4, 4, 2, 2, groups=2), norm(nn.BatchNorm3d)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x[:, :, None]))


class Depthwise(Transposed):
    """Each channel is a group."""

    def __init__(self) -> None:
        super().__init__(4)


class Grouped(Transposed):
    """Two channels are a group."""

    def __init__(self) -> None:
        super().__init__(2)


class Foldable(nn.Module):
    """All batch norms can be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv2d(4, 4, 3, bias=False), norm(), nn.ConvTranspose2d(4, 4, 2, 2)
        self.up_norm, self.layer, self.layer_norm = norm(), nn.Linear(4, 4), norm(nn.BatchNorm1d)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.up_norm(self.up(F.relu(self.norm(self.conv(x))))))
        return self.layer_norm(self.layer(x.mean((2, 3))))


class PreNorm(nn.Module):
    """A pre-norm block is behind an embedding that ends in a batch norm, as in VAN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = (nn.Conv2d(4, 4, size, padding=size // 2) for size in (3, 3, 1))
        self.norms = nn.ModuleList(norm() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.embedding(x))
        x = x + self.first(F.relu(self.norms[1](x)))
        return x + self.second(F.relu(self.norms[2](x)))


class Attention(PreNorm):
    """The batch norm of VAN's block is used twice: by the attention and by the path around it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.embedding(x))
        y = F.gelu(self.first(self.norms[1](x)))
        x = x + 0.5 * (self.second(y) * y + self.norms[1](x))
        return x + self.second(F.gelu(self.norms[2](x)))


class PreActivation(PreNorm):
    """A pre-activation ResNet: batch norms are behind additions, and the first one behind a convolution without one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.first(F.relu(self.norms[0](x)))
        x = x + self.second(F.relu(self.norms[1](x)))
        return F.relu(self.norms[2](x))


class Dense(nn.Module):
    """Batch norms of a DenseNet are behind concatenations, and one behind the convolution of a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.narrow, self.second = nn.Conv2d(8, 4, 1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList(norm(channels=each) for each in (4, 4, 8, 4, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x))
        x = torch.cat([x, self.first(F.relu(self.norms[1](x)))], 1)
        x = torch.cat([x, self.second(F.relu(self.norms[3](self.narrow(F.relu(self.norms[2](x))))))], 1)
        return F.relu(self.norms[4](x))


class Chain(nn.Module):
    """Batch norms follow each other behind a convolution and behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(4, 4, 3), nn.Linear(4, 4)
        self.norms = nn.ModuleList([norm(), norm(), norm(), norm(nn.BatchNorm1d), norm(nn.BatchNorm1d)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[2](self.norms[1](self.norms[0](self.conv(x)))))
        return self.norms[4](self.norms[3](self.layer(x.mean((2, 3)))))


class Tokens(nn.Module):
    """A batch norm behind a linear layer is for tokens, of which there are as many as features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(8, 8), norm(nn.BatchNorm1d, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.layer(x[:, 0]))))


class OwnStatistics(nn.Module):
    """Batch norms compute with the statistics of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x))))


def norms_after(module: type[nn.Module], recipe: str) -> tuple[int, float]:
    """Quantize a module; return how many batch norms are left, and the least SQNR of its outputs in dB."""
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(2, 4, 8, 8)
    program = torch.export.export(model, (x,))
    quantized = quantize.quantize(program, build.quantization(recipes.parse(recipe), "forward"), recipe, "forward", [])
    assert isinstance(quantized, torch.fx.GraphModule)
    targets = [str(node.target) for node in quantized.graph.nodes]
    assert not any("kept" in target for target in targets)
    expected, actual = model(x), quantized(x)
    pairs = zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
    return sum("batch_norm" in target for target in targets), min(sqnr_db(*pair) for pair in pairs)


def sqnr_db(expected: Tensor, actual: Tensor) -> float:
    noise = (expected - actual).double().square().sum().item()
    return 10 * math.log10(expected.double().square().sum().item() / noise)


@pytest.mark.parametrize(
    ("module", "kept", "recipe"),
    [
        (Heads, 3, STATIC), (FirstUse, 1, STATIC), (Around, 1, STATIC), (Around, 1, DYNAMIC), (Returned, 1, STATIC),
        (Two, 2, STATIC), (InPlace, 1, STATIC), (Layer, 1, STATIC), (Layer, 1, DYNAMIC), (SharedBias, 2, STATIC),
        (WeightNorm, 1, STATIC), (Depthwise, 1, STATIC), (Grouped, 1, DYNAMIC), (Foldable, 0, STATIC),
        (PreNorm, 2, STATIC), (PreNorm, 2, DYNAMIC), (Attention, 3, STATIC), (PreActivation, 3, STATIC), (Dense, 3, STATIC),
        (Chain, 3, STATIC), (Chain, 3, DYNAMIC), (Tokens, 1, STATIC), (OwnStatistics, 1, STATIC),
    ],
)  # fmt: skip
def test_a_batch_norm_that_cannot_be_folded_stays(module: type[nn.Module], kept: int, recipe: str) -> None:
    norms, level = norms_after(module, recipe)
    assert norms == kept and level > 25


@pytest.mark.parametrize(
    "module",
    [
        Heads, FirstUse, Around, Returned, Two, Layer, SharedBias, Dropped, WeightNorm, Volumes, Depthwise, Grouped, Foldable,
        PreNorm, Attention, PreActivation, Dense, Chain, Tokens, OwnStatistics,
    ],
)  # fmt: skip
def test_a_graph_with_observers_computes_the_same(module: type[nn.Module]) -> None:
    """A wrong fold shows before anything is rounded."""
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(2, 4, 8, 8)
    quantizers = build.quantization(recipes.parse(STATIC), "forward").quantizers
    captured = torch.export.export(model, (x,)).module(check_guards=False)
    batch_norms.keep_what_cannot_be_folded(captured, quantizers)
    torch.testing.assert_close(prepare_pt2e(captured, quantizers[0])(x), model(x), rtol=1e-4, atol=1e-4)


def test_the_graph_is_that_of_all_patterns() -> None:
    """A quantizer looks for layers with a batch norm behind them, of which none is left."""
    torch.manual_seed(0)
    model, x = Layer().eval(), torch.randn(2, 4, 8, 8)
    program = torch.export.export(model, (x,))
    of_ours = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", [])
    (quantizer,) = build.quantization(recipes.parse(STATIC), "forward").quantizers
    captured = program.module(check_guards=False)
    batch_norms.keep_what_cannot_be_folded(captured, [])
    prepared = prepare_pt2e(captured, quantizer)
    prepared(x)
    of_all = convert_pt2e(prepared)
    batch_norms.show_what_was_kept(of_all)
    assert [str(node.target) for node in of_ours.graph.nodes] == [str(node.target) for node in of_all.graph.nodes]
    assert torch.equal(of_ours(x), of_all(x))


@pytest.mark.slow(reason="each test compiles in children")
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        (Heads, "xnnpack_fp32"), (SharedBias, "xnnpack_fp32"), (Grouped, "xnnpack_fp32"), (Dropped, "xnnpack_fp32"),
        (Around, STATIC), (WeightNorm, STATIC), (Depthwise, STATIC), (Returned, DYNAMIC), (PreNorm, STATIC), (PreNorm, DYNAMIC),
        (Attention, STATIC), (PreActivation, STATIC), (Dense, STATIC), (Chain, STATIC), (Chain, DYNAMIC), (Chain, "xnnpack_fp32"),
        (Tokens, "xnnpack_fp32"), (Tokens, STATIC),
    ],
)  # fmt: skip
async def test_a_lowered_program_with_batch_norms_is_near_the_model(
    workers: Workers, tmp_path: Path, module: type[nn.Module], recipe: str
) -> None:
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(2, 4, 8, 8)
    result = (await compiled(workers, tmp_path, lambda: torch.export.export(model, (x,)), recipe)).result
    wrong = {"OUTPUTS_DIFFER", "LOW_ACCURACY", "FAR_FROM_QUANTIZED_GRAPH"}
    assert not [warning["message"] for warning in result["warnings"] if warning["code"] in wrong]
    assert result["checks"] and all(check["ran"] and not check["why"] for check in result["checks"])


@pytest.mark.slow(reason="each test compiles in children")
@pytest.mark.asyncio(loop_scope="session")
async def test_a_head_with_a_batch_norm_for_each_level_is_right(workers: Workers, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Levels().eval(), torch.randn(1, 3, 32, 32)
    samples = {"forward": [sample(tmp_path / f"{index}.ett", torch.randn(1, 3, 32, 32)) for index in range(8)]}

    def exported() -> object:
        return torch.export.export(model, (x,))

    recipe = recipes.from_toml(f'recipe = "{STATIC}"\ncopy_shared_layers = true\n')
    for name, used in (("plain", STATIC), ("copied", recipe)):
        done = await compiled(workers, tmp_path / name, exported, used, calibration=samples)
        assert not {"LOW_ACCURACY", "FAR_FROM_QUANTIZED_GRAPH", "OPTION_WITHOUT_EFFECT"} & set(done.codes)
        outputs = zip(model(x), run(done.pte, [x]), strict=True)
        assert all(sqnr_db(expected, actual) > 25 for expected, actual in outputs)
