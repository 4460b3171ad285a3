"""When outputs that are far from a quantized program are warned of: rounding is no reason, on any sample."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from etfarm.server.graphs import quantized_outputs
from etfarm.server.graphs.quantized_outputs import describe, level_of
from etfarm.wire import tensors
from etfarm.wire.tensors import Scalar, Value

SIGNAL = np.full(100, 10.0, np.float32)
CLASSES = np.arange(100)


def value(array: np.ndarray) -> Value:
    return tensors.from_array("y", array)


def noisy(level_db: float) -> np.ndarray:
    """Return the signal with noise at a level."""
    return SIGNAL * np.float32(1 + 10 ** (-level_db / 20))


def classes(share: float) -> np.ndarray:
    """Return the classes, of which a share is as the graph gives them."""
    return np.where(100 * share > CLASSES, CLASSES, -1)


def quantized(*, shares_a_layer: bool = False) -> Any:
    """Return a program with scales from calibration."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the operators

    graph = torch.fx.Graph()
    operator = torch.ops.quantized_decomposed.quantize_per_tensor.default
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    for _ in range(2 if shares_a_layer else 0):
        x = graph.call_function(torch.ops.aten.linear.default, (graph.call_function(operator, (x, 0.1, 0, -128, 127)), weight))
    graph.output(graph.call_function(operator, (x, 0.1, 0, -128, 127, torch.int8)))
    return SimpleNamespace(graph=graph)


def warning(
    monkeypatch: pytest.MonkeyPatch,
    samples: list[list[tuple[np.ndarray, np.ndarray]]],
    rounded: list[np.ndarray],
    program: Any = None,
    backends: tuple[str, ...] = ("XnnpackBackend",),
) -> str:
    """Return the warning of outputs, where the graph with rounded values gives others."""
    monkeypatch.setattr(quantized_outputs, "run_rounded", lambda program, leaves, seed: [torch.from_numpy(r) for r in rounded])
    pairs = [[(value(expected), value(actual)) for expected, actual in sample] for sample in samples]
    return describe(program or quantized(), ["y", "z"][: len(rounded)], pairs, lambda sample: [], backends)


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
    levels_db: list[float], rounded_db: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [[(SIGNAL, noisy(level))] for level in levels_db]
    assert bool(warning(monkeypatch, samples, [noisy(rounded_db)])) is warns


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_that_the_graph_does_not_have_is_far_whatever_the_other_outputs_are(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SIGNAL.copy()
    broken[3] = bad
    sample = [(SIGNAL, noisy(60)), (SIGNAL, broken)]
    assert "graph, run by PyTorch: z (NaN or infinity on one side only), where" in warning(
        monkeypatch, [sample], [noisy(60), noisy(60)]
    )
    assert not warning(monkeypatch, [[(broken, broken)]], [broken])


@pytest.mark.parametrize(("share", "of_rounded", "warns"), [(0.3, 0.98, True), (0.95, 0.98, False), (0.8, 0.7, False)])
def test_integers_are_judged_by_how_many_are_equal(
    share: float, of_rounded: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = warning(monkeypatch, [[(CLASSES, classes(share))]], [classes(of_rounded)])
    assert bool(text) is warns and (not warns or "y (30% of its integers equal)" in text)
    # A cause in the graph is no reason to blame it for integers that rounding changes as well.
    text = warning(monkeypatch, [[(CLASSES, classes(share))]], [classes(of_rounded)], quantized(shares_a_layer=True))
    assert bool(text) is warns


@pytest.mark.parametrize(("backends", "advises"), [(("XnnpackBackend",), True), (("TOSABackend",), False), ((), False)])
def test_only_programs_with_xnnpack_get_its_remedies(
    backends: tuple[str, ...], advises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = quantized(shares_a_layer=True)
    text = warning(monkeypatch, [[(SIGNAL, noisy(11))]], [noisy(15)], program, backends)
    assert ("XNNPACK" in text, "copy_shared_layers" in text) == (advises, advises) and "y (11.0 dB)" in text
    # Without a known cause, rounding may be it.
    assert bool(warning(monkeypatch, [[(SIGNAL, noisy(14))]], [noisy(15)], program, backends)) is advises


def test_outputs_that_cannot_be_compared_have_no_level() -> None:
    nothing = np.zeros(0, np.float32)
    for expected, actual in (
        (value(SIGNAL), value(SIGNAL[:3])),
        (value(nothing), value(nothing)),
        (Scalar("y", None), Scalar("y", None)),
        (value(SIGNAL * 0), value(SIGNAL)),
    ):
        assert level_of([(expected, actual)]) is None
    assert level_of([(Scalar("y", 2.0), Scalar("y", 2.0))]) == quantized_outputs.Level(300)


@pytest.mark.parametrize(
    ("graph_db", "program_db", "warns"),
    [
        (40, 12, True),
        # A scale per row is better than the graph's.
        (12, 40, False),
        (12, 11, False),
        (40, 30, False),
    ],
)
def test_dynamic_scales_are_judged_by_the_model_as_well(
    graph_db: float, program_db: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.quantized_decomposed.choose_qparams.tensor, (x, -128, 127, 1e-5, torch.int8)))
    program, pairs = SimpleNamespace(graph=graph), [[(value(noisy(graph_db)), value(noisy(program_db)))]]
    monkeypatch.setattr(quantized_outputs, "run_rounded", lambda program, leaves, seed: [torch.from_numpy(noisy(graph_db))])
    text = describe(program, ["y"], pairs, lambda sample: [], ["XnnpackBackend"], [value(SIGNAL)])
    assert bool(text) is warns and (not warns or text.endswith("--numerics names the operators that differ."))
    assert not describe(program, ["y"], pairs, lambda sample: [], ["XnnpackBackend"])


@pytest.mark.parametrize("level_db", [12, 40])
def test_a_program_that_the_user_quantized_is_judged_by_itself(level_db: float, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao  # noqa: F401 - registers the operators

    graph = torch.fx.Graph()
    arguments = (graph.placeholder("x"), "ASYMMETRIC", [1, 64], torch.int8)
    graph.output(graph.call_function(torch.ops.torchao.choose_qparams_affine.default, arguments))
    program, pairs = SimpleNamespace(graph=graph), [[(value(SIGNAL), value(noisy(level_db)))]]
    monkeypatch.setattr(quantized_outputs, "run_rounded", lambda program, leaves, seed: [torch.from_numpy(SIGNAL)])
    text = describe(program, ["y"], pairs, lambda sample: [], ["XnnpackBackend"], is_source=True)
    assert text.endswith(quantized_outputs.QUANTIZE_OTHERWISE) if level_db < quantized_outputs.LEAST_DB else not text


@pytest.mark.parametrize(
    ("graph", "program", "level_db"),
    [
        ([3.0, -math.inf, 4.0], [3.0, -math.inf, 3.0], 10 * math.log10(25)),
        ([3.0, -math.inf, 4.0], [3.0, math.inf, 4.0], -math.inf),
        ([3.0, math.nan, 4.0], [3.0, 0.0, 4.0], -math.inf),
    ],
)
def test_outputs_that_both_mask_are_judged_by_the_others(graph: list[float], program: list[float], level_db: float) -> None:
    level = level_of([(tensors.from_array("", np.array(graph)), tensors.from_array("", np.array(program)))])
    assert level is not None and level.db == pytest.approx(level_db)
