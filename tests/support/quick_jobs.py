"""Jobs that measure no longer than they must, and what their reports warn of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.farm import FarmProcess, etfarm

QUICK: Final[dict[str, Any]] = {"iterations": 3, "warmup": 1, "min_time_s": 0.0, "profile": False}
"""Options of the library's `bench`."""
QUICK_OPTIONS: Final = ("--warmup", "1", "--iterations", "3", "--min-time", "0", "--threads", "1")
"""Options of the command `bench`."""


def codes_of(report: Any) -> list[str]:
    """Return the codes of a report's warnings."""
    assert report.compile is not None, report.error
    return [warning.code for warning in report.compile.warnings]


def warned(report: Any, *codes: str) -> list[str]:
    """Return what a report's warnings with one of these codes say."""
    assert report.compile is not None, report.error
    return [warning.message for warning in report.compile.warnings if warning.code in codes]


def bench(farm: FarmProcess, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run `etfarm bench`, which must succeed; return its document and the printed text."""
    done = etfarm("bench", *arguments, "--json", "r.json", "--server", farm.address, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "r.json").read_text(), parse_constant=pytest.fail)
    return document, done.stdout
