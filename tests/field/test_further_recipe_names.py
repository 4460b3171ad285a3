"""Names in recipe files for networks of torchvision's and timm's form: each means what a reader of the model expects."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Report
from etfarm.client.export import ModelSource
from etfarm.client.reports.compilation import SelectedName
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="a farm quantizes a network a dozen times")

RECIPE: Final = 'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\n{argument} = ["{name}"]\n'


class ConvNormActivation(nn.Sequential):
    """torchvision's layer: 0 is the convolution, 1 the batch norm, 2 the activation."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )


class SqueezeExcitation(nn.Module):
    """timm's attention over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, 4, 1)
        self.expand = nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.relu(self.reduce(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.expand(scale))


class Residual(nn.Module):
    """A block with a functional addition and two functional activations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.se = SqueezeExcitation(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.conv1(x))
        y = self.conv2(self.se(y))
        y = y + x
        return nn.functional.relu(y)


class SmallMobileNet(nn.Module):
    """Features, pooling and a classifier, named as torchvision names them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(ConvNormActivation(3, 8), Residual(8), ConvNormActivation(8, 8, groups=8))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.features(image).mean((2, 3)))


CONVOLUTIONS: Final = {
    "features.0.0", "features.1.conv1", "features.1.se.reduce", "features.1.se.expand", "features.1.conv2", "features.2.0",
}  # fmt: skip


SUCCEEDS: Final = {
    "only_modules": ("features.0.0",),
    "skip_modules": ("features.1.se", "features.2.2"),
    "skip_operators": ("features.1:add", "features.1:relu#1"),
}
REFUSED: Final = [
    ("only_modules", "features.0.1", "features.0.0"),  # a batch norm that is folded
    ("skip_modules", "clasifier.1", "classifier.1"),
    ("skip_modules", "features.1.se.fc1", "features.1.se"),  # torchvision's name, where timm's is used
    ("skip_modules", "classifier.0", "classifier"),  # a dropout does nothing in a trained network
    ("only_operators", "features.1:mul", "features.1"),  # it belongs to features.1.se
    ("skip_operators", "features.1:relu#2", "features.1:relu"),  # there are two
]


def line_of(code: str) -> int:
    lines, start = inspect.getsourcelines(Residual.forward)
    (place,) = [place for place, line in enumerate(lines) if code in line]
    return start + place


CONV1: Final = ("only_operators", f"{Path(__file__).name}:{line_of('self.conv1(x)')}")


@pytest.fixture(scope="module")
def reports(farm: FarmProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Report]:
    """Return the reports of one network, quantized once with each name in a recipe file."""
    folder = tmp_path_factory.mktemp("recipes")
    names = [(argument, name) for argument, own in SUCCEEDS.items() for name in own]
    names += [CONV1, *((argument, name) for argument, name, _ in REFUSED)]
    files = [folder / f"named{place}.toml" for place in range(len(names))]
    for file, (argument, name) in zip(files, names, strict=True):
        file.write_text(RECIPE.format(argument=argument, name=name))
    torch.manual_seed(0)
    network = ModelSource.of(SmallMobileNet().eval(), (torch.rand(1, 3, 8, 8),))
    with farm.client() as client:
        result = client.compile(network, recipes=[str(file) for file in files], stop_after="QUANTIZE").result()
    return dict(zip(names, result.reports, strict=True))


def in_fp32(report: Report, kind: str) -> set[str | None]:
    """Return the modules of the operators of one kind that stayed in fp32."""
    assert report.compile is not None
    if "forward" not in report.compile.stayed_fp32:
        return set()
    operators = [each for each in report.compile.stayed_fp32["forward"].operators if kind in each.op]
    return {place.module for each in operators for place in each.places}


def selected(report: Report) -> SelectedName:
    assert report.error is None and report.compile is not None
    (row,) = report.compile.selected["forward"].names
    return row


Reports = dict[tuple[str, str], Report]


def test_a_convolution_of_a_layer_of_torchvision_is_quantized_alone(reports: Reports) -> None:
    report = reports["only_modules", "features.0.0"]
    row = selected(report)
    assert (row.argument, row.name, row.count, row.quantized) == ("only_modules", "features.0.0", 1, 1)
    assert in_fp32(report, "conv") == CONVOLUTIONS - {"features.0.0"}
    assert report.compile is not None and "QUANTIZED_NOTHING" not in [warning.code for warning in report.compile.warnings]


def test_a_block_that_is_skipped_keeps_its_layers_and_no_others_in_fp32(reports: Reports) -> None:
    report = reports["skip_modules", "features.1.se"]
    assert in_fp32(report, "conv") == {"features.1.se.reduce", "features.1.se.expand"}
    row = selected(report)
    assert row.quantized == 0 and sum(each.count for each in row.operators if "conv" in each.op) == 2


def test_an_activation_that_is_skipped_leaves_the_convolution_before_it_quantized(reports: Reports) -> None:
    report = reports["skip_modules", "features.2.2"]
    assert selected(report).count == 1
    assert in_fp32(report, "conv") == set()


@pytest.mark.parametrize(("argument", "name", "nearest"), REFUSED)
def test_a_name_that_selects_nothing_is_refused_with_the_nearest(
    reports: Reports, argument: str, name: str, nearest: str
) -> None:
    refused = reports[argument, name].error
    assert refused is not None and refused.reason == "RECIPE_NAME_NOT_FOUND"
    assert name in refused.message and nearest in refused.remedy, (refused.message, refused.remedy)


def test_a_functional_addition_is_skipped_by_its_module_and_name(reports: Reports) -> None:
    report = reports["skip_operators", "features.1:add"]
    row = selected(report)
    assert (row.count, row.quantized) == (1, 0) and [each.op for each in row.operators if "add" in each.op]
    assert in_fp32(report, "conv") == set()


def test_the_second_functional_activation_is_not_the_first(reports: Reports) -> None:
    row = selected(reports["skip_operators", "features.1:relu#1"])
    assert (row.count, row.quantized) == (1, 0)
    sources = [each.source for operator in row.operators for each in operator.places]
    assert [source and source.line for source in sources] == [line_of("return nn.functional.relu(y)")]


def test_an_operator_is_selected_by_its_source_line(reports: Reports) -> None:
    report = reports[CONV1]
    row = selected(report)
    assert row.count >= 1 and row.quantized >= 1
    assert in_fp32(report, "conv") == CONVOLUTIONS - {"features.1.conv1"}
