"""How the tests are laid out: as the source is, each module on its own, and fakes that come in by the front door."""

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

CHANGES: Final = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
"""Methods that change a collection."""


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The syntax trees of the modules of the tests, by their paths."""
    return {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the dotted names of all modules that a module imports, and of all names that it imports from them."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def imported_tests(tree: ast.Module) -> set[str]:
    """Return the test modules that a module imports."""
    return {module for module in imported_modules(tree) if any(part.startswith("test_") for part in module.split("."))}


def test_no_module_imports_a_test_module(trees: dict[str, ast.Module]) -> None:
    imports = {path: imported_tests(tree) for path, tree in trees.items()}
    assert {path: modules for path, modules in imports.items() if modules} == {}


@pytest.mark.parametrize(
    "source", ["from tests.rpc.test_contract import RPCS", "from tests.unit.wire import test_tls", "import test_tls as other"]
)
def test_an_import_of_a_test_module_is_seen(source: str) -> None:
    assert len(imported_tests(ast.parse(source))) >= 1
    assert imported_tests(ast.parse(source.replace("test_", "support_"))) == set()


@pytest.mark.parametrize("package", SOURCES)
def test_the_folders_of_unit_tests_are_those_of_the_source(package: str) -> None:
    folders = {path.parent.relative_to(TESTS / "unit" / package) for path in (TESTS / "unit" / package).rglob("test_*.py")}
    assert folders, f"{package} has no tests"
    assert [folder.as_posix() for folder in sorted(folders) if not (SOURCES[package] / folder).is_dir()] == []


def test_unit_tests_stand_in_the_folder_of_a_package() -> None:
    assert {path.name for path in (TESTS / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"} == set(SOURCES)


@pytest.mark.parametrize("path", sorted((TESTS / "unit").glob("test_*.py")), ids=lambda path: path.stem)
def test_what_tests_one_room_does_not_stand_beside_the_tests_of_the_whole_repository(path: Path) -> None:
    rooms = {
        tuple(module.split(".")[1:3]) for module in imported_modules(ast.parse(path.read_text())) if module.startswith("etfarm.")
    }
    assert [room for room in rooms if len(room) == 2 and room[0] in SOURCES and (SOURCES[room[0]] / room[1]).is_dir()] == []


def test_file_names_are_unique_as_pytest_imports_each_by_its_name() -> None:
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def reaches_into_privates(target: ast.AST) -> bool:
    """Return whether an expression names a private attribute of anything but `self` and `cls`."""
    return any(
        isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls")
        for node in ast.walk(target)
    )


def is_swap(node: ast.AST) -> bool:
    """Return whether a statement or a call replaces a private part of something else."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return any(map(reaches_into_privates, node.targets if isinstance(node, ast.Assign) else [node.target]))
    if not isinstance(node, ast.Call) or not node.args:
        return False
    texts = [part.value for part in node.args[:2] if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    names_private = any(is_private(name) for text in texts for name in text.split("."))
    match ast.unparse(node.func).rpartition(".")[2]:
        case "setattr" | "delattr" | "setitem" | "delitem" | "patch":
            return names_private or reaches_into_privates(node.args[0])
        case "object":  # `mock.patch.object`
            return names_private
        case _:
            return False


def changes_private_collection(node: ast.AST) -> bool:
    """Return whether a call changes a collection that is a private part of something else."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGES
        and reaches_into_privates(node.func.value)
    )


def swaps(tree: ast.Module) -> list[int]:
    """Return the lines that swap a private part of something else."""
    return sorted(
        node.lineno  # type: ignore[attr-defined]
        for node in ast.walk(tree)
        if is_swap(node) or changes_private_collection(node)
    )


def test_no_test_swaps_a_private_part_of_what_it_tests(trees: dict[str, ast.Module]) -> None:
    places = [f"tests/{path}:{line}" for path, tree in trees.items() for line in swaps(tree)]
    assert places == [], "pass the fake to the constructor or the function instead"


@pytest.mark.parametrize(
    "source",
    [
        'monkeypatch.setattr(module, "_clock", clock)',
        'monkeypatch.setattr("etfarm.server.jobs._clock", clock)',
        'monkeypatch.setattr(server._store, "read", read)',
        'monkeypatch.setitem(module._TABLE, "key", value)',
        'mock.patch("etfarm.server.jobs._clock")',
        'mock.patch.object(server, "_store")',
        "server._store = fake",
        "server._store.read = fake",
        'server._by_name["x"] = fake',
        "server._by_name.clear()",
    ],
)
def test_a_swap_is_seen(source: str) -> None:
    assert swaps(ast.parse(source)) == [1]
    assert swaps(ast.parse(source.replace("_", ""))) == []
