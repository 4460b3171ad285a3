"""Which columns of an output are lost: such as vary by less than its step, while others vary far more."""

from __future__ import annotations

import tracemalloc
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etfarm.server.graphs import lost_columns
from etfarm.wire import tensors
from etfarm.wire.tensors import Value

RANDOM = np.random.default_rng(0)
LAST: Final = {columns: np.arange(columns)[None] for columns in (2, 3, 4, 5, 20)}
"""The columns of a layer with some features, whose rows are samples or tokens."""


def pairs(ranges: list[float], *, step: float | None = None, samples: int = 8) -> list[tuple[Value, Value]]:
    """Return what a model and an int8 program give for samples of one row, in columns of some ranges."""
    wanted = RANDOM.normal(size=(samples, len(ranges))) * ranges
    return quantized(wanted[:, None], step or float(np.abs(wanted).max()) / 127)


def quantized(samples: NDArray[np.float64], step: float) -> list[tuple[Value, Value]]:
    each = samples.astype(np.float32)
    return [
        (tensors.from_array("y", one), tensors.from_array("y", np.round(one / step).astype(np.float32) * step)) for one in each
    ]


def test_columns_are_found_over_samples_of_one_row() -> None:
    assert lost_columns.find(pairs([600, 0.05, 500, 0.1]), LAST[4]) == [1, 3]
    assert not lost_columns.find(pairs([600, 0.05], samples=4), LAST[2]), "too few values"
    assert not lost_columns.find(pairs([600, 0.05], step=1e-3), LAST[2]), "each is finer than its range"


@pytest.mark.parametrize("ranges", [[1.0, 1.2, 0.8], [5.0, 0.5, 0.3], [0.01, 0.012]])
def test_logits_are_not_lost(ranges: list[float]) -> None:
    assert not lost_columns.find(pairs(ranges), LAST[len(ranges)])
    # As of a network that hardly depends on its inputs: all columns vary by less than a step.
    assert not lost_columns.find(quantized(3 + RANDOM.normal(size=(8, 1, 5)) * 1e-3, 0.05), LAST[5])


def test_probabilities_of_classes_that_never_occur_are_not_lost() -> None:
    logits = RANDOM.normal(size=(8, 1, 20)) * 6
    assert not lost_columns.find(quantized(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), 1 / 256), LAST[20])


def test_columns_of_images_are_their_channels() -> None:
    images = RANDOM.normal(size=(2, 1, 3, 4, 4)) * np.array([600, 0.05, 300])[:, None, None]
    assert lost_columns.find(quantized(images, 5.0), LAST[3][..., None, None]) == [1]


class Layers(torch.nn.Module):
    """Gives columns of a layer directly, through views, and something that no layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Conv1d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.b(x)
        return self.a(x), y, y.permute(0, 2, 1), y.flatten(1), y[:, 1:], self.b(x[0]), torch.sigmoid(y), y + 1


def columns_of(module: torch.nn.Module, *inputs: Any, at: int = 0, **options: Any) -> Any:
    """Return the columns of an output as lists; None if there are none."""
    columns = lost_columns.columns_of(torch.export.export(module.eval(), inputs, **options), at)
    return None if columns is None else columns.tolist()


def test_columns_are_those_of_the_layer_that_gives_the_output() -> None:
    x = torch.randn(1, 1, 4)
    assert [columns_of(Layers(), x, at=at) for at in range(9)] == [
        [[[0, 1, 2, 3, 4, 5]]], [[[0], [1]]], [[[0, 1]]], [[0, 0, 1, 1]], [[[1]]], [[0], [1]], None, None, None,
    ]  # fmt: skip


class Anchors(torch.nn.Module):
    """Two anchors with three numbers of a box each at each place, as YOLO gives them."""

    def __init__(self, ranges: tuple[float, ...] = (1.0,) * 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Conv2d(3, 6, 1)
        self.head.weight.data *= torch.tensor(ranges)[:, None, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        return y.view(x.shape[0], 2, 3, *x.shape[2:]).permute(0, 1, 3, 4, 2)


class Boxes(Anchors):
    """The same as SSD gives them: a row for each box."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 3)


IMAGES: Final = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def lost(module: torch.nn.Module, images: torch.Tensor = IMAGES, **options: Any) -> list[int]:
    """Return the columns of a module's output that 8 bits with one scale lose."""
    program = torch.export.export(module.eval(), (IMAGES,), **options)
    wanted = module(images).detach().double().numpy()
    return lost_columns.find(quantized(wanted[None], float(np.abs(wanted).max()) / 127), lost_columns.columns_of(program, 0))


@pytest.mark.parametrize("kind", [Anchors, Boxes])
def test_channels_of_anchors_are_followed_through_views(kind: type[Anchors]) -> None:
    assert lost(kind((600, 600, 0.05, 500, 500, 0.1))) == [2, 5]
    assert not lost(kind()) and not lost(kind((600, 400, 300, 600, 500, 100)))
    message = lost_columns.describe("forward", "boxes", [2, 5], torch.export.export(kind().eval(), (IMAGES,)), 0)
    assert "loses columns 2, 5 of boxes (numbered as head gives them)," in message
    assert 'skip_modules = ["head"]' in message


def test_columns_are_the_same_for_other_sizes_along_other_dims() -> None:
    sizes = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=2, max=64)},)}
    assert lost(Anchors((600, 600, 0.05, 500, 500, 0.1)), torch.cat([IMAGES] * 3), **sizes) == [2, 5]


class Depth(torch.nn.Module):
    """A number for each pixel, some of which hardly vary."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.head = torch.nn.Conv2d(3, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).squeeze(1)


@pytest.mark.parametrize("channels", [1, 4])
def test_pixels_of_a_dense_regression_are_no_columns(channels: int) -> None:
    near = IMAGES * torch.logspace(0, -5, 8) * torch.logspace(0, -5, 8)[:, None] * 600
    assert not lost(Depth(channels), near)


def test_positions_in_time_are_no_columns() -> None:
    fading = np.linspace(0, 1, 400) ** 3 * RANDOM.normal(size=(1, 1, 8, 400)) * 10
    channels, positions = np.arange(8)[None, :, None], np.arange(400)[None, None]
    assert not lost_columns.find(quantized(fading, 0.05), channels) and lost_columns.find(quantized(fading, 0.05), positions)
    assert not lost_columns.find(quantized(fading, 0.05), None)


def test_an_output_without_a_batch_has_channels_before_its_positions() -> None:
    class Signal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Conv1d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    program = torch.export.export(Signal(), (torch.randn(3, 40),))
    fading = np.linspace(0, 1, 40) ** 3 * RANDOM.normal(size=(8, 4, 40)) * 10
    assert not lost_columns.find(quantized(fading, 0.05), lost_columns.columns_of(program, 0))


def test_large_outputs_need_little_memory() -> None:
    images = RANDOM.normal(size=(8, 1, 4, 512, 512)).astype(np.float32) * np.array([600, 0.05, 300, 0.01])[:, None, None]
    samples = quantized(images, 5.0)
    tracemalloc.start()
    try:
        assert lost_columns.find(samples, np.arange(4)[None, :, None, None]) == [1, 3]
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 24 * images.size
