"""SECURITY.md: each promise names tests, which exist; `.ci/run` requires that they passed."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.promises import PAGE, ROOT, find_unproven, main, read_promises

PROMISES = read_promises(PAGE.read_text())
EXAMPLE = """# Security

## What holds

| who | may |
|---|---|
| a guest | look[^looks] |

**Doors.** They close, and `etfarm 1.0` says so.[^doors] Windows open.

## Where the promises end

Gates.

[^doors]: `tests/rpc/test_doors.py::test_a_door_closes`,
    `tests/rpc/test_doors.py::test_a_door_says_so`
[^looks]: `tests/rpc/test_doors.py::test_a_guest_looks`
"""


def test_each_promise_names_its_tests() -> None:
    assert len(PROMISES.sentences) > 40
    assert [sentence for sentence in PROMISES.sentences if not re.search(r"\[\^[\w-]+\]", sentence)] == []
    assert PROMISES.marks == PROMISES.tests.keys()
    assert [mark for mark, tests in PROMISES.tests.items() if not tests] == []


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("mark", sorted(PROMISES.tests))
def test_the_tests_of_a_promise_exist(mark: str) -> None:
    for path, name in PROMISES.tests[mark]:
        assert (ROOT / path).is_file(), path
        assert name in functions_of(ROOT / path), f"{path}::{name}"


def test_a_page_is_read_by_sentence_and_row() -> None:
    promises = read_promises(EXAMPLE)
    doors = "**Doors.** They close, and `etfarm 1.0` says so.[^doors]"
    assert promises.sentences == ("| a guest | look[^looks] |", doors, "Windows open.")
    assert promises.marks == {"doors", "looks"}
    assert promises.tests["doors"] == tuple(("tests/rpc/test_doors.py", f"test_a_door_{end}") for end in ("closes", "says_so"))


def report(folder: Path, name: str, cases: dict[str, str], owner: str = "tests.rpc.test_doors") -> Path:
    """Write a junit file in which these tests, of one module or class, have these outcomes; "" is a pass."""
    path = folder / name
    rows = "".join(
        f'<testcase classname="{owner}" name="{case}">{f"<{outcome}/>" if outcome else ""}</testcase>'
        for case, outcome in cases.items()
    )
    path.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    return path


ALL = {"test_a_door_closes[oak]": "", "test_a_door_closes[glass]": "", "test_a_door_says_so": "", "test_a_guest_looks": ""}


@pytest.mark.parametrize(
    ("changes", "unproven"),
    [
        ({}, []),
        ({"test_a_door_closes[glass]": "failure"}, ["tests/rpc/test_doors.py::test_a_door_closes"]),
        ({"test_a_guest_looks": "skipped"}, ["tests/rpc/test_doors.py::test_a_guest_looks"]),
        ({"test_a_guest_looks": "error"}, ["tests/rpc/test_doors.py::test_a_guest_looks"]),
    ],
)
def test_a_test_that_did_not_pass_is_named(tmp_path: Path, changes: dict[str, str], unproven: list[str]) -> None:
    assert find_unproven(read_promises(EXAMPLE), [report(tmp_path, "quick.xml", ALL | changes)]) == unproven


def test_a_test_that_did_not_run_is_named(tmp_path: Path) -> None:
    some = report(tmp_path, "quick.xml", {"test_a_door_says_so": "", "test_a_guest_looks": ""})
    assert find_unproven(read_promises(EXAMPLE), [some]) == ["tests/rpc/test_doors.py::test_a_door_closes"]


def test_a_test_in_a_class_has_passed(tmp_path: Path) -> None:
    assert find_unproven(read_promises(EXAMPLE), [report(tmp_path, "quick.xml", ALL, "tests.rpc.test_doors.TestDoors")]) == []


def test_a_test_that_passed_when_it_ran_again_has_passed(tmp_path: Path) -> None:
    first = report(tmp_path, "slow.xml", ALL | {"test_a_guest_looks": "failure"})
    again = report(tmp_path, "slow-again.xml", {"test_a_guest_looks": ""})
    assert find_unproven(read_promises(EXAMPLE), [first, again]) == []


def test_a_run_without_the_tests_of_the_page_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, "quick.xml", ALL)
    assert main(tmp_path) == 1
    assert "which did not pass in this run" in capsys.readouterr().out
