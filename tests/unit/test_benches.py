"""The benches, which run by hand: each can still be started."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHES = sorted(path.stem for path in (Path(__file__).parents[1] / "bench").glob("*.py"))


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_imports_and_names_its_command(name: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(f"tests.bench.{name}")
    assert callable(module.main)
    assert f"python -m tests.bench.{name}" in str(module.__doc__)


def test_the_spread_of_two_processes_has_no_interval() -> None:
    pytest.importorskip("torch")
    module = importlib.import_module("tests.bench.run_spread")
    assert module.estimate([[1.0, 1.1]])["ci95"] is None and module.estimate([[1.0]]) is None
    low, high = module.estimate([[1.0, 1.1, 1.2]])["ci95"]
    assert 0 < low < high
