"""Static int8 of models with masks: what is masked stays masked, and what is far from all other values stays in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from etfarm.server.compile.lower import build, far_values, quantize  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import STATIC, Compiled, compiled, run, sample, sqnr_db  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="quantizes and compiles")]

INF: Final = float("inf")
LEAST: Final = torch.finfo(torch.float32).min
TOKENS: Final = 8
CAUSAL: Final = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


class Masked(nn.Module):
    """A pre-norm decoder layer whose mask is made in one of several ways."""

    mask: Tensor
    is_seen: Tensor

    def __init__(self, form: str, number: float) -> None:
        super().__init__()
        self.form, self.number = form, number
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), number).triu(1))
        self.register_buffer("is_seen", ~CAUSAL)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.q(h) @ self.k(h).transpose(1, 2) * 0.25
        if self.form == "buffer":
            scores = scores + self.mask
        elif self.form == "input":
            scores = scores + mask
        elif self.form == "computed":
            scores = scores + (mask != 0) * self.number
        elif self.form == "twice":
            scores = scores + self.mask + self.mask
        elif self.form == "masked_fill":
            scores = scores.masked_fill(mask != 0, self.number) + 0.5 * scores
        elif self.form == "chosen":
            scores = torch.where(self.is_seen, scores, self.number) + 0.5 * scores
        elif self.form == "where":
            scores = torch.where(mask != 0, self.number, scores) * 2.0
        elif self.form == "cat":
            scores = torch.cat([scores + self.mask, torch.full((1, TOKENS, 1), self.number)], -1)
        weights = scores.softmax(-1)[..., :TOKENS]
        out: Tensor = self.out(weights @ self.v(h))
        return x + out


class Padded(nn.Module):
    """A max pool behind a pad, as timm has it for padding="same"."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.conv, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.out(F.max_pool2d(F.pad(self.conv(x), (0, 1, 0, 1), value=self.number), 3, 2))
        return pooled


class Multiplied(nn.Module):
    """A mask that is multiplied, which gives 0 * -inf; `number` is what helps."""

    def __init__(self, number: float | None) -> None:
        super().__init__()
        self.number = number
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.out(x)
        if self.number is None:
            return (scores + mask * -INF).softmax(-1)
        return torch.where(mask != 0, self.number, scores).softmax(-1)


def masked(form: str, number: float) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    mask = torch.full((TOKENS, TOKENS), number).triu(1)
    return Masked(form, number).eval(), (torch.randn(1, TOKENS, 16), mask)


async def in_int8(workers: Workers, folder: Path, model: nn.Module, inputs: tuple[Tensor, ...]) -> Compiled:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    samples = [sample(folder / f"{index}.ett", torch.randn_like(inputs[0]), *inputs[1:]) for index in range(8)]
    return await compiled(workers, folder, lambda: torch.export.export(model, inputs), STATIC, calibration={"forward": samples})


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("form", "number"),
    [("buffer", -INF), ("buffer", LEAST), ("buffer", -1e9), ("buffer", -1e4), ("input", -INF), ("input", -1e4),
     ("computed", -1e4), ("computed", LEAST), ("twice", -1e4), ("masked_fill", -INF), ("masked_fill", LEAST), ("where", -INF),
     ("chosen", LEAST), ("cat", -INF)],
)  # fmt: skip
async def test_earlier_tokens_do_not_see_later_ones(workers: Workers, tmp_path: Path, form: str, number: float) -> None:
    model, inputs = masked(form, number)
    one = await in_int8(workers, tmp_path, model, inputs)
    x, mask = inputs
    other = x.clone()
    other[:, -1] = torch.randn(16)
    before, after = run(one.pte, [x, mask])[0], run(one.pte, [other, mask])[0]
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before, after)
    assert sqnr_db(model(*inputs), before) > 20
    assert one.quantized is not None
    (message,) = (w["message"] for w in one.quantized["warnings"] if w["code"] == "FAR_VALUES_KEPT")
    assert message.startswith("Operators of forward stay in fp32: ") and "test_far_values.py:" in message
    assert not {"LOW_ACCURACY", "FAR_FROM_QUANTIZED_GRAPH"} & set(one.codes)


class Extended(nn.Module):
    """Attention with a mask that is 1 where a token counts, made into numbers to add in one of several ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("bias", torch.randn(TOKENS, TOKENS))
        self.bias: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.q(h) @ self.k(h).transpose(1, 2) * 0.25
        off = mask[:, None, :] == 0
        match self.form:
            case "bert":
                scores = scores + (1.0 - mask[:, None, :].float()) * -1e4
            case "t5":
                scores = scores + ((1.0 - mask[:, None, :].float()) * LEAST + self.bias)
            case "where":
                scores = scores + torch.where(off, -INF, 0.0)
            case "filled":
                scores = scores.masked_fill(off, LEAST) + self.bias
            case "tensor":
                scores = torch.where(off, torch.tensor(-1e4), scores) + self.bias
            case "assigned":
                scores = scores.clone()
                scores[off.expand_as(scores)] = -50.0
                scores = scores + self.bias
            case "least":
                scores = torch.min(scores, torch.where(off, -1e4, 1e4)) + self.bias
        out: Tensor = self.out(scores.softmax(-1) @ self.v(h))
        return out


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("form", ["bert", "t5", "where", "filled", "tensor", "assigned", "least"])
async def test_a_mask_that_never_applied_in_calibration_applies(workers: Workers, tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    model, inputs = Extended(form).eval(), (torch.randn(1, TOKENS, 16), torch.ones(1, TOKENS))
    one = await in_int8(workers, tmp_path, model, inputs)
    x, mask = inputs[0], torch.ones(1, TOKENS)
    mask[:, 5:] = 0
    other = x.clone()
    other[:, 5:] = torch.randn(3, 16)
    masked, changed = run(one.pte, [x, mask])[0], run(one.pte, [other, mask])[0]
    assert torch.equal(masked[:, :5], changed[:, :5])
    assert sqnr_db(model(x, mask), masked) > 20
    assert one.quantized is not None
    (message,) = (w["message"] for w in one.quantized["warnings"] if w["code"] == "UNSEEN_VALUES_KEPT")
    assert " x add at " in message and "test_far_values.py:" in message and "texts with padding" in message


@pytest.mark.asyncio(loop_scope="session")
async def test_a_state_that_was_zero_in_calibration_counts(workers: Workers, tmp_path: Path) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input, self.state, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            out: Tensor = self.out(torch.tanh(self.input(x) + self.state(state)))
            return out

    torch.manual_seed(0)
    model, x, state = Gated().eval(), torch.randn(1, 8), torch.randn(1, 8)
    unseen = await in_int8(workers, tmp_path / "unseen", model, (x, torch.zeros(1, 8)))
    assert sqnr_db(model(x, state), run(unseen.pte, [x, state])[0]) > 15
    assert "UNSEEN_VALUES_KEPT" in unseen.codes
    seen = await in_int8(workers, tmp_path / "seen", model, (x, state))
    assert sqnr_db(model(x, state), run(seen.pte, [x, state])[0]) > 20
    assert "UNSEEN_VALUES_KEPT" not in seen.codes


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("number", [-INF, -1e4])
async def test_a_max_pool_behind_a_pad_is_close(workers: Workers, tmp_path: Path, number: float) -> None:
    torch.manual_seed(0)
    model, x = Padded(number).eval(), torch.randn(1, 3, 16, 16)
    one = await in_int8(workers, tmp_path, model, (x,))
    assert sqnr_db(model(x), run(one.pte, [x])[0]) > 20


@pytest.mark.remedy("CALIBRATION_NOT_FINITE")
@pytest.mark.asyncio(loop_scope="session")
async def test_what_gives_nan_has_its_line_and_the_remedy_helps(workers: Workers, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(8, 8), CAUSAL.float())
    with pytest.raises(EtfarmError) as caught:
        await in_int8(workers, tmp_path, Multiplied(None).eval(), inputs)
    assert caught.value.reason == "CALIBRATION_NOT_FINITE"
    assert "return (scores + mask * -INF).softmax(-1)" in caught.value.message
    assert "torch.where(mask, torch.finfo(scores.dtype).min, scores)" in caught.value.remedy
    model = Multiplied(LEAST).eval()
    one = await in_int8(workers, tmp_path / "helps", model, inputs)
    assert sqnr_db(model(*inputs), run(one.pte, list(inputs))[0]) > 20


class Attention(nn.Module):
    """Scores of attention, to which a function of them and of a mask is applied, and to which a bias is added."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("bias", torch.randn(32, 32))
        self.bias: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) * 0.25
        bias = self.bias[: x.shape[1], : x.shape[1]]
        out: Tensor = self.out((self.mask(scores, mask) + bias).softmax(-1) @ self.v(x))
        return out


def _through_a_view(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, :, 4:] = scores[:, :, 4:].masked_fill(mask[:, None, 4:] == 0, -1e4)
    return scores


def _into_zeros(scores: Tensor, mask: Tensor) -> Tensor:
    zeros = torch.zeros_like(scores)
    zeros[:, :, 2:] = torch.where(mask[:, None, 2:] == 0, -1e4, 0.0)
    return scores + zeros


def _window(scores: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(scores.shape[1])
    return scores + ((places[:, None] - places).abs() > TOKENS).float() * -1e4


FILLED: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "view": _through_a_view,
    "zeros": _into_zeros,
    "dropout": lambda scores, mask: F.dropout(scores.masked_fill(mask[:, None] == 0, -1e4), training=False),
    "einsum": lambda scores, mask: torch.einsum("bij,jk->bik", scores.masked_fill(mask[:, None] == 0, -1e4), torch.eye(TOKENS)),
    "leaky_relu": lambda scores, mask: F.leaky_relu(scores.masked_fill(mask[:, None] == 0, -1e6)),
    "shifted": lambda scores, mask: torch.where(mask[:, None] == 0, scores - 1e4, scores),
    "clamp": lambda scores, mask: scores.masked_fill(mask[:, None] == 0, -1e4).clamp(max=10.0),
    "offset": lambda scores, mask: (scores - 10.0).masked_fill(mask[:, None] == 0, -20.0),
    "log": lambda scores, mask: scores + (mask[:, None] + 1e-6).log(),
    "multiply": lambda scores, mask: scores + torch.multiply(torch.subtract(1.0, mask[:, None]), -1e4),
}
"""Masks that a model may apply, and that calibration on texts without padding does not show."""


def in_graph(folder: Path, model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> tuple[nn.Module, far_values.Kept]:
    """Return the quantized graph of a model that was calibrated with other values of the first input, and what stays in fp32."""
    program, kept = torch.export.export(model.eval(), inputs, **options), far_values.Kept()
    how = build.quantization(recipes.parse(STATIC), "forward")
    samples = [sample(folder / f"{index}.ett", torch.randn_like(inputs[0]), *inputs[1:]) for index in range(8)]
    return quantize.quantize(program, how, STATIC, "forward", samples, kept=kept), kept


@pytest.mark.parametrize("form", FILLED)
def test_a_mask_is_followed_through_any_arithmetic(tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(FILLED[form]), torch.randn(1, TOKENS, 16)
    module, kept = in_graph(tmp_path, model, (x, torch.ones(1, TOKENS)))
    mask = (torch.arange(TOKENS) < 5).float()[None]
    assert {reason for reason, _ in kept.nodes} == {far_values.Reason.UNSEEN} and kept.inputs == ["mask"]
    assert sqnr_db(model(x, mask), module(x, mask)) > 25


def test_a_mask_of_what_is_longer_than_in_calibration_applies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attention(_window)
    inputs = torch.randn(1, TOKENS, 16), torch.ones(1)
    tokens = torch.export.Dim("tokens", min=2, max=31)
    module, kept = in_graph(tmp_path, model, inputs, dynamic_shapes=({1: tokens}, None))
    x = torch.randn(1, 24, 16)
    assert far_values.Reason.UNSEEN in {reason for reason, _ in kept.nodes}
    assert sqnr_db(model(x, inputs[1]), module(x, inputs[1])) > 20


@pytest.mark.parametrize("joined", [torch.cat, torch.stack])
def test_a_state_that_is_joined_counts(tmp_path: Path, joined: Callable[[list[Tensor], int], Tensor]) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return joined([self.linear(x), state], -1)

    torch.manual_seed(0)
    model, x = Joined(), torch.randn(4, 8)
    module, kept = in_graph(tmp_path, model, (x, torch.zeros(4, 8)))
    if joined is torch.cat:  # XNNPACK quantizes no other
        assert kept.inputs == ["state"] and {reason for reason, _ in kept.nodes} == {far_values.Reason.UNSEEN}
    state = 10 * torch.randn(4, 8)
    assert sqnr_db(model(x, state), module(x, state)) > 40


class Constant(nn.Module):
    """Has a mask that does not depend on inputs, as image transformers have it, a scatter, and weights of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.gamma = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y + torch.where(torch.arange(64) >= 0, 0.0, LEAST)
        y = torch.scatter(y, 1, torch.full((4, 1), 63), torch.zeros(4, 1)) + y
        return y + self.gamma.tanh()[None] * y + (self.gamma.exp() - 1) * y


class Plain(nn.Module):
    """Has an epsilon, a gate, a small residual and a number that is added."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * (x > 1) + 1e-6
        return torch.cat([y + 1e-5 * x, x + 300.0, x * 1e3], -1)


class Summed(nn.Module):
    """Begins a sum with zeros, as Python's `sum` does, and has branches whose weights are zero before training."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.late = nn.Linear(64, 64)
        nn.init.zeros_(self.late.weight)
        nn.init.zeros_(self.late.bias)
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = sum(part(x) for part in self.parts)  # type: ignore[assignment]
        y = torch.zeros_like(y) + y
        return x + self.late(y) + self.alpha * y


class Scaled(nn.Module):
    """Fills in a number that calibration sees, and makes it small."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 1, 255.0, x) / 255.0 + x.clamp(0.0, 1.0)


@pytest.mark.parametrize("model", [Plain, Summed, Scaled, Constant, None])
def test_what_has_no_far_values_is_quantized_whole(model: type[nn.Module] | None) -> None:
    torch.manual_seed(0)
    program = models.conv() if model is None else torch.export.export(model().eval(), (torch.randn(4, 64),))
    kept = far_values.Kept()
    quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", [], kept=kept)
    assert kept.nodes == []


@pytest.mark.asyncio(loop_scope="session")
async def test_a_computed_number_is_added_in_fp32(workers: Workers, tmp_path: Path) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.first(x) * x.abs().max() + x.mean())
            return out

    torch.manual_seed(0)
    model, x = Centred().eval(), torch.randn(4, 8)
    one = await in_int8(workers, tmp_path, model, (x,))
    assert sqnr_db(model(x), run(one.pte, [x])[0]) > 20


def test_what_stays_keeps_the_scales_of_the_others() -> None:
    model, inputs = masked("buffer", -INF)
    program, kept = torch.export.export(model, inputs), far_values.Kept()
    how = build.quantization(recipes.parse(STATIC), "forward")
    module = quantize.quantize(program, how, STATIC, "forward", [], kept=kept)
    assert [(reason, str(node.target)) for reason, node in kept.nodes] == [(far_values.Reason.FAR, "aten.add.Tensor")]
    sums = [node for node in module.graph.nodes if node.target == torch.ops.aten.add.Tensor]
    dequantized = [all("dequantize" in str(each.target) for each in node.all_input_nodes) for node in sums]
    assert dequantized == [False, True]


@pytest.mark.parametrize(
    ("values", "is_far"),
    [([0.0, 1.0, -2.0, -1e4], True), ([0.5, -1e4, -2e4], True), ([0.5, -1e4, 1e4], False), ([0.5, 100.0, -1e4], True),
     ([0.5, 200.0, -1e4], True), ([0.5, 400.0, -1e4], False),
     ([0.0, -1e4], False), ([0.5, -20.0], True), ([0.5, -15.0], False), ([1.0, -20.0], False), ([1.0, 1e-9], False),
     ([0.0, -INF], True), ([0.5, LEAST], True), ([0.0], False)],
)  # fmt: skip
def test_values_of_one_tensor_are_far(values: list[float], is_far: bool) -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2.0))
    seen = far_values.Values()
    seen.observe(lambda x: x, torch.tensor(values))
    assert far_values.has_far_values(node, [seen]) is is_far
