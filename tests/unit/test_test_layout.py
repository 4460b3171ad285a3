"""How the tests are laid out: as the source is, and each module on its own with what it shares in tests/support."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = ROOT / "tests"
SOURCES: Final = {
    "client": ROOT / "client" / "etfarm" / "client",
    "device_agents": ROOT / "device_agents" / "etfarm" / "device_agents",
    "server": ROOT / "server" / "etfarm" / "server",
    "wire": ROOT / "proto" / "etfarm" / "wire",
}


def imported_modules(source: str) -> set[str]:
    """Return the dotted names of all modules that the source imports, and of all names that it imports from them."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def imported_tests(source: str) -> set[str]:
    """Return the test modules that the source imports."""
    return {module for module in imported_modules(source) if any(part.startswith("test_") for part in module.split("."))}


def test_no_module_imports_a_test_module() -> None:
    imports = {path.relative_to(TESTS).as_posix(): imported_tests(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: modules for path, modules in imports.items() if modules} == {}


@pytest.mark.parametrize(
    "source", ["from tests.rpc.test_contract import RPCS", "from tests.unit.wire import test_tls", "import test_tls as other"]
)
def test_an_import_of_a_test_module_is_seen(source: str) -> None:
    assert len(imported_tests(source)) >= 1
    assert imported_tests(source.replace("test_", "support_")) == set()


@pytest.mark.parametrize("package", SOURCES)
def test_the_folders_of_unit_tests_are_those_of_the_source(package: str) -> None:
    folders = {path.parent.relative_to(TESTS / "unit" / package) for path in (TESTS / "unit" / package).rglob("test_*.py")}
    assert folders, f"{package} has no tests"
    assert [folder.as_posix() for folder in sorted(folders) if not (SOURCES[package] / folder).is_dir()] == []


def test_unit_tests_stand_in_the_folder_of_a_package() -> None:
    assert {path.name for path in (TESTS / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"} == set(SOURCES)


@pytest.mark.parametrize("path", sorted((TESTS / "unit").glob("test_*.py")), ids=lambda path: path.stem)
def test_what_tests_one_room_does_not_stand_beside_the_tests_of_the_whole_repository(path: Path) -> None:
    rooms = {tuple(module.split(".")[1:3]) for module in imported_modules(path.read_text()) if module.startswith("etfarm.")}
    assert [room for room in rooms if room[0] in SOURCES and (SOURCES[room[0]] / room[-1]).is_dir()] == []


def test_file_names_are_unique_as_pytest_imports_each_by_its_name() -> None:
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
