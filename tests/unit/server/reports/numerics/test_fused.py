"""When outputs that are far from a quantized program are warned of: rounding is no reason, on any sample."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from etfarm.server.reports.numerics import accuracy, fused, reference
from etfarm.v1 import report_pb2
from etfarm.wire import tensors
from etfarm.wire.tensors import Value

SIGNAL = np.full(100, 10.0, np.float32)


def value(array: np.ndarray) -> Value:
    return tensors.from_array("y", array)


def noisy(level_db: float) -> Value:
    """Return the signal with noise at a level."""
    return value(SIGNAL * np.float32(1 + 10 ** (-level_db / 20)))


def quantized() -> Any:
    """Return a program with scales from calibration, and nothing that is wrong when fused."""
    import torch
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the operators

    graph = torch.fx.Graph()
    operator = torch.ops.quantized_decomposed.quantize_per_tensor.default
    graph.output(graph.call_function(operator, (graph.placeholder("x"), 0.1, 0, -128, 127, torch.int8)))
    return SimpleNamespace(graph=graph)


@pytest.mark.parametrize(
    ("levels_db", "rounded_db", "warns"),
    [
        ([14], 15, False),
        ([11], 15, True),
        # The first sample is better than all together, whose level rounding explains.
        ([30, 15, 14], 15, False),
        # One sample is far worse than rounding explains.
        ([40, 40, 5], 30, True),
    ],
)
def test_rounding_is_judged_on_a_sample_like_all_of_them(
    levels_db: list[float], rounded_db: float, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "run_rounded", lambda program, inputs: [noisy(rounded_db)])
    samples = [[(value(SIGNAL), noisy(level))] for level in levels_db]
    files = [tmp_path / f"{place}.ett" for place in range(len(samples))]
    for file in files:
        file.write_bytes(tensors.encode([value(SIGNAL)]))
    together = accuracy.compare_samples("y", [sample[0] for sample in samples])
    row = report_pb2.OutputAccuracy(output="y", sqnr_db=together.difference.sqnr_db)
    assert row.sqnr_db < fused.LEAST_DB
    assert bool(fused.describe(quantized(), [row], samples, files)) is warns
