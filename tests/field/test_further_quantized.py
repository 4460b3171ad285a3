"""Quantized models as public repositories write them: shared heads and layers, wide channels, torchao, and several samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm, Job, Report
from etfarm.client.export import ModelSource
from tests.support.quick_jobs import QUICK, warned

pytestmark = [pytest.mark.slow(reason="a farm compiles two dozen programs"), pytest.mark.numeric]

PER_CHANNEL: Final = "xnnpack_pt2e_int8_static_per_channel"
NEAR_DB: Final = 25.0
"""What a program must have against its own quantized graph, else a report warns."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bench(client: Farm, model: ModelSource | list[ModelSource], recipes: str | list[str], **more: Any) -> Job:
    return client.bench(model, recipes=recipes, **QUICK, **more)


def far(report: Report) -> list[str]:
    """Return the warnings that the program is not what its quantized graph says."""
    return warned(report, "FAR_FROM_QUANTIZED_GRAPH")


class PyramidHead(nn.Module):
    """The head of a detector, which all levels of a pyramid share."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.predict = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, features: list[Tensor]) -> dict[str, Tensor]:
        return {str(level): self.predict(self.tower(feature)) for level, feature in enumerate(features)}


def test_a_shared_head_whose_levels_have_other_ranges_is_near_its_quantized_graph(client: Farm, tmp_path: Path) -> None:
    def levels(seed: int) -> tuple[list[Tensor]]:
        return ([random(1, 8, 8 >> level, 8 >> level, seed=seed + level) * 6**level for level in range(3)],)

    torch.manual_seed(0)
    source = ModelSource.of(PyramidHead().eval(), levels(0), calibration_inputs=[levels(10 * seed) for seed in range(6)])
    (tmp_path / "copied.toml").write_text(f'recipe = "{PER_CHANNEL}"\ncopy_shared_layers = true\n')
    plain, copied = client.compile(source, recipes=[PER_CHANNEL, str(tmp_path / "copied.toml")]).result().reports
    for report in (plain, copied):
        assert report.error is None and report.compile is not None and not far(report)
        assert all(output.sqnr_db is not None and output.sqnr_db > NEAR_DB for output in report.compile.checks[0].outputs)


class TiedDecoder(nn.Module):
    """A decoder's block whose head has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.project = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.project(torch.softmax(query @ key.transpose(1, 2) * 32**-0.5, -1) @ value)
        return self.head(x)


TOKENS: Final = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def is_embedding(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Embedding)


def must_be_right_or_refused(report: Report, least_db: float) -> None:
    """Require equal outputs, or a reason that is about what is missing, with a remedy."""
    if report.error is not None:
        assert report.error.reason not in ("UNSAFE_MODEL", "STAGE_FAILED", "EXPORT_FAILED", "COMPILER_CRASHED"), report.error
        assert report.error.remedy, report.error
        return
    assert report.accuracy
    assert all(row.sqnr_db is not None and row.sqnr_db > least_db for row in report.accuracy), report.accuracy


def test_weights_that_torchao_quantized_run_as_they_are(client: Farm) -> None:
    """A tied head in int8, and a transform that quantizes the embedding to int8 and a layer to 4 bits."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    def transform(_: str, module: nn.Module) -> nn.Module:
        quantize_(module, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)), is_embedding)
        four_bits = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
        quantize_(module, four_bits, lambda _, name: name == "qkv")
        return module

    torch.manual_seed(0)
    tied, mixed = TiedDecoder().eval(), TiedDecoder().eval()
    quantize_(tied, Int8WeightOnlyConfig())
    mixed.head.weight = nn.Parameter(mixed.head.weight.detach().clone())
    source = ModelSource.of(tied, (TOKENS,))
    models = [source, ModelSource.of(mixed, (TOKENS,), source_transforms=[transform])]
    of_tied, of_mixed = bench(client, models, "xnnpack_fp32").result().reports
    must_be_right_or_refused(of_tied, 100)
    must_be_right_or_refused(of_mixed, 25)
    # The user's modules are as they were.
    assert type(mixed.embedding.weight) is nn.Parameter and type(mixed.embedding.weight.data) is Tensor
    with torch.no_grad():
        expected = tied(TOKENS).numpy()
    with client.session(program=source, recipe="xnnpack_fp32") as session:
        assert np.allclose(session.run(TOKENS.numpy()).array(), expected, atol=1e-4)


class Detector(nn.Module):
    """A network with two outputs of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.boxes = nn.Conv2d(8, 4, 1)
        self.scores = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.conv(image))
        return {"boxes": self.boxes(features), "scores": self.scores(features.mean((2, 3)))}


def db(signal: float, noise: float) -> float:
    return 300.0 if noise == 0 else min(300.0, 10 * float(np.log10(signal / noise)))


def test_accuracy_of_what_a_transform_quantized_is_against_the_model_before(client: Farm) -> None:
    """As of a recipe that does the same."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis

    def transform(_: str, module: nn.Module) -> nn.Module:
        quantize_(module, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerAxis(0)))
        return module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    inputs = (random(2, 64),)
    transformed = ModelSource.of(model, inputs, source_transforms=[transform])
    (own,) = bench(client, transformed, "xnnpack_fp32").result().reports
    (recipes,) = bench(client, ModelSource.of(model, inputs), "xnnpack_torchao_int8da_int4w_per_channel").result().reports
    of_own, of_recipe = own.accuracy[0], recipes.accuracy[0]
    assert of_own.reference == of_recipe.reference
    assert of_own.sqnr_db is not None and of_recipe.sqnr_db is not None
    assert of_own.sqnr_db < 30 and abs(of_own.sqnr_db - of_recipe.sqnr_db) < 1


def test_accuracy_is_of_all_calibration_images_together(client: Farm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    # Night, day and in between: the ranges are those of the brightest.
    images = [random(1, 3, 16, 16, seed=seed).abs() * contrast for seed, contrast in enumerate((1.0, 0.05, 0.3, 2.0, 0.1))]
    source = ModelSource.of(model, (images[0],), calibration_inputs=[(image,) for image in images])
    job = bench(client, source, PER_CHANNEL)
    report = job.result().report
    (pte, *_) = job.save_program(tmp_path / "x.pte")
    parts: dict[str, list[tuple[float, float]]] = {"boxes": [], "scores": []}
    with client.session(program=pte) as session, torch.no_grad():
        for image in images:
            answer, expected = session.run(image.numpy()), model(image)
            for name, both in parts.items():
                reference = expected[name].numpy().astype(np.float64)
                both.append((float((reference**2).sum()), float(((reference - answer[name]) ** 2).sum())))
    rows = {row.output: row for row in report.accuracy or () if row.reference == "program before quantization"}
    assert set(rows) == set(parts)
    for name, both in parts.items():
        row, each = rows[name], [db(*pair) for pair in both]
        assert row.samples == len(images)
        assert row.sqnr_db == pytest.approx(db(sum(s for s, _ in both), sum(n for _, n in both)), abs=0.1)
        assert row.sqnr_db_min == pytest.approx(min(each), abs=0.1)
        assert row.sqnr_db_max == pytest.approx(max(each), abs=0.1)
        assert max(each) - min(each) > 3, "the example is too even to tell one sample from all"


class Streaming(nn.Module):
    """A normalizer that keeps the mean of what it has seen."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, frame: Tensor) -> Tensor:
        self.total += frame
        self.count += 1
        return frame - self.total / (self.count + 1)


class Pooled(nn.Module):
    """An encoder of sentences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 8)

    def forward(self, frames: Tensor) -> Tensor:
        return torch.tanh(self.encode(frames))


def write(folder: Path, name: str, samples: list[Tensor]) -> Path:
    folder.mkdir()
    for place, sample in enumerate(samples):
        np.savez(folder / f"{place:03}.npz", **{name: sample.numpy()})  # type: ignore[arg-type]
    return folder


def test_each_of_several_inputs_starts_from_the_initial_state(client: Farm, tmp_path: Path) -> None:
    folder = write(tmp_path / "frames", "frame", [random(4, seed=seed) * 10**seed for seed in range(3)])
    report = bench(client, ModelSource.of(Streaming().eval(), (torch.ones(4),)), "portable", inputs=folder).result().report
    (row,) = report.accuracy or ()
    assert row.samples == 3
    assert row.sqnr_db_min is not None and row.sqnr_db_min > 120, row


def test_inputs_of_several_lengths_count_together_up_to_64(client: Farm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    length = torch.export.Dim("length", min=2, max=32)
    source = ModelSource.of(Pooled().eval(), (torch.ones(8, 4),), dynamic_shapes={"frames": {0: length}})
    folder = write(tmp_path / "sentences", "frames", [random(2 + size % 31, 4, seed=size) for size in range(70)])
    report = bench(client, source, "xnnpack_fp32", inputs=folder).result().report
    (row,) = report.accuracy or ()
    assert row.samples == 64
    assert row.sqnr_db is not None and row.sqnr_db_min is not None and row.sqnr_db_max is not None
    assert 100 < row.sqnr_db_min <= row.sqnr_db <= row.sqnr_db_max
