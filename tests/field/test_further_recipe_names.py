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
from etfarm.client.reports.documents import SelectedName
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="a farm quantizes a network twice, and refuses six names")


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


CONV1: Final = f"{Path(__file__).name}:{line_of('self.conv1(x)')}"
SKIPPED: Final = """
skip_modules = ["features.1.se", "features.2.2"]
skip_operators = ["features.1:add", "features.1:relu#1"]
"""
ONLY: Final = f"""
only_modules = ["features.0.0"]
only_operators = ["{CONV1}"]
"""
NOTHING: Final = 'only_operators = ["features.1:relu"]'


@pytest.fixture(scope="module")
def reports(farm: FarmProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Return the reports of one network, quantized once with each of the arguments in a recipe file."""
    folder = tmp_path_factory.mktemp("recipes")
    arguments = [SKIPPED, ONLY, NOTHING, *(f'{argument} = ["{name}"]' for argument, name, _ in REFUSED)]
    files = [folder / f"named{place}.toml" for place in range(len(arguments))]
    for file, text in zip(files, arguments, strict=True):
        file.write_text(f'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\n{text}\n')
    torch.manual_seed(0)
    network = ModelSource.of(SmallMobileNet().eval(), (torch.rand(1, 3, 8, 8),))
    with farm.client() as client:
        result = client.compile(network, recipes=[str(file) for file in files], stop_after="QUANTIZE").result()
    return dict(zip(arguments, result.reports, strict=True))


def in_fp32(report: Report, kind: str) -> set[str | None]:
    """Return the modules of the operators of one kind that stayed in fp32."""
    assert report.compile is not None
    if "forward" not in report.compile.stayed_fp32:
        return set()
    operators = [each for each in report.compile.stayed_fp32["forward"].operators if kind in each.op]
    return {place.module for each in operators for place in each.places}


def selected(report: Report) -> dict[str, SelectedName]:
    """Return what each name selected."""
    assert report.error is None and report.compile is not None
    return {row.name: row for row in report.compile.selected["forward"].names}


def test_layers_of_torchvision_and_lines_are_quantized_alone(reports: dict[str, Report]) -> None:
    report = reports[ONLY]
    row, of_line = selected(report)["features.0.0"], selected(report)[CONV1]
    assert (row.argument, row.count, row.quantized) == ("only_modules", 1, 1)
    assert of_line.argument == "only_operators" and of_line.count >= 1 and of_line.quantized >= 1
    assert in_fp32(report, "conv") == CONVOLUTIONS - {"features.0.0", "features.1.conv1"}
    assert report.compile is not None and "QUANTIZED_NOTHING" not in [warning.code for warning in report.compile.warnings]


def test_what_is_skipped_stays_in_fp32_and_nothing_else(reports: dict[str, Report]) -> None:
    """A block, an activation behind a convolution, a functional addition, and the second of two activations."""
    report = reports[SKIPPED]
    assert in_fp32(report, "conv") == {"features.1.se.reduce", "features.1.se.expand"}
    rows = selected(report)
    assert sum(each.count for each in rows["features.1.se"].operators if "conv" in each.op) == 2
    assert all(row.quantized == 0 for row in rows.values())
    assert [rows[name].count for name in ("features.2.2", "features.1:add", "features.1:relu#1")] == [1, 1, 1]
    assert [each.op for each in rows["features.1:add"].operators] == ["add"]
    sources = [each.source for operator in rows["features.1:relu#1"].operators for each in operator.places]
    assert [source and source.line for source in sources] == [line_of("return nn.functional.relu(y)")]


def test_a_name_of_what_cannot_be_quantized_alone_is_listed(reports: dict[str, Report]) -> None:
    report = reports[NOTHING]
    row = selected(report)["features.1:relu"]
    assert (row.count, row.quantized) == (2, 0)
    assert report.compile is not None and "QUANTIZED_NOTHING" in [warning.code for warning in report.compile.warnings]


@pytest.mark.parametrize(("argument", "name", "nearest"), REFUSED)
def test_a_name_that_selects_nothing_is_refused_with_the_nearest(
    reports: dict[str, Report], argument: str, name: str, nearest: str
) -> None:
    refused = reports[f'{argument} = ["{name}"]'].error
    assert refused is not None and refused.reason == "RECIPE_NAME_NOT_FOUND"
    assert name in refused.message and nearest in refused.remedy, (refused.message, refused.remedy)


class CalledByAnother(nn.Module):
    """Calls a layer by the second of its names, which `named_modules` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.second(x))


class Aliased(nn.Module):
    """Calls one layer by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.first = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.first(x * 2)


@pytest.mark.parametrize("name", ["layers.0", "first"])
def test_a_layer_is_skipped_by_each_of_its_names(farm: FarmProcess, tmp_path: Path, name: str) -> None:
    file = tmp_path / "skipped.toml"
    file.write_text(f'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\nskip_modules = ["{name}"]\n')
    source = ModelSource.of(Aliased().eval(), (torch.rand(2, 4),))
    with farm.client() as client:
        (report,) = client.compile(source, recipes=str(file), stop_after="QUANTIZE").result().reports
    row = selected(report)[name]
    assert (row.count, row.quantized) == (2, 0)
    assert in_fp32(report, "linear") == {"layers.0", "first"}


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_layer_is_found_by_a_name_that_the_model_does_not_call(farm: FarmProcess, tmp_path: Path, name: str) -> None:
    file = tmp_path / "only.toml"
    file.write_text(f'partitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\nonly_modules = ["{name}"]\n')
    source = ModelSource.of(CalledByAnother().eval(), (torch.rand(2, 4),))
    with farm.client() as client:
        (report,) = client.compile(source, recipes=str(file), stop_after="QUANTIZE").result().reports
    row = selected(report)[name]
    assert (row.count, row.quantized) == (1, 1)
    assert in_fp32(report, "linear") == {"other"}
