"""State that ExecuTorch or its quantizer alone would lose: a device keeps it from call to call as eager PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from tests.support.exports import Function
from tests.support.quick_jobs import QUICK, codes_of, warned

pytestmark = [pytest.mark.slow(reason="programs are compiled and run on a farm"), pytest.mark.numeric]

INT8 = "xnnpack_pt2e_int8_static_per_channel"


class Named(nn.Module):
    """Has a buffer with the name of an input, as attention has a cache `k` for `k`."""

    k: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(4, 3))

    def forward(self, k: Tensor, place: Tensor) -> Tensor:
        self.k.index_copy_(0, place, k)
        return self.k.sum(0)


class Learning(nn.Module):
    """Writes to a parameter without gradients, in a region that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x)
        return x + self.mean


class Integrator(nn.Module):
    """A filter whose state grows to ten times its input, and a counter that is changed in place."""

    state: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(1, 4))
        self.register_buffer("calls", torch.zeros(1, 1))

    def forward(self, frame: Tensor) -> Tensor:
        state = 0.9 * self.state + frame
        self.state.copy_(state)
        self.calls.add_(1.0)
        return self.mix(state) + self.calls


class Filter(nn.Module):
    """A filter of second order: old values move from buffer to buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("x1", "x2", "y1", "y2"):
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = 0.2 * x + 0.3 * self.x1 + 0.2 * self.x2 - 0.1 * self.y1 - 0.05 * self.y2
        self.x2.copy_(self.x1)
        self.x1.copy_(x)
        self.y2.copy_(self.y1)
        self.y1.copy_(y)
        return y


class Delay(nn.Module):
    """Keeps two inputs, of which one is copied by way of a view, and a value twice."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("last", "before", "a", "b"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x + 0.5 * self.last + 0.25 * self.before + self.a - 2 * self.b
        self.before.copy_(self.last.view(3))
        self.last.copy_(x)
        value = x * 3
        self.a.copy_(value)
        self.b.copy_(value)
        return y


class Swapped(nn.Module):
    """Two buffers that change places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("front", torch.zeros(3))
        self.register_buffer("back", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        front = self.front.clone()
        self.front.copy_(self.back)
        self.back.copy_(front + x)
        return self.front * 1.0


def decibels(actual: np.ndarray, expected: Tensor) -> float:
    wanted = expected.detach().numpy()
    return float(10 * np.log10((wanted**2).sum() / max(((actual - wanted) ** 2).sum(), 1e-20)))


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (Named(), [(torch.full((1, 3), n + 1.0), torch.tensor([n])) for n in range(4)]),
        (Learning(), [(torch.full((3,), n + 1.0),) for n in range(4)]),
        (Filter(), [(torch.tensor([value]),) for value in (0.5, 0.0, 1.0, 2.0, 0.0, 0.0)]),
        (Delay(), [(torch.full((3,), n + 1.0),) for n in range(5)]),
        (Swapped(), [(torch.full((3,), n + 1.0),) for n in range(5)]),
    ],
    ids=["named", "learning", "filter", "delay", "swapped"],
)
def test_a_session_keeps_what_a_model_writes(client: Farm, module: nn.Module, calls: list[tuple[Any, ...]]) -> None:
    module.eval()
    with client.session(ModelSource.of(module, calls[0]), recipe="portable") as session:
        for call in calls:
            actual = session.run(*(each.numpy() for each in call)).array()
            assert decibels(actual, module(*call)) > 100


@pytest.mark.parametrize("recipe", ["xnnpack_fp32", INT8])
def test_each_sample_starts_without_what_others_have_written(client: Farm, recipe: str) -> None:
    """The cache is written where an input says, so that repeating a call gives the same output again."""
    torch.manual_seed(0)
    steps = [(torch.randn(1, 3), torch.tensor([place])) for place in range(4)]
    source = ModelSource.of(Named().eval(), steps[0], calibration_inputs=steps[1:])
    (report,) = client.bench(source, recipes=recipe, **QUICK).result().reports
    (output,) = report.accuracy or ()
    assert output.samples == 4 and output.sqnr_db > (100 if recipe == "xnnpack_fp32" else 25), output
    assert not warned(report, "LOW_ACCURACY", "OUTPUTS_DIFFER", "FAR_FROM_QUANTIZED_GRAPH")


def test_quantization_keeps_state_and_knows_its_range(client: Farm) -> None:
    torch.manual_seed(0)
    frames = [torch.rand(1, 4) + 0.5 for _ in range(24)]
    source = ModelSource.of(Integrator().eval(), (frames[0],), calibration_inputs=[(frame,) for frame in frames[1:]])
    (report,) = client.compile(source, recipes=INT8).result().reports
    # The sum grows with each call, so that a session longer than calibration leaves the range.
    assert codes_of(report) == ["STATE_GROWS"]
    eager = Integrator().eval()
    eager.load_state_dict(source.methods["forward"].state_dict())
    with client.session(source, recipe=INT8) as session:
        for frame in frames:
            assert decibels(session.run(frame.numpy()).array(), eager(frame)) > 25


class Set(nn.Module):
    """Adds to a buffer with the name of its input, which another method reads."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.register_buffer("k", state)

    def forward(self, k: Tensor) -> Tensor:
        self.k.add_(k)
        return self.k * 1


class Get(nn.Module):
    """Reads the same buffer."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.register_buffer("k", state)

    def forward(self, x: Tensor) -> Tensor:
        return self.k + x


@pytest.mark.parametrize("shared", [True, False])
def test_methods_with_the_buffer_of_an_inputs_name_keep_it(client: Farm, tmp_path: Path, shared: bool) -> None:
    state = torch.zeros(3)
    source = ModelSource(
        methods={"set": Set(state).eval(), "get": Get(state).eval()},
        example_inputs={"set": (torch.ones(3),), "get": (torch.ones(3),)},
    )
    (tmp_path / "own.toml").write_text('recipe = "portable"\n[executorch]\nshare_mutable_buffers = false\n')
    with client.session(source, recipe="portable" if shared else str(tmp_path / "own.toml")) as session:
        sums = [session.run("set", np.full(3, value, np.float32)).array()[0] for value in (1, 2, 3)]
        assert sums == [1, 3, 6]
        assert session.run("get", np.zeros(3, np.float32)).array()[0] == (6 if shared else 0)


class Pages(nn.Module):
    """Two buffers that several methods share: one writes the back, one swaps them, one reads both."""

    def __init__(self, what: str, front: Tensor, back: Tensor) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("front", front)
        self.register_buffer("back", back)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "load":
            self.back.copy_(x * 1.0)
        elif self.what == "flip":
            old = self.front.clone()
            self.front.copy_(self.back)
            self.back.copy_(old)
        return self.front * 10 + self.back + x


def test_a_method_swaps_the_buffers_of_others(client: Farm) -> None:
    buffers, names = (torch.zeros(3), torch.zeros(3)), ("show", "load", "flip")
    methods = {name: Pages(name, *buffers).eval() for name in names}
    source = ModelSource(methods=methods, example_inputs=dict.fromkeys(names, (torch.ones(3),)))
    x = torch.tensor([1.0, 2.0, 3.0])
    with client.session(source, recipe="portable") as session:
        for buffer in buffers:
            buffer.zero_()
        for name in ("load", "flip", "show", "load", "flip", "flip", "show"):
            x = x + 1
            assert session.run(name, x.numpy()).array().tolist() == methods[name](x).tolist(), name


class Fading(nn.Module):
    """Changes the weight of its layer."""

    w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("w", torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, self.w)
        self.w.mul_(0.9)
        return self.mix(y)


@pytest.mark.parametrize("recipe", [INT8, "xnnpack_pt2e_int8_dynamic_per_channel"])
def test_a_weight_that_changes_is_not_quantized(client: Farm, recipe: str) -> None:
    source = ModelSource.of(Fading().eval(), (torch.rand(1, 4),))
    (report,) = client.compile(source, recipes=recipe).result().reports
    assert report.error is not None and "the model changes w, which is the weight" in report.error.message
    assert "test_kept_state.py:" in report.error.message and "use the recipe portable" in report.error.remedy
    (report,) = client.compile(source, recipes="portable").result().reports
    assert report.error is None and codes_of(report) == ["INITIALIZED_MUTABLE_BUFFERS"]


def test_a_session_says_what_the_compilation_warns_of(client: Farm, caplog: pytest.LogCaptureFixture) -> None:
    source = ModelSource.of(Function(lambda x: x % 4).eval(), (torch.arange(3),))
    status: list[str] = []
    with client.session(source, recipe="portable", on_status=status.append) as session:
        session.run(np.arange(3))
    assert any(line.startswith("warning: REMAINDERS_TRUNCATED: ") and "aten::remainder at " in line for line in status)
    with client.session(source, recipe="portable"):
        assert any("aten::remainder at " in record.getMessage() for record in caplog.records)


class Cache(nn.Module):
    """A cache of 12 positions, of which each call takes 3; `wrap` lets it begin again."""

    rows: Tensor
    length: Tensor

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.wrap = wrap
        self.register_buffer("rows", torch.zeros(12, 4))
        self.register_buffer("length", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        place = self.length + torch.arange(3)
        if self.wrap:
            place = place % 12
        self.rows[place] = x
        self.length += 3
        return self.rows.sum(0)


@pytest.mark.remedy("PROGRAM_FAILED")
def test_a_cache_that_a_benchmark_fills_is_said_to_wrap_or_to_be_executed_less_often(client: Farm) -> None:
    full, wrapped = (ModelSource.of(Cache(wrap).eval(), (torch.randn(3, 4),)) for wrap in (False, True))
    often = {**QUICK, "iterations": 4}
    (failed,) = client.bench(full, recipes="portable", **often).result().reports
    assert failed.error is not None and failed.error.reason == "PROGRAM_FAILED" and "rows" in failed.error.message
    assert "position % length" in failed.error.remedy and "--warmup 1" in failed.error.remedy
    for model, options in ((full, QUICK), (wrapped, often)):
        assert client.bench(model, recipes="portable", **options).result().report.latency is not None
