"""Layers that XNNPACK computes otherwise than their quantized graph says, and the options that prevent it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.refusals import refuses

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, components, fusion, quantize
from etfarm.server.compile.program import values
from etfarm.server.graphs import quantized_outputs
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, sample

pytestmark = pytest.mark.numeric


class Twice(nn.Module):
    """A layer with two uses whose inputs have other ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x) * 20)


class Activated(Twice):
    """The layer has an activation behind it that the quantizer does not take with a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu6(self.layer(self.layer(x) * 20))


class Ranges(nn.Module):
    """Channels of very different ranges, limited to 6 by an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.point = nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.depth.weight.mul_(torch.logspace(-3, 1, 8).view(8, 1, 1, 1))
            self.point.weight.mul_(torch.logspace(2, -2, 8).view(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.point(nn.functional.relu6(self.depth(x)))


class Shared(nn.Module):
    """Convolutions with kernels of two sizes and one input."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Conv2d(3, 4, 3, padding=1)
        self.small = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) * 0.35 + self.small(x)


def compared(
    module: type[nn.Module], shape: tuple[int, ...], options: str, folder: Path, name: str = STATIC
) -> tuple[float, float, str, set[str]]:
    """Quantize and lower a module; return its SQNR against its graph and the model in dB, the warning, and unused options."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(shape)
    program = torch.export.export(model, (x,))
    recipe = recipes.from_toml(f'recipe = "{name}"\n{options}')
    quantization = build.quantization(recipe, "forward")
    calibration = [sample(folder / f"{factor}.ett", x * factor) for factor in (0.5, 1.5, 2)]
    unused = set(recipe.options.before_quantization())
    quantized = quantize.export_again(
        quantize.quantize(program, quantization, recipe.name, "forward", calibration, recipe.options, unused), program, False
    )
    lowered = to_edge_transform_and_lower(quantized, partitioner=[XnnpackPartitioner()]).to_executorch()
    (output,) = Runtime.get().load_program(lowered.buffer).load_method("forward").execute([x])
    expected = quantized.module()(x)
    pair = values.to_value("y", expected), values.to_value("y", output)
    warning = quantized_outputs.describe(quantized, ["y"], [[pair]], lambda _: [x], ["XnnpackBackend"])
    return decibels(expected, output), decibels(model(x).detach(), output), warning, unused


def decibels(expected: Tensor, actual: Any) -> float:
    noise = (expected - actual).double().square().sum().item()
    return 300.0 if noise == 0 else 10 * math.log10(expected.double().square().sum().item() / noise)


@pytest.mark.slow(reason="lowers models")
@pytest.mark.parametrize(
    ("module", "shape", "option", "unused"),
    [
        (Twice, (1, 3, 16), "copy_shared_layers", {"fuse_activations"}),
        (Activated, (1, 3, 16), "copy_shared_layers", set()),
        (Ranges, (1, 8, 12, 12), "fuse_activations", {"copy_shared_layers"}),
    ],
)
def test_a_program_that_is_wrong_when_fused_names_the_option_that_helps(
    module: type[nn.Module], shape: tuple[int, ...], option: str, unused: set[str], tmp_path: Path
) -> None:
    level, of_model, warning, _ = compared(module, shape, "", tmp_path)
    assert level < quantized_outputs.LEAST_DB and f"y ({level:.1f} dB)" in warning
    assert re.findall(r"write (\w+) = true", warning) == [option]
    assert ("depth (" in warning) if module is Ranges else ("layer (" in warning)
    better, better_of_model, silent, without_effect = compared(module, shape, f"{option} = true", tmp_path)
    assert better > 30 and not silent and not without_effect
    both = compared(module, shape, "copy_shared_layers = true\nfuse_activations = true", tmp_path)
    assert both[0] > 30 and not both[2] and both[3] == unused
    print(f"{module.__name__}: {level:.1f} to {better:.1f} dB, against the model {of_model:.1f} to {better_of_model:.1f} dB")
    assert better_of_model > of_model - 1


class Attention(nn.Module):
    """Three linear layers with one input, of which two are normalized before they meet, as in some decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return (self.q_norm(q) @ self.k_norm(k).transpose(2, 3)).softmax(-1) @ v


@pytest.mark.slow(reason="lowers models")
@pytest.mark.parametrize(("module", "shape"), [(Shared, (1, 3, 8, 8)), (Attention, (1, 6, 32))])
def test_layers_with_dynamic_scales_and_one_input_are_near_their_graph(
    module: type[nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    level, of_model, _, _ = compared(module, shape, "", tmp_path, DYNAMIC)
    assert level > 35 and of_model > 35


def test_options_without_a_quantizer_are_refused() -> None:
    with refuses("BAD_RECIPE_COMBINATION", match="copy_shared_layers changes what the stage QUANTIZE quantizes"):
        recipes.from_toml('recipe = "xnnpack_fp32"\ncopy_shared_layers = true')


def test_fusing_activations_is_refused_without_xnnpack() -> None:
    with refuses("BAD_RECIPE_COMBINATION", match="fuses, which coreml does not use"):
        recipes.from_toml('partitioners = ["coreml"]\nquantizers = ["coreml"]\nfuse_activations = true')


def test_options_are_part_of_the_quantization_that_recipes_share() -> None:
    plain, copied = (
        recipes.from_toml(f'recipe = "xnnpack_pt2e_int8_static_per_channel"\ncopy_shared_layers = {flag}')
        for flag in ("false", "true")
    )
    assert plain.quantization_json != copied.quantization_json
    assert plain == recipes.parse("xnnpack_pt2e_int8_static_per_channel")
    assert recipes.from_json(copied.json) == copied


class Named(nn.Module):
    """Layers whose names differ in a dot only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b = nn.ModuleDict({"b": nn.Linear(2, 2)}), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.a_b(self.a_b(self.a["b"](self.a["b"](x))))


def test_each_copy_of_a_layer_has_the_weights_of_that_layer() -> None:
    model, x = Named().eval(), torch.rand(3, 2)
    captured: Any = torch.export.export(model, (x,)).module(check_guards=False)
    before = dict(captured.named_parameters())
    fusion.copy_shared_layers(captured)
    assert torch.equal(captured(x), model(x))
    assert dict(captured.named_parameters()).keys() - before.keys() == {f"{name}_copy_1" for name in before}


def test_an_activation_that_is_fused_counts_as_quantized() -> None:
    names = '[":relu6", "depth:conv2d"]'
    recipe = recipes.from_toml(
        f'fuse_activations = true\npartitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\nonly_operators = {names}'
    )
    program = torch.export.export(Ranges().eval(), (torch.randn(1, 8, 12, 12),))
    quantization = build.quantization(recipe, "forward")
    assert quantization is not None
    quantize.quantize(program, quantization, recipe.name, "forward", [], recipe.options)
    (quantizer,) = quantization.quantizers
    listed = [(row.name, row.count, row.quantized) for row in quantizer.selection.listed()]
    assert listed == [(":relu6", 1, 1), ("depth:conv2d", 1, 1)]


@pytest.mark.slow(reason="lowers models")
@pytest.mark.parametrize("skips", [False, True])
def test_an_activation_that_is_skipped_is_not_fused(skips: bool) -> None:
    names = 'skip_modules = ["1"]\n' if skips else ""
    recipe = recipes.from_toml(f'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\n{names}')
    (quantizer,) = components.quantizers(recipe.options.quantizers or ())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6()).eval()
    captured: Any = torch.export.export(model, (torch.rand(1, 3, 8, 8),)).module(check_guards=False)
    fusion.ActivationsFused(quantizer).annotate(captured)
    layer, activation = (node for node in captured.graph.nodes if str(node.target).startswith(("aten.conv2d", "aten.hardtanh")))
    assert ("quantization_annotation" in activation.meta) is not skips
    assert (layer.meta["quantization_annotation"].output_qspec is None) is not skips


class Signals(nn.Module):
    """Convolutions in one dimension, of which XNNPACK quantizes all but the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(8, 8, 3, stride=2), nn.Conv1d(8, 8, 3, padding="same", groups=2)
        self.c = nn.ConvTranspose1d(8, 4, 3, stride=2, output_padding=1, groups=4, bias=False)
        self.d = nn.Conv1d(4, 8, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(torch.relu(self.b(self.a(x)))))


@pytest.mark.slow(reason="lowers models")
@pytest.mark.parametrize("skipped", ['"c"', '"a", "d"', '"b", "c", "d"'])
def test_convolutions_in_one_dimension_stay_in_fp32_beside_quantized_ones(skipped: str, tmp_path: Path) -> None:
    """XNNPACK refused them, or made an operator that it could not load."""
    options = f'[[quantizers]]\nname = "xnnpack"\nper_channel = true\nskip_modules = [{skipped}]'
    level, of_model, _, _ = compared(Signals, (1, 8, 32), options, tmp_path, "xnnpack_fp32")
    assert level > 40 and of_model > 35
