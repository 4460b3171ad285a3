"""A sample of PyTorch's operators: each computes on the runtime what eager PyTorch computes, or is refused, or is warned of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.bench.operators import read_rows

pytestmark = pytest.mark.slow(reason="compiles a dozen programs")

OPERATORS: Final = (
    "add", "argmax", "bmm", "cat", "div.floor_rounding", "expand", "index_select", "masked_fill", "nn.functional.gelu",
    "nn.functional.pad.constant", "sort", "where",
)  # fmt: skip
"""Operators of several kinds; `python -m tests.bench.operators` tries all."""


def test_no_operator_of_the_sample_differs_silently(tmp_path: Path) -> None:
    only = "|".join(f"^{name.replace('.', '[.]')}$" for name in OPERATORS)
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.bench.operators", "--only", only, "--json", str(file), "--recipes", "portable"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    rows = read_rows(file)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {row.operator for row in rows} == set(OPERATORS)
    unexpected = [row for row in rows if row.outcome not in ("EQUAL", "NAMED", "REFUSED")]
    assert not unexpected
    assert {row.operator for row in rows if row.outcome == "EQUAL"} >= {"add", "cat", "where"}
