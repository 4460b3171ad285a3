"""Parts of outputs that share a scale with larger ones: detectors' heads are compiled, the parts named, and each remedy helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

from etfarm.server.compile.program import values  # noqa: E402
from etfarm.server.compile.verify import parts  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.recipes import Recipe  # noqa: E402
from tests.support.compiling import DYNAMIC, STATIC, Compiled, compiled, run, sample, sqnr_db  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="each test compiles in children")]

in_children = pytest.mark.asyncio(loop_scope="session")


class Detector(nn.Module):
    """A YOLO head: boxes in pixels, and scores, joined or apart."""

    proj: Any
    anchors: Any

    def __init__(self, *, apart: bool = False, pixels: float = 40.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.SiLU()) for inputs, outputs in ((3, 16), (16, 32), (32, 32))]
        self.stem = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.box = nn.Conv2d(32, 4 * 8, 1)
        self.cls = nn.Conv2d(32, 10, 1)
        nn.init.normal_(self.cls.weight, std=8.0)
        nn.init.constant_(self.cls.bias, -3.0)
        self.apart = apart
        self.pixels = pixels
        self.register_buffer("proj", torch.arange(8.0).view(1, 8, 1, 1))
        y, x = torch.meshgrid(torch.arange(16) + 0.5, torch.arange(16) + 0.5, indexing="ij")
        self.register_buffer("anchors", torch.stack((x.flatten(), y.flatten()))[None])

    def forward(self, x: Any) -> Any:
        features = self.stem(x)
        box, cls = self.box(features).flatten(2), self.cls(features).flatten(2)
        distances = (box.view(1, 4, 8, 256).transpose(1, 2).softmax(1) * self.proj).sum(1)
        first, second = distances.chunk(2, 1)
        top, bottom = self.anchors - first, self.anchors + second
        boxes = torch.cat(((top + bottom) / 2, bottom - top), 1) * self.pixels
        if self.apart:
            return boxes, cls.sigmoid()
        return torch.cat((boxes, cls.sigmoid()), 1)


class Join(nn.Module):
    """Joins boxes and scores of one level."""

    def forward(self, boxes: Any, scores: Any) -> Any:
        return torch.cat([boxes, scores], 1).flatten(2)


class Levels(nn.Module):
    """Several levels in one output with the values of a box in the last dim, joined by a module for each or one for all."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.boxes = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))
        self.scores = nn.ModuleList(nn.Conv2d(8, 3, 1) for _ in range(2))
        self.joins = nn.ModuleList(Join() for _ in range(1 if shared else 2))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        levels = []
        for level, y in enumerate((x, x[:, :, ::2, ::2])):
            join = self.joins[level % len(self.joins)]
            levels.append(join(self.boxes[level](y) * 500.0, self.scores[level](y).sigmoid()))
        return torch.cat(levels, 2).permute(0, 2, 1)


IMAGE: Final = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(3))


def skipping(names: str) -> Recipe:
    """Return the static recipe with operators in fp32, as a recipe file says it."""
    file = f'recipe = "xnnpack_fp32"\n[[quantizers]]\nname = "xnnpack"\nper_channel = true\nskip_operators = [{names}]\n'
    return recipes.from_toml(file)


def lost(answer: Compiled) -> list[str]:
    """Return the warnings of lost parts; there must not be others."""
    warnings = answer.result["warnings"]
    assert {warning["code"] for warning in warnings} <= {"PART_LOST"}, warnings
    return [warning["message"] for warning in warnings]


@pytest.fixture
def compile_int8(workers: Workers, tmp_path: Path) -> Callable[..., Any]:
    async def compile_one(model: nn.Module, recipe: str | Recipe, image: Any = IMAGE) -> Compiled:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        calibration = {"forward": [sample(folder / "image.ett", image)]}
        program = torch.export.export(model.eval(), (image,))
        return await compiled(workers, folder, lambda: program, recipe, calibration=calibration)

    return compile_one


@in_children
async def test_scores_beside_boxes_are_named_and_each_remedy_helps(compile_int8: Callable[..., Any]) -> None:
    joined = await compile_int8(Detector(), STATIC)
    (message,) = lost(joined)
    assert joined.result["checks"][0]["outputs"][0]["sqnr_db"] > 40, "as a whole"
    for words in (
        "0[:, 4:14], operand 1 of aten::cat at ", "test_parts.py:", "torch.cat((boxes, cls.sigmoid()), 1)", "has 0.0 dB",
        "a quantization step of 2.", "as outputs of their own", 'skip_operators = [":cat#1"]',
    ):  # fmt: skip
        assert words in message
    scores = Detector()(IMAGE)[:, 4:].detach()
    assert sqnr_db(scores, run(joined.pte, [IMAGE])[0][:, 4:]) < 1

    apart = await compile_int8(Detector(apart=True), STATIC)
    assert lost(apart) == [] and [output["sqnr_db"] > 20 for output in apart.result["checks"][0]["outputs"]] == [True, True]
    kept = await compile_int8(Detector(), skipping('":cat#1"'))
    assert lost(kept) == [] and sqnr_db(scores, run(kept.pte, [IMAGE])[0][:, 4:]) > 20


@in_children
async def test_parts_of_like_ranges_and_programs_without_static_scales_are_not_named(compile_int8: Callable[..., Any]) -> None:
    assert lost(await compile_int8(Detector(pixels=0.1), STATIC)) == []
    for recipe in (DYNAMIC, "xnnpack_fp32"):
        assert lost(await compile_int8(Detector(), recipe)) == []


@in_children
@pytest.mark.parametrize(
    ("shared", "names"), [(False, '":cat", "joins.0:cat", "joins.1:cat"'), (True, '":cat", "joins.0:cat#0", "joins.0:cat#1"')]
)
async def test_parts_are_found_behind_views_and_further_joins(compile_int8: Callable[..., Any], shared: bool, names: str) -> None:
    image = IMAGE[:, :, :16, :16].clone()
    (message,) = lost(await compile_int8(Levels(shared=shared), STATIC, image))
    assert "0[:, 0:256, 4:7], operand 1 of aten::cat at " in message
    assert "; 0[:, 256:320, 4:7], operand 1 of aten::cat at " in message
    assert re.findall(r"skip_operators = \[(.*?)\]", message) == [names]
    kept = await compile_int8(Levels(shared=shared), skipping(names), image)
    scores = Levels(shared=shared)(image)[:, :, 4:].detach()
    assert lost(kept) == [] and sqnr_db(scores, run(kept.pte, [image])[0][:, :, 4:]) > 20


class Joined(nn.Module):
    """Stacks numbers of two sizes in a dynamic batch."""

    def forward(self, x: Any) -> Any:
        return torch.stack([x * 1000, x.clamp(min=0)], -1).reshape(x.shape[0], -1, 2).float()


def rounded(x: Any, dynamic: bool = False) -> list[parts.LostPart]:
    """Return what is lost if outputs have a step of 8."""
    program = torch.export.export(Joined(), (x,), dynamic_shapes=({0: Dim("batch", max=64)},) if dynamic else None)
    expected = program.module()(x)
    output = torch.where(expected.isfinite(), (expected / 8).round() * 8, expected)
    return parts.find_lost(program, None, 0, values.to_value("y", expected), values.to_value("y", output))


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_may_be_dynamic(dynamic: bool) -> None:
    (part,) = rounded(torch.linspace(-1, 1, 48).reshape(4, 12), dynamic)
    assert part.words.startswith("y[:, :, 1], operand 1 of aten::stack at ") and "has 0.0 dB" in part.words
    assert not part.is_below_step, "no graph says so"
    assert parts.describe("forward", [part], "Calibrate.").endswith(" Calibrate.")


def test_the_same_infinities_constants_and_few_values_do_not_count() -> None:
    x = torch.linspace(-1, 1, 48)
    x[40:] = float("inf")
    assert len(rounded(x.reshape(4, 12))) == 1
    assert not rounded(torch.full((4, 12), 0.5)) and not rounded(-x.abs().reshape(4, 12))
    assert not rounded(torch.tensor([[-1.0, -0.5, 0.1, 0.2, 0.3, 0.4]])) and rounded(torch.linspace(-1, 1, 12)[None])


def test_sizes_that_depend_on_values_and_views_as_another_dtype_are_no_parts() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            k = n.item()
            torch._check(k >= 0)
            torch._check(k <= 8)
            return torch.cat([x[:k] * 1000, x[:k]])

    class Bits(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cat([x * 1000, x]).view(torch.int32).view(torch.float32)

    x = torch.rand(8)
    for module, inputs in ((Chosen(), (x, torch.tensor(5))), (Bits(), (x,))):
        program = torch.export.export(module, inputs)
        wanted = values.to_value("y", module(*inputs))
        assert parts.find_lost(program, None, 0, wanted, values.to_value("y", module(*inputs) * 0)) == []


class Head(nn.Module):
    """A layer that gives pixels and offsets, whose ranges are far apart, for each image of a batch."""

    def __init__(self, offsets: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 6)
        ranges = torch.tensor([600.0] * 4 + [offsets] * 2)
        self.head.weight.data *= ranges[:, None]
        self.head.bias.data *= ranges

    def forward(self, x: Any) -> Any:
        return self.head(self.stem(x).relu().mean((2, 3)))


IMAGES: Final = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(4))


@in_children
async def test_columns_of_a_layer_are_named_and_the_remedy_helps(compile_int8: Callable[..., Any]) -> None:
    answer = await compile_int8(Head(), STATIC, IMAGES)
    (message,) = lost(answer)
    assert answer.result["checks"][0]["outputs"][0]["sqnr_db"] > 25, "as a whole"
    assert "loses columns 4, 5 of 0," in message and 'skip_modules = ["head"]' in message
    file = 'recipe = "xnnpack_fp32"\n[[quantizers]]\nname = "xnnpack"\nper_channel = true\nskip_modules = ["head"]\n'
    kept = await compile_int8(Head(), recipes.from_toml(file), IMAGES)
    assert lost(kept) == []
    wanted, got = (each[:, 4:].detach() for each in (Head()(IMAGES), run(kept.pte, [IMAGES])[0]))
    assert sqnr_db(wanted, got) > 20


@in_children
async def test_columns_of_like_ranges_are_not_named(compile_int8: Callable[..., Any]) -> None:
    assert lost(await compile_int8(Head(offsets=30.0), STATIC, IMAGES)) == []
