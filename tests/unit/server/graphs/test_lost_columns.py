"""Which columns of an output are lost: such as vary by less than its step, while others vary far more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etfarm.server.graphs import lost_columns
from etfarm.wire import tensors
from etfarm.wire.tensors import Value

RANDOM = np.random.default_rng(0)


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
    assert lost_columns.find(pairs([600, 0.05, 500, 0.1]), -1) == [1, 3]
    assert not lost_columns.find(pairs([600, 0.05], samples=4), -1), "too few values"
    assert not lost_columns.find(pairs([600, 0.05], step=1e-3), -1), "each is finer than its range"


@pytest.mark.parametrize("ranges", [[1.0, 1.2, 0.8], [5.0, 0.5, 0.3], [0.01, 0.012]])
def test_logits_are_not_lost(ranges: list[float]) -> None:
    assert not lost_columns.find(pairs(ranges), -1)
    # As of a network that hardly depends on its inputs: all columns vary by less than a step.
    assert not lost_columns.find(quantized(3 + RANDOM.normal(size=(8, 1, 5)) * 1e-3, 0.05), -1)


def test_probabilities_of_classes_that_never_occur_are_not_lost() -> None:
    logits = RANDOM.normal(size=(8, 1, 20)) * 6
    assert not lost_columns.find(quantized(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), 1 / 256), -1)


def test_columns_of_images_are_their_channels() -> None:
    images = RANDOM.normal(size=(2, 1, 3, 4, 4)) * np.array([600, 0.05, 300])[:, None, None]
    assert lost_columns.find(quantized(images, 5.0), 1) == [1]


class Layers(torch.nn.Module):
    """Gives columns of a layer directly, and through a view, and something that no layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Conv1d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.b(x)
        return self.a(x), y, y.permute(0, 2, 1), torch.sigmoid(y)


def test_columns_are_those_of_the_layer_that_gives_the_output() -> None:
    program = torch.export.export(Layers().eval(), (torch.randn(1, 1, 4),))
    assert [lost_columns.dim_of_columns(program, at) for at in range(5)] == [-1, 1, None, None, None]


def test_positions_in_time_are_no_columns() -> None:
    fading = np.linspace(0, 1, 400) ** 3 * RANDOM.normal(size=(1, 1, 8, 400)) * 10
    assert not lost_columns.find(quantized(fading, 0.05), 1) and lost_columns.find(quantized(fading, 0.05), -1)
    assert not lost_columns.find(quantized(fading, 0.05), None)
