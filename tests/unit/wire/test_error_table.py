"""The errors that have no class of their own: what the table says of them, and that each is raised with what it may have."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.wire.error_table import ROWS
from etfarm.wire.errors import ANY_KEYS, DeviceError, FarmError, Fault, Kind, UserError, error_for

ROOT = Path(__file__).resolve().parents[3]

PACKAGES = ("proto", "client", "server", "device_agents")


def nodes(text: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of the packages' modules that have a text, each with its file."""
    for package in PACKAGES:
        for file in sorted((ROOT / package / "etfarm").rglob("*.py")):
            for node in ast.walk(ast.parse(source)) if text in (source := file.read_text()) else ():
                yield str(file.relative_to(ROOT)), node


def tried() -> set[str]:
    """Return the reasons whose remedies a test applies."""
    marks = (
        node
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.remedy" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.remedy"
    )
    return {ast.literal_eval(reason) for mark in marks for reason in mark.args}


def remedies() -> dict[str, str]:
    """Return the remedy of each reason in the table, those of classes included."""
    groups = tomllib.loads((ROOT / "docs" / "reasons.toml").read_text()).values()
    return {reason: texts[1] for group in groups for reason, texts in group.items() if reason.isupper()}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of `error_for` in the packages, each with its place."""
    for file, node in nodes("error_for("):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "error_for":
            yield f"{file}:{node.lineno}", node


def test_each_reason_is_raised_and_has_the_metadata_that_the_table_names() -> None:
    keys: dict[str, set[str]] = {reason: set() for reason in ROWS}
    raised = set()
    for place, call in calls():
        reason = call.args[0]
        assert isinstance(reason, ast.Constant) and reason.value in ROWS, place
        raised.add(reason.value)
        keys[reason.value] |= {"*" if each.arg is None else each.arg for each in call.keywords} - {"stage", "remedy", "message"}
    named = {reason: row.partition(": ")[2] for reason, row in ROWS.items()}
    for reason, used in keys.items():
        assert set(named[reason].split()) == ({ANY_KEYS} if ANY_KEYS in used else used), reason
    assert raised == ROWS.keys()


def test_an_error_has_the_fault_and_the_kind_of_its_row() -> None:
    types = {Fault.USER: UserError, Fault.DEVICE: DeviceError, Fault.FARM: FarmError}
    for reason, row in ROWS.items():
        error = error_for(reason, "It is so", "Do this.", stage="LOAD")
        fault, kind = row.partition(": ")[0].split()
        assert (type(error), error.fault, error.kind, error.reason) == (types[Fault(fault)], fault, Kind(kind), reason)
        assert (str(error), error.remedy, error.stage) == ("It is so. Do this.", "Do this.", "LOAD")


def test_an_error_has_its_reason_from_the_start() -> None:
    set_later = {
        file
        for file, node in nodes(".reason")
        if isinstance(node, ast.Attribute)
        and node.attr == "reason"
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) != "self"
    }
    assert set_later == {
        "proto/etfarm/wire/errors.py",  # in the functions that make errors without a class
        "server/etfarm/server/devices/health/book.py",  # of a message
    }


def test_each_reason_with_a_remedy_has_a_test_that_applies_it() -> None:
    """What only a report of a defect helps against has nothing to try."""
    known = remedies()
    assert tried() <= known.keys()
    to_try = {reason for reason, remedy in known.items() if not remedy.startswith("Report it as a defect")}
    assert to_try <= tried()


def test_a_reason_or_a_key_that_is_in_no_row_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        error_for("NO_SUCH_REASON", "It is so.")
    with pytest.raises(KeyError, match="MODEL_NOT_FOUND has no"):
        error_for("MODEL_NOT_FOUND", "It is so.", colour="red")
