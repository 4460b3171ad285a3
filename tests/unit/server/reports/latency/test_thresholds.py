"""A farm's own thresholds: what is said is taken, what is not said stays, and what is wrong is named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from etfarm.server.reports.latency import thresholds
from etfarm.server.reports.latency.thresholds import Thresholds
from tests.support.golden import Golden
from tests.support.refusals import refuses


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text("max_drift = 0.2\nmin_samples = 30\nmax_background_cpus = 1\n")
    assert thresholds.read(file) == Thresholds(max_drift=0.2, min_samples=30, max_background_cpus=1)
    file.write_text("")
    assert thresholds.read(file) == Thresholds()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_drfit = 0.2", "Did you mean max_drift?"),
        ("qqq = 1", "Thresholds: min_samples, "),
        ("max_drift = -1", "at least 0, got -1"),
        ("max_drift = inf", "at least 0, got inf"),
        ("max_drift = nan", "at least 0, got nan"),
        ("max_drift = true", "at least 0, got True"),
        ('max_drift = "0.1"', "at least 0, got '0.1'"),
        ("min_samples = 1.5", "whole number"),
        ("[max_drift]", "at least 0, got {}"),
        ("max_drift", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(text)
    with refuses("BAD_THRESHOLDS") as raised:
        thresholds.read(file)
    assert expected in f"{raised.value} {raised.value.remedy}"


def test_a_file_that_is_not_there_is_named(golden: Golden, tmp_path: Path) -> None:
    with golden.refuses("BAD_THRESHOLDS"):
        thresholds.read(tmp_path / "none.toml")


def test_every_threshold_has_its_reason() -> None:
    source = Path(thresholds.__file__).read_text()
    for field in fields(Thresholds):
        line = source.index(f"    {field.name}: ")
        assert source[line:].splitlines()[1].strip().startswith('"""'), field.name
