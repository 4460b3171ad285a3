"""Inputs that were the same in all calibration inputs: other values are computed as the model does, or the input is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch import Tensor, nn  # noqa: E402

from etfarm.server.compile.lower import build, far_values, other_inputs, quantize, tasks  # noqa: E402 - needs torch
from etfarm.server.compile.request import QuantizeRequest  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import STATIC, plain, sample, sqnr_db  # noqa: E402
from tests.support.golden import Golden  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="quantizes")]

WIDTH: Final = 32
TOKENS: Final = 8
ADDITIVE: Final = torch.zeros(1, 1, TOKENS).masked_fill(torch.arange(TOKENS) >= 5, -1e4)

Inputs = tuple[Tensor, ...]


def in_graph(folder: Path, model: nn.Module, samples: Sequence[Inputs]) -> tuple[nn.Module, far_values.Kept]:
    """Return the quantized graph of a model that was calibrated on samples, and what was found in them."""
    kept = far_values.Kept()
    program = torch.export.export(model.eval(), samples[0])
    files = [sample(folder / f"{index}.ett", *inputs) for index, inputs in enumerate(samples[1:])]
    module = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", files, kept=kept)
    return module, kept


class Function(nn.Module):
    """Applies a function of layers, a table, and inputs."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Embedding(10, WIDTH)
        self.table.weight.data *= torch.linspace(0, 20, 10)[:, None]
        self.words = nn.Embedding.from_pretrained(2 * torch.rand(40, WIDTH) - 1)
        self.position_bias = nn.Parameter(4 * torch.randn(TOKENS, TOKENS))

    def forward(self, x: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self, x, number)


def rotate(model: Function, x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None].float() / 10000 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
    u, v = model.a(x).chunk(2, -1)
    return torch.cat([u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()], -1)


def attend(model: Function, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    scores = change(model.a(x) @ model.b(x).transpose(1, 2))
    return scores.softmax(-1) @ model.c(x)


def add_mask(model: Function, x: Tensor, mask: Tensor) -> Tensor:
    return attend(model, x, lambda scores: scores + (model.position_bias + mask))


def add_slope(model: Function, x: Tensor, start: Tensor) -> Tensor:
    return attend(model, x, lambda scores: scores + (start + torch.arange(TOKENS)).float() * model.position_bias[0, 0].abs())


def mask_behind(model: Function, x: Tensor, length: Tensor) -> Tensor:
    keep = (length - torch.arange(TOKENS)).clamp(0, 1).float()
    return attend(model, x, lambda scores: (scores + keep.log()) + model.position_bias)


def embed_time(model: Function, x: Tensor, step: Tensor) -> Tensor:
    angle = step.float()[:, None] * torch.exp(-9.2 * torch.arange(WIDTH // 2) / (WIDTH // 2))
    return torch.tanh(model.a(x) + model.b(torch.cat([angle.sin(), angle.cos()], -1)))


def decay(model: Function, x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    state = state * 0.95 + model.a(x)
    return model.b(state) + model.a.bias, state


def cached(model: Function, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    keys = torch.cat([cache, model.a(x)], 1)
    return (model.b(x) @ keys.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ keys, keys


def gated(model: Function, x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    update = torch.sigmoid(model.a(x) + model.b(state))
    state = (1 - update) * torch.tanh(model.c(x)) + update * state
    return model.c(state), state


def shifted(model: Function, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    keys = torch.cat([cache[:, 4:], model.a(x)], 1)
    return (model.b(x) @ keys.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ keys, keys


def some(shape: tuple[int, ...], other: Tensor, scale: float = 1.0) -> list[Inputs]:
    return [(scale * torch.randn(shape), other) for _ in range(8)]


@pytest.mark.parametrize(("function", "shape", "other"), [
    (rotate, (1, 4, WIDTH), torch.arange(4)),
    (lambda model, x, gain: model.b(model.a(x) * gain), (4, WIDTH), torch.full((4, 1), 0.5)),
    (lambda model, x, scale: (u := model.a(x)) + scale * (model.b(x) - u), (4, WIDTH), torch.ones(4, 1)),
    (add_slope, (1, TOKENS, WIDTH), torch.tensor([0])),
    (embed_time, (2, WIDTH), torch.tensor([1, 1])),
    (lambda model, x, speaker: model.b(model.a(x) + model.table(speaker)), (4, WIDTH), torch.tensor([3])),
    (decay, (1, WIDTH), torch.zeros(1, WIDTH)),
    (decay, (1, WIDTH), torch.linspace(-0.1, 0.1, WIDTH)[None]),
    (lambda model, x, style: model.c(model.b(model.a(x) + style))[:, :4], (4, WIDTH), torch.zeros(4, WIDTH)),
    (lambda model, x, style: model.c(model.b(model.a(x) + style)), (4, WIDTH), torch.zeros(4, WIDTH)),
    (lambda model, x, style: (model.c(model.b(model.a(x) + style)), model.a(x)), (4, WIDTH), torch.zeros(4, WIDTH)),
    (lambda model, x, at: model.b(3 * model.a(x) + at), (4, WIDTH), torch.tensor([0.0])),
    (lambda model, x, sigma: model.b(torch.relu(model.a(x) / sigma)), (4, WIDTH), torch.ones(4, 1)),
    (lambda model, x, counts: model.b(torch.relu(model.a(x) * counts.float())), (4, WIDTH), torch.ones(4, WIDTH).long()),
    (lambda model, x, counts: model.b(model.a(x) + counts.float()), (4, WIDTH), torch.zeros(4, WIDTH).long()),
], ids=["positions", "gain", "guidance", "start", "time", "speaker", "state", "initial", "style", "style only",
        "style and features", "number", "sigma", "counts", "counts from zero"])  # fmt: skip
def test_an_input_that_int8_would_clip_is_named(
    tmp_path: Path, function: Callable[..., Tensor], shape: tuple[int, ...], other: Tensor
) -> None:
    torch.manual_seed(0)
    _, kept = in_graph(tmp_path, Function(function), some(shape, other))
    assert (kept.clipped, kept.untried) == (["number"], [])


@pytest.mark.parametrize(("function", "was", "is_now"), [
    (add_mask, torch.zeros(1, 1, TOKENS), ADDITIVE),
    (mask_behind, torch.tensor([TOKENS]), torch.tensor([5])),
], ids=["additive", "length"])  # fmt: skip
def test_a_mask_that_is_added_first_or_made_of_a_length_applies(
    tmp_path: Path, function: Callable[..., Tensor], was: Tensor, is_now: Tensor
) -> None:
    torch.manual_seed(0)
    model, x = Function(function), torch.randn(1, TOKENS, WIDTH)
    module, kept = in_graph(tmp_path, model, some((1, TOKENS, WIDTH), was))
    assert (kept.clipped, kept.untried) == ([], [])
    assert [str(node.target).split(".")[1] for _, node in kept.nodes] == ["add", "add"]
    assert all(sqnr_db(model(x, other), module(x, other)) > 25 for other in (was, is_now))


def add_bert(model: Function, x: Tensor, mask: Tensor) -> Tensor:
    return attend(model, x, lambda scores: scores + (1 - mask.float())[:, None] * -1e4)


@pytest.mark.parametrize(("function", "shape", "samples"), [
    (add_bert, (1, TOKENS, WIDTH), [torch.ones(1, TOKENS)] * 8),
    (add_bert, (1, TOKENS, WIDTH), [torch.ones(1, TOKENS, dtype=torch.long)] * 8),
    (lambda model, x, mask: attend(model, x, lambda s: s.masked_fill(~mask[:, None], -1e9) + model.position_bias),
     (1, TOKENS, WIDTH), [torch.ones(1, TOKENS, dtype=torch.bool)] * 8),
    (add_bert, (1, TOKENS, WIDTH), [(torch.arange(TOKENS) < 5).float()[None]] * 8),
    (lambda model, x, mask: model.b(torch.relu(model.a(x)) * mask), (1, TOKENS, WIDTH),
     [(torch.arange(TOKENS) < 5).float()[None, :, None]] * 8),
    (cached, (1, 4, WIDTH), [torch.zeros(1, 4, WIDTH)] * 8),
    (shifted, (1, 4, WIDTH), [torch.zeros(1, 8, WIDTH)] * 8),
    (gated, (1, WIDTH), [torch.zeros(1, WIDTH)] * 8),
    (rotate, (1, 4, WIDTH), [torch.arange(4) + 5 * index for index in range(8)]),
    (lambda model, x, at: model.b(model.a(x) + model.words(at)), (4, WIDTH), [torch.zeros(4, dtype=torch.long)] * 8),
    (lambda model, x, unused: model.a(x), (4, WIDTH), [torch.ones(4)] * 8),
    (lambda model, x, gain: torch.tanh(model.a(x)).sum() * gain, (4, WIDTH), [torch.tensor([0.5])] * 8),
], ids=["float", "integer", "bool", "holes", "factor with holes", "cache", "shifted", "gated",
        "varied", "token", "unused", "fp32"])  # fmt: skip
def test_other_inputs_are_not_named(
    tmp_path: Path, function: Callable[..., Tensor], shape: tuple[int, ...], samples: Sequence[Tensor]
) -> None:
    torch.manual_seed(0)
    _, kept = in_graph(tmp_path, Function(function), [(torch.randn(shape), other) for other in samples])
    assert (kept.clipped, kept.untried) == ([], [])


def test_images_of_zeros_are_not_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    _, kept = in_graph(tmp_path, model, [(torch.zeros(1, 3, 8, 8),)] * 3)
    assert kept.is_blank and (kept.clipped, kept.untried) == ([], [])


def only_one(model: Function, x: Tensor, number: Tensor) -> Tensor:
    return model.a(x) + model.b.bias / (number == 7).float()


def test_an_input_of_which_the_model_makes_nan_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, kept = in_graph(tmp_path, Function(only_one), some((4, WIDTH), torch.tensor([7])))
    assert (kept.clipped, kept.untried) == ([], ["number"])


def test_inputs_that_are_too_many_to_try_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_inputs, "MAX_TRIALS", 0)
    torch.manual_seed(0)
    _, kept = in_graph(
        tmp_path, Function(lambda model, x, gain: model.b(model.a(x) * gain)), some((4, WIDTH), torch.tensor([0.5]))
    )
    assert (kept.clipped, kept.untried) == ([], ["number"])


def test_other_quantizers_have_all_that_were_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "keeps_integers", lambda recipe: False)
    torch.manual_seed(0)
    _, kept = in_graph(tmp_path, Function(add_mask), some((1, TOKENS, WIDTH), torch.zeros(1, 1, TOKENS)))
    assert (kept.clipped, kept.untried) == (["number"], [])
    _, kept = in_graph(tmp_path, Function(lambda model, x, unused: model.a(x)), some((4, WIDTH), torch.ones(4)))
    assert (kept.clipped, kept.untried) == ([], [])


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("function", [lambda model, x, gain: model.b(model.a(x) * gain), only_one], ids=["gain", "nan"])
def test_the_warning_names_inputs_of_several_samples(
    tmp_path: Path, golden: Golden, function: Callable[..., Tensor], count: int
) -> None:
    torch.manual_seed(0)
    samples = some((4, WIDTH), torch.tensor([7]))
    torch.export.save(torch.export.export(Function(function).eval(), samples[0]), tmp_path / "model.pt2")
    files = [sample(tmp_path / f"{index}.ett", *inputs) for index, inputs in enumerate(samples[:count])]
    folder, threads = tmp_path / "work", torch.get_num_threads()
    folder.mkdir()
    request = QuantizeRequest({"forward": tmp_path / "model.pt2"}, "tiny", recipes.parse(STATIC).json, {"forward": files})
    try:
        result = plain(tasks.quantize_model(request, folder, lambda event: None))
    finally:
        torch.set_num_threads(threads)
    warnings = {warning["code"]: warning["message"] for warning in result["warnings"]}
    assert ("FEW_CALIBRATION_INPUTS" in warnings) == (not count) and ("SAME_IN_CALIBRATION" in warnings) == bool(count)
    if count:
        golden.check(warnings["SAME_IN_CALIBRATION"])
