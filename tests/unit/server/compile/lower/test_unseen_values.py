"""What calibration did not show: which inputs are changed to find it, and what stays in fp32 for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from structlog.testing import capture_logs  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchao.quantization.pt2e.observer import ObserverBase  # noqa: E402

from etfarm.client.export import ModelSource, export_source  # noqa: E402 - needs torch
from etfarm.server.compile.lower import build, far_values, in_place, quantize  # noqa: E402
from etfarm.server.compile.lower.unseen_values import Common, Exploration, State  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import STATIC, compiled, sample, sqnr_db  # noqa: E402
from tests.support.shared_state import Holder  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="quantizes")]

WIDTH: Final = 32
TOKENS: Final = 8
PADDED: Final = (torch.arange(TOKENS) < 5).float()[None]


def in_graph(folder: Path, model: nn.Module, samples: Sequence[tuple[Tensor, ...]]) -> tuple[nn.Module, far_values.Kept]:
    """Return the quantized graph of a model that was calibrated on samples, and what stays in fp32."""
    return program_in_graph(folder, torch.export.export(model.eval(), samples[0]), samples)


def program_in_graph(folder: Path, program: Any, samples: Sequence[tuple[Tensor, ...]]) -> tuple[nn.Module, far_values.Kept]:
    """Return the quantized graph of an exported program with the first of the samples as its example inputs."""
    kept = far_values.Kept()
    files = [sample(folder / f"{index}.ett", *inputs) for index, inputs in enumerate(samples[1:])]
    module = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", files, kept=kept)
    return module, kept


def names(kept: far_values.Kept) -> list[str]:
    """Return the names of the operators that stay in fp32 for what calibration did not show."""
    return [str(node.target).split(".")[1] for reason, node in kept.nodes if reason is far_values.Reason.UNSEEN]


class Placed(nn.Module):
    """Attention with a padding mask and an input that has few values: an offset into a table, or a divisor of integers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
        places = torch.arange(TOKENS)
        x = x + self.table.index_select(0, number + places if self.form == "offset" else places // number)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / WIDTH**0.5
        scores = scores + (1 - mask)[:, None, :] * -1e4
        out: Tensor = scores.softmax(-1) @ self.v(x)
        return out


@pytest.mark.parametrize(("form", "number"), [("offset", 0), ("divisor", 2)])
def test_an_input_that_cannot_be_another_hides_no_mask(tmp_path: Path, form: str, number: int) -> None:
    torch.manual_seed(0)
    model = Placed(form)
    few = torch.tensor([number])
    module, kept = in_graph(tmp_path, model, [(torch.randn(1, TOKENS, WIDTH), torch.ones(1, TOKENS), few) for _ in range(6)])
    assert kept.inputs == ["mask"] and names(kept) == ["mul", "add"]
    x = torch.randn(1, TOKENS, WIDTH)
    assert sqnr_db(model(x, PADDED, few), module(x, PADDED, few)) > 25


def test_a_model_that_does_not_run_again_is_logged() -> None:
    graph: Any = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),)).module(check_guards=False)
    exploration = Exploration(graph, ObserverBase, State((), (), lambda: None))
    with capture_logs() as logs:
        exploration.run([(torch.ones(1, 3),)], {0: 1.0})
    assert [(line["log_level"], "shapes cannot be multiplied" in line["error"]) for line in logs] == [("warning", True)]
    assert exploration.inputs == []


class Late(nn.Module):
    """Has an input that is zero at first, as a state may be."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.state, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.x(x) + self.state(state), self.out(state)


def test_an_input_that_varies_only_in_late_samples_varies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, zeros = Late(), torch.zeros(4, WIDTH)
    samples = [(torch.randn(4, WIDTH), zeros if index < 9 else torch.randn(4, WIDTH)) for index in range(24)]
    module, kept = in_graph(tmp_path, model, samples)
    assert kept.nodes == []
    x, state = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    assert all(sqnr_db(*pair) > 30 for pair in zip(model(x, state), module(x, state), strict=True))


def test_samples_are_chosen_that_show_how_inputs_vary() -> None:
    common = Common()
    for index in range(40):
        common.note([torch.randn(2), None, *(torch.full((2,), float(index == 9 + place)) for place in range(20)), torch.ones(2)])
    assert common.chosen == [*range(8), *range(9, 17)]
    assert common.values == {22: 1.0}


class Smoothed(nn.Module):
    """Keeps a mean of what it computes in a buffer that another method reads."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.holder.n.mul_(0.5).add_(y)
        return y


class Read(Smoothed):
    """Adds that buffer."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.holder.n
        return y


def shared_in_graphs(
    folder: Path, methods: dict[str, nn.Module], samples: Sequence[tuple[Tensor, ...]]
) -> dict[str, tuple[nn.Module, far_values.Kept]]:
    """Return the quantized graphs of methods with buffers in common, and what stays in fp32."""
    exported = export_source(ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, samples[0])), name="m").methods
    programs = {name: in_place.without_writes(torch.export.load(BytesIO(files.pt2))) for name, files in exported.items()}
    return {name: program_in_graph(folder, program, samples) for name, program in programs.items()}


def test_calls_of_a_method_show_what_it_writes_for_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    holder = Holder(shape=(4, WIDTH))
    methods: dict[str, nn.Module] = {"write": Smoothed(holder).eval(), "read": Read(holder).eval()}
    samples = [(torch.randn(4, WIDTH),) for _ in range(8)]
    graphs = shared_in_graphs(tmp_path, methods, samples)
    assert names(graphs["write"][1]) == [] and names(graphs["read"][1]) == ["add"]


class Applied(nn.Module):
    """Applies a function to what a layer computes and to another input, and adds a parameter to that."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self.out(self.function(self.linear(x), other) + self.bias)
        return out


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("bounded", [torch.clone, torch.tanh])
def test_a_temperature_is_not_changed_to_zero(tmp_path: Path, temperature: float, bounded: Callable[[Tensor], Tensor]) -> None:
    class Bounded(Applied):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return bounded(super().forward(x, other))

    torch.manual_seed(0)
    samples = [(torch.randn(4, WIDTH), torch.tensor([temperature])) for _ in range(8)]
    _, kept = in_graph(tmp_path, Bounded(torch.div), samples)
    assert kept.nodes == []


@pytest.mark.parametrize("guard", [
    lambda d: torch.where(d == 0, torch.ones_like(d), d),
    lambda d: torch.where(d != 0, d, 1e-3),
    lambda d: torch.where(torch.logical_not(d > 1e-3), 1e-3, d),
    lambda d: torch.where(d.abs() < 1e-6, 1e-6, d),
    lambda d: d.masked_fill(d <= 0, 1e-3),
    lambda d: d.masked_fill(torch.isnan(d), 1e-3),
    lambda d: d.masked_fill(torch.isinf(d), 1e-3),
])  # fmt: skip
def test_a_guard_of_the_tensor_that_it_selects_from_stays(tmp_path: Path, guard: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Applied(lambda y, other: y / guard(y.norm(dim=-1, keepdim=True)) * other)
    _, kept = in_graph(tmp_path, model, [(torch.randn(4, WIDTH), torch.randn(4, 1)) for _ in range(8)])
    assert kept.nodes == []


def test_a_condition_on_another_tensor_is_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Applied(lambda y, other: torch.where(other > 100, -1e4, y))
    _, kept = in_graph(tmp_path, model, [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(8)])
    assert "add" in names(kept)


def test_a_mask_that_by_chance_leaves_nothing_of_a_row_is_followed(tmp_path: Path) -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.linear(x).masked_fill(mask == 0, -torch.inf) + self.bias).softmax(-1)

    torch.manual_seed(0)
    model = Choice()
    module, kept = in_graph(tmp_path, model, [(torch.randn(2, WIDTH), torch.ones(2, 3)) for _ in range(8)])
    assert kept.inputs == ["mask"] and names(kept) == ["add"]
    x, mask = torch.randn(2, WIDTH), torch.tensor([[1.0, 0.0, 1.0]] * 2)
    assert sqnr_db(model(x, mask), module(x, mask)) > 25


def test_a_mask_of_results_is_followed(tmp_path: Path) -> None:
    class Actions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x).masked_fill(mask == 0, -torch.inf) + self.bias

    torch.manual_seed(0)
    _, kept = in_graph(tmp_path, Actions(), [(torch.randn(2, WIDTH), torch.ones(2, 8)) for _ in range(8)])
    assert kept.inputs == ["mask"] and names(kept) == ["add"]


def test_a_layer_behind_a_mask_clips_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Applied(lambda y, mask: y + (1 - mask) * 20.0)
    module, kept = in_graph(tmp_path, model, [(torch.randn(8, WIDTH), torch.ones(8, WIDTH)) for _ in range(8)])
    assert kept.inputs == ["other"] and names(kept) == ["mul", "add", "add", "linear"]
    x, mask = torch.randn(8, WIDTH), (torch.rand(8, WIDTH) < 0.5).float()
    assert sqnr_db(model(x, mask), module(x, mask)) > 40


class Written(nn.Module):
    """Keeps what it is given in a buffer that another method reads."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder

    def forward(self, x: Tensor) -> Tensor:
        self.holder.n.copy_(x[0])
        return x * 1.0


class ReadAndUsed(Read):
    """Adds that buffer, and has a layer behind."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(super().forward(x))
        return out


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_layer_behind_what_another_method_writes_clips_nothing(tmp_path: Path, scale: float) -> None:
    torch.manual_seed(0)
    holder = Holder(shape=(WIDTH,))
    methods: dict[str, nn.Module] = {"write": Written(holder).eval(), "read": ReadAndUsed(holder).eval()}
    graphs = shared_in_graphs(tmp_path, methods, [(torch.randn(8, WIDTH),) for _ in range(8)])
    module, kept = graphs["read"]
    assert names(kept) == ["add", "linear"] and kept.inputs == [] and kept.buffers == ["holder.n"]
    x, state = torch.randn(8, WIDTH), scale * torch.randn(WIDTH)
    holder.n.copy_(state)
    buffers = dict(module.named_buffers())
    buffers["etfarm_shared.holder.n"].copy_(state)
    assert sqnr_db(methods["read"](x), module(x)) > 30


class Encoder(nn.Module):
    """Attention with a padding mask, norms, a feed-forward part and a classifier of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Placed("divisor"), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.first, self.second, self.out = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, mask, torch.tensor([1])))
        x = self.norms[1](x + self.second(nn.functional.gelu(self.first(x))))
        out: Tensor = self.out(x)
        return out


def test_an_encoder_keeps_its_layers_in_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(1, TOKENS, WIDTH), torch.ones(1, TOKENS)) for _ in range(8)]
    _, kept = in_graph(tmp_path, Encoder(), samples)
    assert set(names(kept)) == {"mul", "add"}


class Images(nn.Module):
    """Two convolutions, between which there is a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() + self.a.bias.view(1, 8, 1, 1))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("make", [torch.zeros, torch.ones])
async def test_images_of_one_value_are_quantized_and_said_to_show_nothing(
    make: Callable[..., Tensor], workers: Workers, tmp_path: Path
) -> None:
    """As people measure speed: no operator stays in fp32 for what they do not show."""
    model, images = Images(), [(make(1, 3, 8, 8),) for _ in range(3)]
    _, kept = in_graph(tmp_path, model, images)
    assert kept.is_blank and not names(kept)
    answer = await compiled(workers, tmp_path / "compiled", lambda: torch.export.export(model.eval(), images[0]), STATIC)
    assert answer.quantized is not None
    (message,) = (each["message"] for each in answer.quantized["warnings"] if each["code"] == "FEW_CALIBRATION_INPUTS")
    assert message.startswith("Each calibration input of forward has one value only")
    _, kept = in_graph(tmp_path, model, [*images, (torch.rand(1, 3, 8, 8),)])
    assert not kept.is_blank
