"""Names of the source code: the field's terms, and none of the words that say nothing about what a value is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("client/etfarm", "server/etfarm", "device_agents/etfarm", "proto/etfarm/wire", "tests")
BANNED: Final = frozenset({"told", "untold", "heard", "said", "given", "found", "made", "way", "story", "nobody"})
"""Use what the value is instead: `on_progress`, `next_index`, `unsupported`, `matches`, `compilation`."""
WORDS: Final = re.compile(rf"(?<![^\W_])({'|'.join(sorted(BANNED))})(?![^\W_])", re.IGNORECASE)
"""A banned word in a text, with or without underscores around it."""
KEYS: Final = {
    ("device_agents/etfarm/device_agents/targets/phones/errors.py", "told"),
    ("device_agents/etfarm/device_agents/conditions/governor.py", "found"),
    ("server/etfarm/server/jobs/health/run.py", "found"),
    ("server/etfarm/server/reports/disturbances.py", "found"),
    ("tests/unit/device_agents/conditions/test_governor.py", "found"),
    ("tests/unit/server/reports/test_verdict.py", "found"),
}
"""Names that the contract has: metadata of an error, and fields of messages."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a module defines or uses, except what it imports from Hypothesis, whose decorator is `given`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "hypothesis"]
    hypothesis = {alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str) and not (isinstance(node, ast.Name | ast.alias) and value in hypothesis):
                yield value


def test_no_identifier_is_a_banned_word() -> None:
    banned = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if WORDS.search(text) is None:  # as in most modules, whose syntax trees take seconds
                continue
            names = {name.strip("_").lower() for name in identifiers(ast.parse(text))}
            banned |= {(path.relative_to(ROOT).as_posix(), name) for name in names & BANNED}
    assert banned == KEYS
