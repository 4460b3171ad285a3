"""Branches and loops, sizes that hang together, and failures on a device, in models as public code has them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
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
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="compiles models and runs them on a real runner")

HERE: Final = re.escape(Path(__file__).name)


class EarlyExit(nn.Module):
    """Leaves early where it is confident, as branchy classifiers do."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.stem = nn.Linear(8, 16)
        self.confidence = nn.Linear(16, 1)
        self.exit = nn.Linear(16, 3)
        self.deep = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def leave(self, features: Tensor) -> Tensor:
        return self.exit(features)

    def go_on(self, features: Tensor) -> Tensor:
        return self.deep(features)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.stem(x))
        confidence = torch.sigmoid(self.confidence(features)).max()
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


# torch 2.13 keeps the line of a call of cond, map or scan for the operators inside, where it does not keep their own.
FLOWS: Final[dict[str, tuple[nn.Module, tuple[int, ...], str]]] = {
    "deep branch": (EarlyExit(1.1), (2, 8), "return self.deep(features)|torch.cond(confidence > "),
    "map over regions": (RegionHead(), (5, 3, 4), "self.head(region.reshape(1, 12))|map_over(self.score, regions)"),
    "state space": (StateSpace(), (7, 6), "advanced = state * step[0] + step[1]|scan(advance, torch.zeros(6), steps)"),
}


@pytest.mark.parametrize(("recipe", "names"), [("portable", list(FLOWS)), ("xnnpack_fp32", ["deep branch"])])
def test_operators_inside_of_branches_and_loops_have_the_lines_of_the_model(client: Farm, recipe: str, names: list[str]) -> None:
    generator = torch.Generator().manual_seed(1)
    sources = [ModelSource.of(FLOWS[name][0].eval(), (torch.randn(*FLOWS[name][1], generator=generator),)) for name in names]
    job = client.bench(sources, recipes=recipe, iterations=3, warmup=1, min_time_s=0.0, trace_iterations=3)
    for name, report in zip(names, job.result().reports, strict=True):
        assert report.compile is not None and report.operators is not None, (name, report.error)
        assert all(row.sqnr_db is not None and row.sqnr_db > 100 for row in report.accuracy or ()) and report.accuracy, name
        assert not [warning.message for warning in report.compile.warnings if "ETRECORD" in warning.code], name
        lines = {row.source.code for row in report.operators if row.source is not None}
        assert any(code in line for code in FLOWS[name][2].split("|") for line in lines), (name, lines)
        computing = [row for row in report.operators if row.kind in ("OPERATOR", "KERNEL") and row.op_types]
        without = [(row.name, row.source_reason) for row in computing if row.source is None and not row.source_reason]
        assert computing and not without, name


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


SIDE: Final = 4 * Dim("side", min=2, max=8)
WORDS: Final = Dim("words", min=2, max=16)
POSITIONS: Final = Dim("positions", min=2, max=12)


def zeros(*shapes: Sequence[int]) -> list[np.ndarray]:
    return [np.zeros(shape, np.float32) for shape in shapes]


RELATED: Final = ModelSource(
    methods={
        "unet": SmallUNet().eval(),
        "token": ClassToken().eval(),
        "relative": Relative().eval(),
    },
    example_inputs={
        "unet": (torch.zeros(1, 1, 16, 16),),
        "token": (torch.zeros(1, 5, 4), torch.zeros(1, 6)),
        "relative": (torch.zeros(5, 5), torch.zeros(5, 5)),
    },
    dynamic_shapes={
        "unet": {"image": {2: SIDE}},
        "token": {"words": {1: WORDS}, "mask": {1: WORDS + 1}},
        "relative": {"scores": {0: POSITIONS, 1: POSITIONS}, "bias": {0: POSITIONS, 1: POSITIONS}},
    },
)
SIZES: Final[dict[str, tuple[list[np.ndarray], list[np.ndarray], str]]] = {
    "unet": (zeros((1, 1, 32, 16)), zeros((1, 1, 30, 16)), r"image\.shape\[2\] must be a multiple of 4, got 30"),
    "token": (
        zeros((1, 9, 4), (1, 10)), zeros((1, 9, 4), (1, 9)),
        r"mask\.shape\[1\].*words\.shape\[1\]|words\.shape\[1\].*mask\.shape\[1\]",
    ),
    "relative": (
        zeros((12, 12), (12, 12)), zeros((6, 7), (6, 7)), r"(scores|bias)\.shape\[[01]\] == (scores|bias)\.shape\[[01]\]",
    ),
}  # fmt: skip


def test_sizes_that_do_not_fit_each_other_are_refused_before_a_device_sees_them(client: Farm) -> None:
    with client.session(RELATED, recipe="portable") as session:
        for method, (right, wrong, words) in SIZES.items():
            with pytest.raises(EtfarmError, match=words) as refused:
                session.run(method, *wrong)
            assert refused.value.reason == "INPUT_MISMATCH" and refused.value.remedy
            expected = RELATED.methods[method](*(torch.from_numpy(array) for array in right)).detach().numpy()
            assert np.allclose(session.run(method, *right).array(), expected, atol=1e-5), method  # the session is still usable


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


FRAGILE: Final[dict[str, tuple[type[nn.Module], list[np.ndarray], list[tuple[str, list[np.ndarray]]]]]] = {
    "gpt": (
        SmallGpt, ids([1, 2], [0, 1]),
        [("self.wte(tokens)", ids([1, 90_000], [0, 1])), ("self.wpe(positions)", ids([1, 2], [7, 80_000]))],
    ),
    "select": (
        Select, [*zeros((3, 4)), np.array([0, 2])], [("scaled.gather", [*zeros((3, 4)), np.array([0, 70_000])])],
    ),
    "prototypes": (
        Prototypes, [*zeros((2, 4)), np.array([0, 5])], [("self.table[labels]", [*zeros((2, 4)), np.array([0, 60_000])])],
    ),
}  # fmt: skip


def test_a_failure_on_a_device_names_the_line_of_the_instruction_and_what_to_do(client: Farm) -> None:
    source = ModelSource(
        methods={method: build().eval() for method, (build, _, _) in FRAGILE.items()},
        example_inputs={method: tuple(map(torch.from_numpy, right)) for method, (_, right, _) in FRAGILE.items()},
    )
    with client.session(source, recipe="xnnpack_fp32") as session:
        for method, (build, right, all_wrong) in FRAGILE.items():
            for code, wrong in all_wrong:
                session.run(method, *right)
                with pytest.raises(EtfarmError) as failed:
                    session.run(method, *wrong)
                assert re.search(rf"{HERE}:{line_of(build, code)}(?!\d)", failed.value.message), failed.value
                assert "index" in failed.value.remedy and failed.value.reason != "STAGE_FAILED", failed.value


class Divided(nn.Module):
    """Divides integers; ExecuTorch refuses a divisor of 0, and the processor traps where the quotient is too large."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.div(a, b, rounding_mode="floor")


class Doubled(nn.Module):
    """Has an operator at the same place of its program."""

    def forward(self, a: Tensor) -> Tensor:
        return a * 2


def test_calls_after_a_crash_have_its_error_and_not_one_of_their_own_method(client: Farm) -> None:
    integers = torch.tensor([4, 6])
    source = ModelSource(
        methods={"divide": Divided().eval(), "double": Doubled().eval()},
        example_inputs={"divide": (integers, integers), "double": (integers,)},
    )
    with client.session(source, recipe="portable") as session:
        with pytest.raises(EtfarmError, match=r"aten::div.* at ") as refused:
            session.run("divide", integers.numpy(), np.array([0, 1]))
        assert "divisor is 0" in refused.value.remedy and "or -1 of the smallest integer" in refused.value.remedy
        with refuses("PROGRAM_CRASHED", match=r"\AThe program ended the runner by SIGFPE at RUN\.") as crashed:
            session.run("divide", np.array([-(2**63), 1]), np.array([-1, 1]))
        for _ in range(2):
            with pytest.raises(EtfarmError) as later:
                session.run("double", np.array([1, 2]))
            assert (later.value.reason, later.value.message) == ("PROGRAM_CRASHED", crashed.value.message)
