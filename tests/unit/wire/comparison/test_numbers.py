"""The text of a ratio: as many digits as tell it from others."""

from __future__ import annotations

import pytest

from etfarm.wire.comparison.numbers import ratio_text


@pytest.mark.parametrize(
    ("value", "ends", "text"),
    [
        (0.912, (0.905, 0.919), "0.912x [0.905, 0.919]"),
        (0.01, (0.00987, 0.0101), "0.0100x [0.00987, 0.0101]"),
        (0.012345, None, "0.0123x"),
        (0.0999, None, "0.0999x"),
        (0.1 - 1e-12, None, "0.100x"),
        (0.0, None, "0.000x"),
        (1.0004, (0.9996, 1.0012), "1.000x [1.000, 1.001]"),
        (81.2345, (80.0, 82.0), "81.234x [80.000, 82.000]"),
        (4.2e-9, None, "0.00000000420x"),
        (1e-300, None, "0.000000000000x"),
    ],
)
def test_a_ratio_has_three_decimals_and_three_significant_digits(
    value: float, ends: tuple[float, float] | None, text: str
) -> None:
    assert ratio_text(value, ends) == text
