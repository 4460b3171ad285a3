"""Golden files: the sentences that users read, one file a subject, in `tests/golden`.

A test asserts an error's type, reason and metadata, and hands the sentence to the fixture `golden`, which compares it with the
entry of that test. `pytest --update-golden PATH` rewrites the entries of the tests that it runs; review the difference.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from etfarm.wire.errors import EtfarmError
from tests.support.refusals import refuses

FOLDER: Final = Path(__file__).parents[1] / "golden"
_INDENT: Final = "    "
_ESCAPED: Final = {ord("\n"): "\\n", ord("\r"): "\\r"}


def read(file: Path) -> dict[str, str]:
    """Return the entries of a golden file by their keys; none if there is no file."""
    if not file.exists():
        return {}
    entries = {}
    for entry in file.read_text().split("\n\n"):
        key, *lines = entry.strip("\n").split("\n")
        entries[key] = "\n".join(line.removeprefix(_INDENT) for line in lines)
    return entries


def write(file: Path, entries: Mapping[str, str]) -> None:
    """Write the entries in the order of their keys."""
    file.parent.mkdir(exist_ok=True)
    texts = [f"{key}\n" + "".join(f"{_INDENT}{line}\n" for line in entries[key].split("\n")) for key in sorted(entries)]
    file.write_text("\n".join(texts))


def sentence(error: EtfarmError) -> str:
    """Return `REASON: message | remedy`."""
    return f"{error.reason}: {error.message}" + (f" | {error.remedy}" if error.remedy else "")


class Golden:
    """The entries of one test.

    Args:
        subject: name of the golden file.
        key: name of the test, with its parameters.
        hidden: texts that differ on each run, such as a temporary folder, with what to write instead.
    """

    def __init__(self, subject: str, key: str, hidden: Mapping[str, str], *, update: bool) -> None:
        self._file = FOLDER / f"{subject}.txt"
        self._key = key.translate(_ESCAPED)
        self._hidden = hidden
        self._update = update
        self._checked = 0

    def check(self, actual: BaseException | str) -> None:
        """Compare an error's sentence, or a text, with the golden one. Several of one test are numbered in their order."""
        text = sentence(actual) if isinstance(actual, EtfarmError) else str(actual)
        for before, after in self._hidden.items():
            text = text.replace(before, after)
        text = text.strip("\n")
        self._checked += 1
        key = self._key if self._checked == 1 else f"{self._key} ({self._checked})"
        if self._update:
            with _locked():
                write(self._file, read(self._file) | {key: text})
        expected = read(self._file).get(key)
        assert text == expected, f"{self._file.name} has another sentence for {key}; see --update-golden"

    @contextmanager
    def refuses(self, reason: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[EtfarmError]]:
        """Expect an error with a reason and the golden sentence in the block."""
        with refuses(reason, match) as refused:
            yield refused
        self.check(refused.value)


@contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time rewrite the files."""
    FOLDER.mkdir(exist_ok=True)
    descriptor = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_STORAGES = frozenset({"files", "s3", "sqlite", "postgresql"})
"""Names of databases and of kinds of blobs in the parameters of a test."""


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return the golden sentences of the requesting test, in the file that is named after its module."""
    hidden = {}
    if "tmp_path" in request.fixturenames:
        hidden[str(request.getfixturevalue("tmp_path"))] = "TMP"
    hidden[str(FOLDER.parents[1])] = "CHECKOUT"
    subject = re.sub(r"^test_", "", request.path.stem)
    return Golden(subject, _without_storage(request.node.name), hidden, update=request.config.getoption("--update-golden"))


def _without_storage(name: str) -> str:
    """Return a test's name without the storage it runs on: what users see is the same with each database and kind of blobs."""
    test, _, parameters = name.removesuffix("]").partition("[")
    parts = parameters.split("-")
    others = [each for each in parts if each not in _STORAGES]
    if len(others) == len(parts):
        return name
    return f"{test}[{'-'.join(others)}]" if others else test
