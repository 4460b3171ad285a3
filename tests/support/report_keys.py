"""The keys of `etfarm.report/1` as docs/report-format.md promises them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "report-format.md"


@cache
def documented_keys(section: str = "Report") -> Mapping[str, str]:
    """Return the keys of an object in order, each with the section that describes its objects, if they are any."""
    text = _PAGE.read_text().partition(f"\n### {section}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, flags=re.MULTILINE)
    assert rows, f"docs/report-format.md has no table of {section}"
    return {key: link[1] if (link := re.search(r"\[(\w+)\]\(#", kind)) else "" for key, kind in rows}


def assert_keys(value: Any, section: str = "Report") -> None:
    """Check that an object, each object of a list, or the objects within, have exactly the documented keys."""
    if isinstance(value, list):
        assert value, section
        for item in value:
            assert_keys(item, section)
        return
    keys = documented_keys(section)
    if set(value).isdisjoint(keys):  # objects by name
        return assert_keys([*value.values()], section)
    assert list(value) == list(keys), section
    for key, inner in keys.items():
        if inner:
            assert_keys(value[key], inner)
