"""Golden files: each entry belongs to a test, and no sentence has the words that say nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.support import golden

TESTS: Final = Path(__file__).parents[1]
RIDDLES: Final = re.compile(r"\b(told|heard|nobody|(is|are) none( of (it|them))?|(?<!here )is no [a-z]+|of none)\b")


def test_every_entry_belongs_to_a_test() -> None:
    names = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:    )?(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    entries = {key for file in golden.FOLDER.glob("*.txt") for key in golden.read(file)}
    assert entries
    assert {key for key in entries if re.split(r"[\[ ]", key, maxsplit=1)[0] not in names} == set()


def test_a_sentence_says_what_is_wrong() -> None:
    sentences = [text for file in golden.FOLDER.glob("*.txt") for text in golden.read(file).values()]
    assert [text for text in sentences if RIDDLES.search(text)] == []


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    entries = {"test_b[x y]": "BAD_JOB: `threads` must be at least 1, got 0. | Give one.", "test_a": "two\nlines", "test_c": ""}
    golden.write(tmp_path / "some.txt", entries)
    assert golden.read(tmp_path / "some.txt") == entries
    assert golden.read(tmp_path / "none.txt") == {}
