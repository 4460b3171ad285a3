"""The matrix and the Pareto plot of a job's cells."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.client.models import Cell, CellState
from etfarm.client.web.cell_values import HEATS, METRICS, build_matrices, measured_values, shade
from etfarm.client.web.pareto import BOTTOM, HEIGHT, LEFT, MAX_TICKS, RIGHT, TOP, WIDTH, build_plot
from tests.support.documents import report

POSITIVE = st.floats(1e-3, 1e12)


def cell(index: int, model: str, recipe: str, device: str | None, *, threads: int | None = None) -> Cell:
    return Cell(
        id=f"c{index}",
        index=index,
        model=model,
        recipe=recipe,
        method="forward",
        threads=threads,
        device=device,
        attempts=1,
        state=CellState.SUCCEEDED,
    )


def test_values_are_those_that_the_report_has() -> None:
    assert measured_values(report(latency=None, memory=None, compile=None, accuracy=[], generation=None)) == {}
    assert measured_values(report())["latency"] > 0


def test_a_matrix_has_a_row_for_each_recipe_and_a_column_for_each_device() -> None:
    cells = [cell(0, "a", "x", "d0"), cell(1, "a", "x", "d1"), cell(2, "a", "y", "d0", threads=2), cell(3, "b", "x", None)]
    values = {"c0": {"latency": 10.0}, "c1": {"latency": 1000.0}, "c2": {"latency": 100.0}}
    first, second = build_matrices(cells, values, {"d0": "pi5"}, METRICS["latency"])
    assert (first.model, first.devices) == ("a", ("pi5", "d1"))
    assert [label for label, _ in first.rows] == ["x", "y · 2 threads"]
    shown = [[[(entry.text, entry.heat) for entry in entries] for entries in columns] for _, columns in first.rows]
    assert shown == [[[("10.0 ns", 0)], [("1.00 µs", HEATS)]], [[("100 ns", HEATS // 2)], []]]
    assert second.devices == ("not placed yet",)
    assert second.rows[0][1][0][0].heat is None


@given(values=st.lists(POSITIVE, min_size=1, max_size=20), key=st.sampled_from(sorted(METRICS)))
def test_the_best_value_has_the_first_shade(values: list[float], key: str) -> None:
    metric = METRICS[key]
    shades = [shade(value, values, metric) for value in values]
    assert all(0 <= each <= HEATS for each in shades)
    assert shade(min(values) if metric.is_less_better else max(values), values, metric) == 0


def dominates(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether a cell is as fast and as accurate, and better in one."""
    no_worse = one["latency"] <= other["latency"] and one["accuracy"] >= other["accuracy"]
    return no_worse and (one["latency"], one["accuracy"]) != (other["latency"], other["accuracy"])


@given(st.lists(st.fixed_dictionaries({"latency": POSITIVE, "accuracy": st.floats(-20, 300)}), min_size=2, max_size=12))
def test_the_best_cells_are_those_that_no_other_beats(values: list[dict[str, float]]) -> None:
    plot = build_plot([(str(index), "", each) for index, each in enumerate(values)], METRICS["latency"], METRICS["accuracy"])
    assert plot is not None
    assert [dot.is_best for dot in plot.dots] == [not any(dominates(other, each) for other in values) for each in values]
    assert all(LEFT <= dot.x <= WIDTH - RIGHT and TOP <= dot.y <= HEIGHT - BOTTOM for dot in plot.dots)


@given(low=st.floats(1.0, 1e9), factor=st.floats(1.0, 1e6), key=st.sampled_from(sorted(METRICS)))
def test_axes_have_few_round_ticks_in_order(low: float, factor: float, key: str) -> None:
    metric = METRICS[key]
    plot = build_plot([("a", "", {key: low}), ("b", "", {key: low * factor})], metric, metric)
    assert plot is not None
    places = [place for place, _ in plot.x_ticks]
    assert places == sorted(places)
    assert 1 <= len(places) <= 2 * MAX_TICKS
    assert all(LEFT <= place <= WIDTH - RIGHT for place in places)


@pytest.mark.parametrize(("low", "high", "texts"), [(97 << 10, 112 << 10, "KiB"), (1 << 20, 1 << 29, "MiB")])
def test_sizes_have_ticks_in_their_own_units(low: int, high: int, texts: str) -> None:
    plot = build_plot([("a", "", {"size": low}), ("b", "", {"size": high})], METRICS["size"], METRICS["size"])
    assert plot is not None
    assert len(plot.x_ticks) >= 2
    for _, text in plot.x_ticks:
        number, unit = text.split()
        assert unit == texts and math.isclose(float(number), round(float(number)))


def test_one_cell_has_no_plot() -> None:
    assert build_plot([("a", "", {"latency": 1.0}), ("b", "", {})], METRICS["latency"], METRICS["latency"]) is None
