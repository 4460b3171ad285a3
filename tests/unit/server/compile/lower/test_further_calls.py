"""Buffers that become larger in calls after those of calibration are named, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch import Tensor, nn  # noqa: E402

from etfarm.server.compile.lower import build, far_values, in_place, quantize, tasks  # noqa: E402 - needs torch
from etfarm.server.compile.lower.unseen_values import magnitude  # noqa: E402
from etfarm.server.compile.request import QuantizeRequest  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import STATIC, plain, sample, sqnr_db  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="quantizes")]

WIDTH: Final = 32
LENGTH: Final = 64


class Model(nn.Module):
    """Applies a function of layers and state."""

    active: Tensor
    calls: Tensor
    total: Tensor
    cache: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("active", torch.zeros((), dtype=torch.bool))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))
        self.register_buffer("total", torch.zeros(1, WIDTH))
        late = 50.0 * (torch.arange(LENGTH) > 10)[:, None].expand(1, -1, WIDTH)
        has_late = body in (turn_and_count, look_up_and_add)
        self.register_buffer("cache", late + 0.5 if has_late else torch.zeros(1, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def count(m: Any, x: Tensor) -> Tensor:
    m.calls.add_(1)
    return m.b(m.a(x) + m.calls.float())  # type: ignore[no-any-return]


def add_up(m: Any, x: Tensor) -> Tensor:
    m.total.add_(m.a(x))
    return m.b(m.total)  # type: ignore[no-any-return]


def place(m: Any, x: Tensor) -> Tensor:
    angle = m.calls.float() * torch.exp(-9.2 * torch.arange(WIDTH // 2) / (WIDTH // 2))
    m.calls.add_(1)
    return m.b(m.a(x) + torch.cat([angle.sin(), angle.cos()], -1))  # type: ignore[no-any-return]


def forget(m: Any, x: Tensor) -> Tensor:
    m.total.mul_(0.5).add_(m.a(x))
    return m.b(m.total)  # type: ignore[no-any-return]


def attend(m: Any, x: Tensor) -> Tensor:
    m.cache[:, m.calls] = m.a(x)[:, None]
    m.calls.add_(1)
    scores = m.b(x)[:, None] @ m.cache.transpose(1, 2) / WIDTH**0.5
    scores = scores.masked_fill(torch.arange(LENGTH) >= m.calls, -1e4)
    return m.c((scores.softmax(-1) @ m.cache)[:, 0])  # type: ignore[no-any-return]


def add_up_and_count(m: Any, x: Tensor) -> Tensor:
    m.total.add_(m.a(x))
    m.cache[:, m.calls % LENGTH] = x[:, None]
    m.calls.add_(1)
    return m.b(m.total) * (m.calls < 1000)  # type: ignore[no-any-return]


def switch_on(m: Any, x: Tensor) -> Tensor:
    m.active.logical_or_((x > 1).any())
    return m.b(m.a(x) * m.active)  # type: ignore[no-any-return]


def turn_and_count(m: Any, x: Tensor) -> Tensor:
    m.cache.copy_(m.cache.roll(-1, 1))
    m.calls.add_(1)
    return m.b(m.a(x) + m.cache[:, 0]) * (m.calls < 1000)  # type: ignore[no-any-return]


def look_up_and_add(m: Any, x: Tensor) -> Tensor:
    m.calls.add_(1)
    m.total.mul_(0.5).add_(0.5)
    return m.b(m.a(x) + m.cache[0, m.calls % LENGTH]) * (m.total < 1000)  # type: ignore[no-any-return]


def inputs(number: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, WIDTH, generator=generator),) for _ in range(number)]


def quantized(folder: Path, body: Callable[[Any, Tensor], Tensor], number: int) -> tuple[nn.Module, list[str]]:
    """Return a model that was calibrated with a number of inputs, and the names of the buffers that become larger."""
    kept, samples = far_values.Kept(), inputs(number)
    program = in_place.without_writes(torch.export.export(Model(body).eval(), samples[0]))
    files = [sample(folder / f"{index}.ett", *each) for index, each in enumerate(samples[1:])]
    module = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", files, kept=kept)
    return module, kept.grown


def accuracy(body: Callable[[Any, Tensor], Tensor], module: nn.Module, calls: int) -> float:
    """Return the SQNR in dB of the last of a number of calls."""
    model = Model(body).eval()
    with torch.no_grad():
        results = [(model(*each), module(*each)) for each in inputs(calls)]
    return float(sqnr_db(*results[-1]))


@pytest.mark.parametrize(
    ("body", "buffer"),
    [(count, "calls"), (add_up, "total"), (place, "calls"), (add_up_and_count, "total")],
)  # fmt: skip
def test_a_buffer_that_grows_is_named_and_more_calibration_helps(
    tmp_path: Path, body: Callable[[Any, Tensor], Tensor], buffer: str
) -> None:
    few, grown = quantized(tmp_path, body, 8)
    assert grown == [buffer] and accuracy(body, few, LENGTH) < 10
    many, _ = quantized(tmp_path, body, LENGTH)
    assert accuracy(body, many, LENGTH) > 20


@pytest.mark.parametrize(("body", "buffer"), [(turn_and_count, "cache"), (look_up_and_add, "calls")])
def test_a_buffer_that_grows_and_reaches_no_clipped_value_is_not_named(
    tmp_path: Path, body: Callable[[Any, Tensor], Tensor], buffer: str
) -> None:
    assert quantized(tmp_path, body, 8)[1] == [buffer]


@pytest.mark.parametrize("body", [forget, attend, switch_on])
def test_a_state_that_stays_in_its_range_is_not_named(tmp_path: Path, body: Callable[[Any, Tensor], Tensor]) -> None:
    module, grown = quantized(tmp_path, body, 8)
    assert grown == [] and accuracy(body, module, LENGTH) > 20


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (torch.tensor([False, True]), 1.0),
        (torch.tensor([-(2**63), -1]), 2.0**63),
        (torch.tensor([torch.nan, -torch.inf, torch.inf, -3.0]), 3.0),
        (torch.empty(0), 0.0),
    ],
)
def test_the_magnitude_of_a_buffer_is_that_of_its_finite_values(buffer: Tensor, expected: float) -> None:
    assert magnitude(buffer) == expected


def test_the_warning_names_the_buffer(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Model(count).eval(), *inputs(1)), tmp_path / "model.pt2")
    files = [sample(tmp_path / f"{index}.ett", *each) for index, each in enumerate(inputs(8))]
    folder, threads = tmp_path / "work", torch.get_num_threads()
    folder.mkdir()
    request = QuantizeRequest({"forward": tmp_path / "model.pt2"}, "tiny", recipes.parse(STATIC).json, {"forward": files})
    try:
        result = plain(tasks.quantize_model(request, folder, lambda event: None))
    finally:
        torch.set_num_threads(threads)
    (message,) = (warning["message"] for warning in result["warnings"] if warning["code"] == "STATE_GROWS")
    assert "the buffers calls of forward" in message and "as many calibration inputs as a session has calls" in message
