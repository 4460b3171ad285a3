"""Branches and loops, sizes that hang together, and failures on a device, in models as public code has them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess

pytestmark = pytest.mark.slow(reason="compiles models and runs them on a real runner")

HERE: Final = Path(__file__).name


@pytest.fixture(scope="module")
def client(farm: FarmProcess) -> Iterator[Farm]:
    with farm.client() as client:
        yield client


class EarlyExit(nn.Module):
    """Leaves early where it is confident, as branchy classifiers do."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.stem = nn.Linear(8, 16)
        self.exit = nn.Linear(16, 3)
        self.deep = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def leave(self, features: Tensor) -> Tensor:
        return self.exit(features)

    def go_on(self, features: Tensor) -> Tensor:
        return self.deep(features)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.stem(x))
        confidence = torch.softmax(self.exit(features), -1).max()
        return torch.cond(confidence > self.threshold, self.leave, self.go_on, (features,))


class RegionHead(nn.Module):
    """Scores each region of an image by the same head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)

    def score(self, region: Tensor) -> Tensor:
        return torch.sigmoid(self.head(region.reshape(1, 12)))

    def forward(self, regions: Tensor) -> dict[str, Tensor]:
        return {"scores": map_over(self.score, regions)}


def advance(state: Tensor, step: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Advance a state space by one step."""
    advanced = state * step[0] + step[1]
    return advanced, advanced.clone()


class StateSpace(nn.Module):
    """A gated linear recurrence over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.value = nn.Linear(6, 6)
        self.output = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = (torch.sigmoid(self.gate(x)), self.value(x))
        _, states = scan(advance, torch.zeros(6), steps)
        return self.output(states)


FLOWS: Final[list[tuple[Callable[[], nn.Module], tuple[int, ...], str, str]]] = [
    (lambda: EarlyExit(0.0), (2, 8), "portable", "return self.exit(features)"),
    (lambda: EarlyExit(1.1), (2, 8), "portable", "return self.deep(features)"),
    (lambda: EarlyExit(1.1), (2, 8), "xnnpack_fp32", "return self.deep(features)"),
    (RegionHead, (5, 3, 4), "portable", "self.head(region.reshape(1, 12))|map_over(self.score, regions)"),
    (StateSpace, (7, 6), "portable", "advanced = state * step[0] + step[1]|scan(advance, torch.zeros(6), steps)"),
]
FLOW_IDS: Final = ["early exit", "deep branch", "deep branch on XNNPACK", "map over regions", "state space"]


@pytest.mark.parametrize(("build", "shape", "recipe", "codes"), FLOWS, ids=FLOW_IDS)
def test_operators_inside_of_branches_and_loops_have_the_lines_of_the_model(
    client: Farm, build: Callable[[], nn.Module], shape: tuple[int, ...], recipe: str, codes: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    source = ModelSource.of(build().eval(), (x,))
    report = client.bench(source, recipes=recipe, iterations=3, warmup=1, min_time_s=0.0, trace_iterations=3).result().report
    assert report.compile is not None and report.operators is not None
    assert all(row.sqnr_db is not None and row.sqnr_db > 100 for row in report.accuracy or ()) and report.accuracy
    assert not [warning.message for warning in report.compile.warnings if "ETRECORD" in warning.code]
    lines = {row.source.code for row in report.operators if row.source is not None}
    assert any(code in line for code in codes.split("|") for line in lines), lines
    computing = [row for row in report.operators if row.kind in ("OPERATOR", "KERNEL") and row.op_types]
    without = [(row.name, row.source_reason) for row in computing if row.source is None and not row.source_reason]
    assert computing and not without


class SmallUNet(nn.Module):
    """Halves an image twice and doubles it again, so that its sides are multiples of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.deeper = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.ConvTranspose2d(8, 1, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        half = nn.functional.max_pool2d(torch.relu(self.down(image)), 2)
        quarter = nn.functional.max_pool2d(torch.relu(self.deeper(half)), 2)
        return self.last(torch.cat([half, self.up(quarter)], 1))


class ClassToken(nn.Module):
    """Puts a class token in front of the words, whose mask has one column more."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((1, 1, 4), 0.5))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = torch.cat([self.token, words], 1)
        return x * mask.unsqueeze(-1)


class Relative(nn.Module):
    """Adds a bias for each pair of positions."""

    def forward(self, scores: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(scores + bias, -1)


class Waveform(nn.Module):
    """The first layer of a speech encoder, whose window needs 40 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, 4, 40, stride=20)

    def forward(self, samples: Tensor) -> Tensor:
        return nn.functional.gelu(self.frames(samples.unsqueeze(1)))


SIDE: Final = 4 * Dim("side", min=2, max=8)
WORDS: Final = Dim("words", min=2, max=16)
POSITIONS: Final = Dim("positions", min=2, max=12)
SAMPLES: Final = Dim("samples", min=40, max=400)


def zeros(*shapes: Sequence[int]) -> list[np.ndarray]:
    return [np.zeros(shape, np.float32) for shape in shapes]


RELATED: Final[list[tuple[ModelSource, list[np.ndarray], list[np.ndarray], str]]] = [
    (
        ModelSource.of(SmallUNet().eval(), (torch.zeros(1, 1, 16, 16),), dynamic_shapes={"image": {2: SIDE}}),
        zeros((1, 1, 32, 16)), zeros((1, 1, 30, 16)), r"image\.shape\[2\] must be a multiple of 4, got 30",
    ),
    (
        ModelSource.of(
            ClassToken().eval(), (torch.zeros(1, 5, 4), torch.zeros(1, 6)),
            dynamic_shapes={"words": {1: WORDS}, "mask": {1: WORDS + 1}},
        ),
        zeros((1, 9, 4), (1, 10)), zeros((1, 9, 4), (1, 9)),
        r"mask\.shape\[1\].*words\.shape\[1\]|words\.shape\[1\].*mask\.shape\[1\]",
    ),
    (
        ModelSource.of(
            Relative().eval(), (torch.zeros(5, 5), torch.zeros(5, 5)),
            dynamic_shapes={"scores": {0: POSITIONS, 1: POSITIONS}, "bias": {0: POSITIONS, 1: POSITIONS}},
        ),
        zeros((12, 12), (12, 12)), zeros((6, 7), (6, 7)), r"(scores|bias)\.shape\[[01]\] == (scores|bias)\.shape\[[01]\]",
    ),
    (
        ModelSource.of(Waveform().eval(), (torch.zeros(1, 100),), dynamic_shapes={"samples": {1: SAMPLES}}),
        zeros((1, 400)), zeros((1, 39)), r"40\.\.400",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "right", "wrong", "words"), RELATED, ids=["multiple of 4", "one more", "square", "minimum"]
)  # fmt: skip
def test_sizes_that_do_not_fit_each_other_are_refused_before_a_device_sees_them(
    client: Farm, tmp_path: Path, source: ModelSource, right: list[np.ndarray], wrong: list[np.ndarray], words: str
) -> None:
    with client.session(source, recipe="portable") as session:
        with pytest.raises(EtfarmError, match=words) as refused:
            session.run(*wrong)
        assert refused.value.reason == "INPUT_MISMATCH" and refused.value.remedy
        expected = source.methods["forward"](*(torch.from_numpy(array) for array in right)).detach().numpy()
        assert np.allclose(session.run(*right).array(), expected, atol=1e-5)  # the session is still usable
    np.savez(tmp_path / "wrong.npz", **{str(place): array for place, array in enumerate(wrong)})  # type: ignore[arg-type]
    both: tuple[list[np.ndarray] | Path, ...] = (wrong, tmp_path / "wrong.npz")
    for inputs in both:
        with pytest.raises(EtfarmError, match=words) as refused:
            client.bench(source, recipes=["portable"], inputs=inputs)
        assert refused.value.reason == "INPUT_MISMATCH"
    with pytest.raises(EtfarmError, match=words) as refused:
        list(client.run_dataset(source, [right, wrong], recipe="portable"))
    assert refused.value.reason == "INPUT_MISMATCH" and "sample 1" in refused.value.message


class SmallGpt(nn.Module):
    """Token and position embeddings before a block, as GPT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.wpe = nn.Embedding(8, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.wte(tokens)
        x = x + self.wpe(positions)
        return self.head(x + self.block(x))


class Select(nn.Module):
    """Takes the boxes that another stage kept."""

    def forward(self, boxes: Tensor, kept: Tensor) -> Tensor:
        scaled = boxes * 0.5
        selected = scaled.gather(0, kept.unsqueeze(1).expand(-1, 4))
        return selected + 1


class Prototypes(nn.Module):
    """Looks up one prototype for each label."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(6, 4))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        chosen = self.table[labels]
        return (features - chosen).abs().sum(1)


def line_of(module: type[nn.Module], code: str) -> int:
    """Return the number of the line of `forward` that has this code."""
    lines, first = inspect.getsourcelines(module.forward)
    (place,) = [place for place, line in enumerate(lines) if code in line]
    return first + place


def ids(tokens: list[int], positions: list[int]) -> list[np.ndarray]:
    return [np.array([tokens]), np.array(positions)]


FRAGILE: Final[list[tuple[type[nn.Module], str, str, list[np.ndarray], list[np.ndarray]]]] = [
    (SmallGpt, "xnnpack_fp32", "self.wte(tokens)", ids([1, 2], [0, 1]), ids([1, 90_000], [0, 1])),
    (SmallGpt, "xnnpack_fp32", "self.wpe(positions)", ids([1, 2], [0, 1]), ids([1, 2], [7, 80_000])),
    (Select, "xnnpack_fp32", "scaled.gather", [*zeros((3, 4)), np.array([0, 2])], [*zeros((3, 4)), np.array([0, 70_000])]),
    (Prototypes, "portable", "self.table[labels]", [*zeros((2, 4)), np.array([0, 5])], [*zeros((2, 4)), np.array([0, 60_000])]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "recipe", "code", "right", "wrong"), FRAGILE, ids=["token", "position", "gathered boxes", "prototype"]
)
def test_a_failure_on_a_device_names_the_line_of_the_instruction_and_what_to_do(
    client: Farm, build: type[nn.Module], recipe: str, code: str, right: list[np.ndarray], wrong: list[np.ndarray]
) -> None:
    torch.manual_seed(0)
    source = ModelSource.of(build().eval(), tuple(torch.from_numpy(array) for array in right))
    place = f"{HERE}:{line_of(build, code)}"
    with client.session(source, recipe=recipe) as session:
        session.run(*right)
        with pytest.raises(EtfarmError) as failed:
            session.run(*wrong)
    assert re.search(rf"{re.escape(place)}(?!\d)", failed.value.message), failed.value
    assert "index" in failed.value.remedy and failed.value.reason != "STAGE_FAILED", failed.value
    (report,) = client.bench(source, recipes=recipe, inputs=wrong, iterations=3, min_time_s=0.0, profile=False).result().reports
    assert report.error is not None
    assert re.search(rf"{re.escape(place)}(?!\d)", report.error.message), report.error.message
    assert "index" in report.error.remedy
