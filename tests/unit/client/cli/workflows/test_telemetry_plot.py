"""Plots of readings in a line of text."""

from __future__ import annotations

import pytest

from etfarm.client.cli.workflows.telemetry import BARS, plot


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 80, BARS),
        ([5.0, 5.0], 80, "▁▁"),
        ([1.0, None, 2.0], 80, "▁ █"),
        ([None, None], 80, "  "),
        # The highest value of each part is drawn, so that no peak is lost.
        ([0.0, 9.0, 0.0, 0.0], 2, "█▁"),
        ([float(number) for number in range(800)], 8, BARS),
        ([], 80, ""),
    ],
)
def test_values_are_drawn_as_bars(values: list[float | None], width: int, drawn: str) -> None:
    assert plot(values, width) == drawn
