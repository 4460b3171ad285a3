"""The promises of SECURITY.md and their tests: a footnote after each sentence names the tests that would fail if it were broken.

python -m tests.support.promises FOLDER

checks, with the junit files that a run of all rings has left in FOLDER, that each of these tests ran and passed.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "SECURITY.md"
SECTION: Final = "## What holds\n"
"""The heading of the part in which each sentence is a promise."""

_MARK: Final = re.compile(r"\[\^([\w-]+)\]")
_DEFINITION: Final = re.compile(r"^\[\^([\w-]+)\]: (.*(?:\n    .*)*)", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_SENTENCE_END: Final = re.compile(r"(?<=[.:])((?:\[\^[\w-]+\])*)\s+(?=[A-Z`*|])")


@dataclass(frozen=True)
class Promises:
    """The sentences of a page and the tests that its footnotes name."""

    sentences: tuple[str, ...]
    """The sentences of the section with the promises, each with its footnote marks."""
    marks: frozenset[str]
    """The footnotes that the page refers to."""
    tests: dict[str, tuple[tuple[str, str], ...]]
    """The tests of each footnote: path of the module from the checkout, and name of the function."""


def read_promises(text: str) -> Promises:
    """Return the promises of a page in Markdown."""
    body = _DEFINITION.sub("", text)
    section = body.partition(SECTION)[2].partition("\n## ")[0]
    blocks = [" ".join(block.split()) for block in re.split(r"\n{2,}|\n(?=- |\| )", section)]
    is_text = [block for block in blocks if block and not block.startswith(("#", "|---", "| who "))]
    return Promises(
        tuple(sentence for block in is_text for sentence in _split(block)),
        frozenset(_MARK.findall(body)),
        {name: tuple(_TEST.findall(tests)) for name, tests in _DEFINITION.findall(text)},
    )


def _split(block: str) -> list[str]:
    """Return the sentences of a paragraph; a row of a table is one."""
    if block.startswith("|"):
        return [block]
    return [
        sentence for sentence in _SENTENCE_END.sub(r"\1\n", block).split("\n") if not re.fullmatch(r"\*\*[\w ,.']+\*\*", sentence)
    ]


def find_unproven(promises: Promises, reports: list[Path]) -> list[str]:
    """Return the named tests that did not run, or of which a case passed in no report.

    Args:
        reports: junit files. A test that failed in one and passed in another, where it ran again, has passed.
    """
    passed: defaultdict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name = case.get("name", "")
            # A test in a class has that class at the end of its module's name.
            module = case.get("classname", "").partition(".Test")[0]
            key = module.replace(".", "/") + ".py", name.partition("[")[0]
            has_passed = all(case.find(outcome) is None for outcome in ("failure", "error", "skipped"))
            passed[key][name] = passed[key].get(name, False) or has_passed
    named = sorted({test for tests in promises.tests.values() for test in tests})
    return [f"{path}::{name}" for path, name in named if not passed[path, name] or not all(passed[path, name].values())]


def main(folder: Path) -> int:
    """Print the tests of promises that did not pass; return 1 if there are any."""
    promises = read_promises(PAGE.read_text())
    unproven = find_unproven(promises, sorted(folder.glob("*.xml")))
    for test in unproven:
        print(f"SECURITY.md names {test}, which did not pass in this run.")
    count = len({test for tests in promises.tests.values() for test in tests})
    print(f"{count - len(unproven)} of the {count} tests that SECURITY.md names passed.")
    return 1 if unproven or not count else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
