"""Times, sizes, shares and cut texts as tables show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from etfarm.client.formats import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1840, "1.84 µs"), (1.84e6, "1.84 ms"), (18.4e6, "18.4 ms"), (2.5e9, "2.50 s")],
)
def test_times_have_three_digits_that_say_something(value: float, text: str) -> None:
    assert units.time(value) == text


def test_absent_numbers_are_not_zero() -> None:
    assert units.time(None) == "-"
    assert units.size(None) == "-"
    assert units.percent(None) == ""
    assert units.size(0) == "0 B"


def test_a_column_has_one_unit_but_for_what_would_be_0_in_it() -> None:
    assert units.column([760_000, 3_000, None]) == ["760.0 µs", "3.0 µs", ""]
    assert units.column([76_000_000, 3_000]) == ["76.00 ms", "3.00 µs"]


def test_long_texts_keep_the_end_that_says_more() -> None:
    assert units.without_start("a/long/path/model.py:31", 12) == "…model.py:31"
    assert units.without_middle("Convolution (NHWC, F32) IGEMM #2", 20) == "Convolutio… IGEMM #2"
    assert units.without_end("y = self.conv2(y)", 6) == "y = s…"
    for cut in (units.without_start, units.without_middle, units.without_end):
        assert all(len(cut("x" * 50, width)) <= width for width in range(1, 60))


def test_instants_are_shown_as_people_write_them() -> None:
    now = datetime(2026, 1, 10, tzinfo=UTC)
    reported = [units.ago(now - timedelta(seconds=s), now) for s in (1, 30, 600, 36_000, 259_200)]
    assert reported == ["now", "30 s ago", "10 min ago", "10 h ago", "3 d ago"]
    assert units.ago(None, now) == "-"
