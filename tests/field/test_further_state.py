"""State that methods share, as streaming models have it, and inputs that models of public repositories write to."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm, Report
from etfarm.client.export import ModelSource
from etfarm.wire.errors import EtfarmError
from tests.support.quick_jobs import QUICK, codes_of, warned
from tests.support.refusals import refuses
from tests.support.shared_state import counter

pytestmark = pytest.mark.slow(reason="programs are compiled and run on a farm")

OWN_STATE = 'recipe = "portable"\n[executorch]\nshare_mutable_buffers = false\n'
CONTRADICTION = 'recipe = "portable"\n[executorch]\nshare_mutable_buffers = true\nalloc_mutable_buffers = false\n'


class Ring(nn.Module):
    """The latest frames of a stream."""

    frames: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros(6, 4))


class Push(nn.Module):
    """Takes the next frame into the ring."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.ring = ring

    def forward(self, frame: Tensor) -> Tensor:
        self.ring.frames.copy_(torch.cat([self.ring.frames[1:], frame]))
        return self.ring.frames.mean(0)


class Score(nn.Module):
    """Classifies what is in the ring; it does not write."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.history = ring
        self.classify = nn.Linear(24, 3)

    def forward(self, gain: Tensor) -> Tensor:
        return self.classify((self.history.frames * gain).reshape(1, 24))


class Peek(nn.Module):
    """Reads the latest frame by a list, of which torch.export knows nothing."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.rings = [ring]

    def forward(self, gain: Tensor) -> Tensor:
        return self.rings[0].frames[-1] * gain


class Hidden(nn.Module):
    """The hidden state of a prediction network."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 8))


class Start(nn.Module):
    """Sets the state to what an encoder gives."""

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self.hidden = hidden
        self.project = nn.Linear(4, 8)

    def forward(self, encoded: Tensor) -> Tensor:
        state = torch.tanh(self.project(encoded))
        self.hidden.state.copy_(state)
        return state.sum(1)


class Step(nn.Module):
    """Predicts after one more token, and keeps the new state."""

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self.predictor = nn.ModuleDict({"hidden": hidden})
        self.embedding = nn.Embedding(10, 6)
        self.cell = nn.GRUCell(6, 8)
        self.joint = nn.Linear(8, 10)

    def forward(self, token: Tensor) -> Tensor:
        hidden = self.predictor["hidden"]
        state = self.cell(self.embedding(token), hidden.state)
        hidden.state.copy_(state)
        return self.joint(state)


def streams() -> ModelSource:
    """Return a keyword spotter and a prediction network as one program."""
    torch.manual_seed(0)
    ring, hidden = Ring(), Hidden()
    methods: dict[str, nn.Module] = {
        "push": Push(ring),
        "score": Score(ring),
        "peek": Peek(ring),
        "start": Start(hidden),
        "step": Step(hidden),
    }
    gain = (torch.ones(1),)
    inputs = {
        "push": (torch.ones(1, 4),),
        "score": gain,
        "peek": gain,
        "start": (torch.ones(1, 4),),
        "step": (torch.tensor([3]),),
    }
    calls = [(method, (x,)) for method, x in CALLS]
    return ModelSource({name: module.eval() for name, module in methods.items()}, inputs, calls=calls)


def frames_and_tokens() -> list[tuple[str, Tensor]]:
    frames = torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(1))
    encoded = torch.linspace(-1, 1, 4).reshape(1, 4)
    calls = [("score", torch.ones(1)), *(("push", frame) for frame in frames[:4]), ("start", encoded)]
    calls += [("score", torch.ones(1)), ("step", torch.tensor([3])), ("peek", torch.ones(1)), ("push", frames[4])]
    calls += [("step", torch.tensor([9])), ("score", torch.full((1,), 0.5)), ("peek", torch.full((1,), 2.0))]
    return [*calls, ("step", torch.tensor([0])), ("start", -encoded), ("step", torch.tensor([3]))]


CALLS = frames_and_tokens()


class Level(nn.Module):
    """A running level, which starts at 1 as running variances do."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(1))


class Listen(nn.Module):
    """Updates the level."""

    def __init__(self, meter: Level) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, samples: Tensor) -> Tensor:
        self.meter.level.mul_(0.9).add_(0.1 * samples.abs().mean())
        return self.meter.level * 1


class Amplify(nn.Module):
    """Divides by the level."""

    def __init__(self, meter: Level) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, samples: Tensor) -> Tensor:
        return samples / self.meter.level


def gain_control() -> ModelSource:
    meter = Level()
    methods: dict[str, nn.Module] = {"listen": Listen(meter).eval(), "amplify": Amplify(meter).eval()}
    return ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.full((8,), 3.0),)))


def measured(client: Farm, model: ModelSource, *methods: str) -> tuple[Report, ...]:
    return client.bench(model, recipes="portable", methods=methods, **QUICK).result().reports


@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32"])
def test_calls_continue_the_state_of_other_methods_or_the_model_is_refused(client: Farm, recipe: str) -> None:
    eager = streams()
    try:
        with client.session(program=streams(), recipe=recipe) as session, torch.no_grad():
            for place, (method, x) in enumerate(CALLS):
                expected = eager.methods[method](x.clone())
                actual = session.run(method, x.numpy()).array()
                assert np.allclose(actual, expected.numpy(), atol=1e-5), f"call {place}, {method}: {actual} instead of {expected}"
    except EtfarmError as refused:
        assert recipe != "portable", refused
        assert refused.reason == "STATE_NOT_SHARED" and refused.remedy


def test_exported_programs_share_a_buffer_on_a_device(client: Farm) -> None:
    calls = [("set", 5.0), ("add", 1.0), ("add", 1.0), ("get", 10.0), ("set", 1.0), ("get", 1.0)]
    eager = counter()
    programs = {name: torch.export.export(module, (torch.ones(2),)) for name, module in counter().methods.items()}
    with client.session(program=programs, recipe="portable") as session, torch.no_grad():
        for method, value in calls:
            inputs = torch.full((2,), value)
            expected = eager.methods[method](inputs)
            assert session.run(method, inputs.numpy()).array().tolist() == expected.tolist(), method


def test_a_measuring_device_executes_the_calls_too(client: Farm) -> None:
    (report,) = measured(client, streams(), "step")
    assert set(codes_of(report)) == {"STATE_SHARED"}
    text = warned(report, "STATE_SHARED")[-1]
    assert "state is shared by start, step" in text and "frames is shared by peek, push, score" in text, text
    assert "CALLS" in [phase.phase for phase in report.timeline]


def test_shared_state_that_does_not_start_at_zero_is_refused_by_name(client: Farm) -> None:
    with refuses("STATE_NOT_SHARED") as refused:
        _ = client.compile(gain_control(), recipe="portable").result().report
    assert "level" in refused.value.message and re.search(r"zero|\b0\b", refused.value.message), refused.value
    assert "share_mutable_buffers" in refused.value.remedy


def test_methods_that_are_told_to_share_nothing_each_keep_their_own_state(client: Farm, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN_STATE)
    loud = np.full(8, 3.0, np.float32)
    with client.session(program=gain_control(), recipe=str(tmp_path / "own.toml")) as session:
        levels = [session.run("listen", loud).array().item() for _ in range(2)]
        amplified = session.run("amplify", loud).array()
    assert levels == pytest.approx([1.2, 1.38], rel=1e-5)
    assert np.allclose(amplified, loud)  # its own level is still 1


def test_sharing_without_planned_memory_is_refused_with_both_fields(client: Farm, tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text(CONTRADICTION)
    with pytest.raises(EtfarmError) as refused:
        _ = client.compile(streams(), recipe=str(tmp_path / "both.toml")).result().report
    assert all(name in refused.value.message for name in ("share_mutable_buffers", "alloc_mutable_buffers")), refused.value


class PreActivation(nn.Module):
    """A residual block that begins with an activation in place, as pre-activation networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.SiLU(inplace=True)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = self.conv(self.activation(image))
        return {"features": features + image, "logits": features.mean((2, 3))}


class ClipBoxes(nn.Module):
    """Clips boxes in place through views of its input, as detectors do."""

    def forward(self, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
        boxes[..., 0::2].clamp_(0, 32)
        boxes[..., 1::2].clamp_(0, 24)
        scores[boxes[:, 2] - boxes[:, 0] <= 1] = 0
        return {"boxes": boxes, "scores": scores}


class Denoise(nn.Module):
    """A step of a sampler that scales the latents in place."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, latents: Tensor, sigma: Tensor) -> dict[str, Tensor]:
        latents /= (sigma**2 + 1) ** 0.5
        noise = self.unet(latents)
        return {"sample": latents - sigma * noise, "noise": noise}


class Cached(nn.Module):
    """Attention whose cache is an input that it writes to."""

    def forward(self, query: Tensor, key: Tensor, cache: Tensor, position: Tensor) -> dict[str, Tensor]:
        cache.index_copy_(1, position, key)
        weights = torch.softmax(query @ cache.transpose(1, 2), -1)
        return {"attended": weights @ cache}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


BOXES = torch.tensor([[-3.0, 2, 40, 50], [30, 1, 30.5, 9], [4, 4, 9, 9]])
WRITERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, int]]] = {
    "activate": (PreActivation, (random(1, 3, 8, 8),), {"image": 768}),
    "clip": (ClipBoxes, (BOXES, torch.tensor([0.9, 0.8, 0.7])), {"boxes": 48, "scores": 12}),
    "denoise": (Denoise, (random(1, 4, 8, 8), torch.tensor([2.5])), {"latents": 1024}),
    "attend": (Cached, (random(1, 1, 4), random(1, 1, 4), torch.zeros(1, 6, 4), torch.tensor([2])), {"cache": 96}),
}


def writers(**more: Any) -> ModelSource:
    torch.manual_seed(0)
    return ModelSource(
        {name: build().eval() for name, (build, _, _) in WRITERS.items()},
        {name: tuple(x.clone() for x in inputs) for name, (_, inputs, _) in WRITERS.items()},
        **more,
    )


def eager(method: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return the outputs of eager PyTorch by name, and the inputs as they are afterwards."""
    source = writers()
    inputs = source.example_inputs[method]
    with torch.no_grad():
        outputs = source.methods[method](*inputs)
    return {name: value.numpy().copy() for name, value in outputs.items()}, [x.numpy() for x in inputs]


def test_models_that_write_to_their_inputs_give_their_own_outputs(client: Farm) -> None:
    reports = {report.method: report for report in measured(client, writers(), *WRITERS)}
    assert reports.keys() == WRITERS.keys()
    with client.session(program=writers(), recipe="portable") as session:
        for method, (_, inputs, written) in WRITERS.items():
            expected, _ = eager(method)
            report = reports[method]
            assert report.accuracy is not None
            copied = warned(report, "INPUT_COPIED")
            for name, size in written.items():
                assert any(f"'{name}' ({size:,} bytes)" in message for message in copied), copied
            assert [row.output for row in report.accuracy] == list(expected)
            assert all(row.equal or (row.sqnr_db is not None and row.sqnr_db > 120) for row in report.accuracy), report.accuracy
            arrays = [x.numpy().copy() for x in inputs]
            for _ in range(2):  # the second call sees the same inputs
                answer = session.run(method, *arrays)
                assert list(answer.names) == list(expected)
                assert all(np.allclose(answer[name], value, atol=1e-5) for name, value in expected.items())
            assert all(np.array_equal(array, x.numpy()) for array, x in zip(arrays, inputs, strict=True))


def test_what_such_models_wrote_follows_their_own_outputs_on_request(client: Farm) -> None:
    with client.session(program=writers(keep_mutations=True), recipe="portable") as session:
        for method, (_, inputs, written) in WRITERS.items():
            expected, changed = eager(method)
            answer = session.run(method, *(x.numpy() for x in inputs))
            places = {name: place for place, name in enumerate(session.input_names(method))}
            if method != "clip":  # whose outputs have the names of its inputs
                assert list(answer.names) == [*expected, *written]
            assert len(answer) == len(expected) + len(written)
            for place, value in enumerate(expected.values()):
                assert np.allclose(answer[place], value, atol=1e-5), place
            for place, name in enumerate(written):
                assert np.allclose(answer[len(expected) + place], changed[places[name]], atol=1e-5), name
