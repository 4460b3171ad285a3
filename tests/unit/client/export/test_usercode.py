"""Modules of factories: each gets its own from disk, and whatever is not below its root is shared."""

from __future__ import annotations

import hashlib
import importlib
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client.export import usercode
from etfarm.client.export.errors import FactoryFailed
from etfarm.client.export.factory import scope_of
from etfarm.client.export.spec import FileFactory


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a working folder with an accent and a space, and check that only modules named kept_ stay in the process."""
    folder = tmp_path / "Modèle 1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = set(sys.modules)
    yield folder
    new = [name for name in set(sys.modules) - before if str(tmp_path) in str(getattr(sys.modules[name], "__file__", ""))]
    for name in new:
        del sys.modules[name]
    assert [name for name in new if not name.startswith("kept_")] == []


def write(**files: str) -> None:
    """Write files by path, `__` for `/`."""
    for name, text in files.items():
        path = Path(f"{name.replace('__', '/')}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def value(path: str, name: str = "WIDTH") -> object:
    """Return a value of a file that is loaded as a factory's is."""
    before = list(sys.path)
    with usercode.scope_of_file(Path(path)) as scope:
        result: object = getattr(scope.import_file(Path(path), "etfarm_model"), name)
    assert sys.path == before
    return result


def module_value(module: str, name: str = "WIDTH") -> object:
    """Return a value of a module that is loaded as a factory's is."""
    with usercode.scope_of_module(module):
        result: object = getattr(importlib.import_module(module), name)
        return result


@pytest.mark.parametrize(
    ("imported", "helper"),
    [
        ("from helper import WIDTH", "helper"),
        ("from parts.helper import WIDTH", "parts__helper"),
        ("import parts.deep.helper\nWIDTH = parts.deep.helper.WIDTH", "parts__deep__helper"),
        ("from statistics import WIDTH", "statistics"),
        ("import importlib\nWIDTH = importlib.import_module('helper').WIDTH", "helper"),
        ("def late():\n    from helper import WIDTH\n    return WIDTH\nWIDTH = late()", "helper"),
    ],
)
@pytest.mark.parametrize("is_package", [False, True])
def test_each_file_gets_the_helper_of_its_own_folder(imported: str, helper: str, is_package: bool) -> None:
    for side, width in (("base", 4), ("candidate", 512)):
        write(**{f"{side}__model": imported, f"{side}__{helper}": f"WIDTH = {width}"})
        if is_package and helper.startswith("parts"):
            for folder in Path(side).rglob("parts/**/"):
                (folder / "__init__.py").write_text("")
    assert [value(f"{side}/model.py") for side in ("base", "candidate", "base")] == [4, 512, 4]
    assert statistics.mean([1, 3]) == 2 and sys.modules["statistics"] is statistics


def test_relative_imports_of_a_package_are_loaded_again_after_an_edit() -> None:
    write(kept_pkg__model="from .parts import WIDTH\nfrom . import parts", kept_pkg__parts="WIDTH = 4")
    Path("kept_pkg/__init__.py").write_text("")
    assert module_value("kept_pkg.model") == 4
    write(kept_pkg__parts="WIDTH = 5")
    assert module_value("kept_pkg.model") == 5


def test_a_module_beside_the_package_is_loaded_again_unless_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "kept_count", 0, raising=False)
    write(nets__model="from common import WIDTH", common="WIDTH = 4")
    assert module_value("nets.model") == 4
    write(common="WIDTH = 5")
    assert module_value("nets.model") == 5
    installed = Path("site-packages").resolve()
    (installed / "kept_nets").mkdir(parents=True)
    (installed / "kept_nets" / "model.py").write_text("from kept_common import WIDTH")
    (installed / "kept_common.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(str(installed))
    assert [module_value("kept_nets.model") for _ in range(2)] == [1, 1]


def test_a_scope_that_is_entered_again_has_the_modules_that_it_loaded() -> None:
    late = "def late():\n    from helper import WIDTH\n    import parts.deep as deep\n    return WIDTH + deep.WIDTH, deep\n"
    scopes = []
    for side, width in (("base", 4), ("candidate", 512)):
        write(**{f"{side}__model": late, f"{side}__helper": f"WIDTH = {width}", f"{side}__parts__deep": "WIDTH = 1"})
        with usercode.scope_of_file(Path(side, "model.py")) as scope:
            scopes.append((scope, scope.import_file(Path(side, "model.py"), "etfarm_model")))
    before = dict(sys.modules), list(sys.path)
    loaded = []
    for scope, module in [*scopes, *scopes]:
        with scope, scope:
            assert sys.modules["etfarm_model_model"] is module
            loaded.append(module.late())
        assert (dict(sys.modules), sys.path) == before
    assert [width for width, _ in loaded] == [5, 513, 5, 513]
    assert loaded[0][1] is loaded[2][1] is not loaded[1][1] and loaded[1][1] is loaded[3][1]
    assert [file.path for file in scopes[1][0].sources] == ["helper.py", "model.py", "parts/deep.py"]


def test_an_edit_of_equal_size_and_time_is_loaded_although_a_compiled_file_exists() -> None:
    write(model="from helper import WIDTH", helper="WIDTH = 4")
    times = Path("helper.py").stat()
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    importlib.import_module("helper")  # writes __pycache__
    sys.path.remove(str(Path.cwd()))
    own = sys.modules["helper"]
    write(helper="WIDTH = 5")
    os.utime("helper.py", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert value("model.py") == 5
    assert sys.modules.pop("helper") is own and own.WIDTH == 4


def test_the_users_own_modules_are_back_afterwards_with_the_attributes_of_their_packages() -> None:
    write(model="from pkg import helper\nWIDTH = helper.WIDTH", pkg__helper="WIDTH = 4")
    Path("pkg/__init__.py").write_text("")
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    own = importlib.import_module("pkg.helper")
    sys.path.remove(str(Path.cwd()))
    write(pkg__helper="WIDTH = 5")
    assert value("model.py") == 5
    assert sys.modules["pkg.helper"] is own is sys.modules["pkg"].helper and own.WIDTH == 4
    del sys.modules["pkg.helper"], sys.modules["pkg"]


def test_a_helper_of_another_folder_does_not_stand_in_for_the_factorys() -> None:
    write(helper="WIDTH = 4", parts__helper="WIDTH = 4", candidate__helper="WIDTH = 512", candidate__parts__helper="WIDTH = 512")
    write(candidate__model="from helper import WIDTH\nfrom parts.helper import WIDTH as W\nWIDTH += W")
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    own = {name: importlib.import_module(name) for name in ("helper", "parts", "parts.helper")}
    assert value("candidate/model.py") == 1024
    sys.path.remove(str(Path.cwd()))
    assert {name: sys.modules.pop(name) for name in own} == own


COUNTED = "import sys\nsys.kept_count = getattr(sys, 'kept_count', 0) + 1\nWIDTH = sys.kept_count\n"


@pytest.mark.parametrize("folder", ["venv/lib/python3.11/site-packages", "venv/lib/python3/dist-packages", "../outside"])
def test_installed_modules_and_those_elsewhere_are_shared(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "kept_count", 0, raising=False)
    Path(folder).mkdir(parents=True)
    (Path(folder) / "kept_shared.py").write_text(COUNTED)
    write(model="from kept_shared import WIDTH")
    monkeypatch.syspath_prepend(str(Path(folder).resolve()))
    assert [value("model.py") for _ in range(3)] == [1, 1, 1]


def test_an_installed_factory_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "kept_count", 0, raising=False)
    folder = Path("site-packages")
    folder.mkdir()
    (folder / "kept_net.py").write_text(COUNTED)
    assert [value("site-packages/kept_net.py") for _ in range(2)] == [1, 1]
    monkeypatch.syspath_prepend(str(folder.resolve()))
    assert [module_value("kept_net") for _ in range(2)] == [2, 2]
    del sys.modules["etfarm_model_kept_net"]


def test_folders_that_a_factory_adds_to_the_path_are_not_there_for_the_next() -> None:
    for side, width in (("base", 4), ("candidate", 512)):
        code = f"import os, sys\nsys.path.insert(0, os.path.abspath({side + '_lib'!r}))\nfrom common import WIDTH\n"
        write(**{f"{side}_lib__common": f"WIDTH = {width}", f"{side}__model": code})
    assert [value(f"{side}/model.py") for side in ("base", "candidate")] == [4, 512]


def test_links_lead_to_the_helper_beside_them_and_to_the_one_of_their_target() -> None:
    write(shared__model="from helper import WIDTH\nfrom other import HEIGHT", shared__other="HEIGHT = 1")
    for side, width in (("base", 4), ("candidate", 512)):
        write(**{f"{side}__helper": f"WIDTH = {width}"})
        Path(side, "model.py").symlink_to("../shared/model.py")
    Path("current").symlink_to("base")
    assert [value(f"{side}/model.py") for side in ("base", "candidate", "current")] == [4, 512, 4]


def test_the_hashes_are_those_of_what_was_executed_below_the_root() -> None:
    text = "from pathlib import Path\nWIDTH = 4\nPath(__file__).write_text('WIDTH = 9')\n"
    write(
        model="import json\nfrom parts.helper import WIDTH\n\ndef late():\n    import é\n",
        parts__helper=text,
        unused="WIDTH = 1",
        é="",
    )
    path = Path("model.py")
    with usercode.scope_of_file(path) as scope:
        module = scope.import_file(path, "etfarm_model")
        assert [file.path for file in scope.sources] == ["model.py", "parts/helper.py"]
        assert scope.sources[1].sha256 == hashlib.sha256(text.encode()).hexdigest()
        module.late()
        assert [file.path for file in scope.sources] == ["model.py", "parts/helper.py", "é.py"]


def test_files_are_relative_to_the_folder_that_has_the_package_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usercode, "MAX_SOURCES", 3)
    write(
        net__deep__model="import sibling\nfrom net import a, b, c\nWIDTH = a.W", net__a="W = 1", net__b="", net__c="", sibling=""
    )
    with usercode.scope_of_module("net.deep.model") as scope:
        importlib.import_module("net.deep.model")
        first = scope.sources
    assert [file.path for file in first] == ["net/a.py", "net/b.py", "and 3 more files"]
    write(net__c="W = 2")
    with usercode.scope_of_module("net.deep.model") as scope:
        importlib.import_module("net.deep.model")
    assert scope.sources[2] != first[2]


def test_a_file_that_starts_a_job_while_it_is_loaded_is_refused() -> None:
    write(script="from pathlib import Path\nfrom etfarm.client.export.factory import scope_of\n"
          "from etfarm.client.export.spec import FileFactory\nscope_of(FileFactory(Path('script.py'), 'make'))\n")  # fmt: skip
    with pytest.raises(FactoryFailed, match="__main__"), usercode.scope_of_file(Path("script.py")) as scope:
        scope.import_file(Path("script.py"), "etfarm_model")
    assert scope_of(FileFactory(Path("script.py"), "make")).must_be_alone is False


def test_stack_traces_show_the_lines_that_were_executed() -> None:
    import linecache

    write(model="WIDTH = 4\n")
    with usercode.scope_of_file(Path("model.py")) as scope:
        module = scope.import_file(Path("model.py"), "etfarm_model")
        write(model="\n\nWIDTH = 5\n")
        assert linecache.getline(module.__file__, 1) == "WIDTH = 4\n"
    assert linecache.getline(str(Path("model.py").absolute()), 3) == "WIDTH = 5\n"
