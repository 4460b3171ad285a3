"""Runner bundles: built the same from the same, complete in themselves, and refused when damaged."""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from etfarm.device_agents.native import build, stand_ins
from etfarm.device_agents.native.elf_symbols import LibrarySymbols
from etfarm.device_agents.native.toolchain import (
    CUSTOM_OPERATORS,
    LOADERS,
    Compiler,
    CompilerFailed,
    ExecutorchMissing,
    ExecutorchPackage,
)
from etfarm.device_agents.runners.bundle import Bundle, open_folder, unpack
from etfarm.wire.bundles import BundleManifest, NotABundle
from tests.support.runner import runner_archive


def said_by(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit code of `etfarm bundle build`, and what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", "bundle", "build", *arguments],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def repacked(source: Path, target: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Path:
    """`source` with every member given through `change`."""
    with tarfile.open(source) as old, tarfile.open(target, "w:gz") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            changed = change(member.name, file.read())
            if changed is not None:
                info = tarfile.TarInfo(changed[0])
                info.size, info.mode = len(changed[1]), member.mode
                new.addfile(info, io.BytesIO(changed[1]))
    return target


def test_the_bundle_says_what_it_can_run(runner_bundle: Bundle) -> None:
    manifest = runner_bundle.manifest
    assert manifest.executorch == "1.5.1"
    assert manifest.backends == ("XnnpackBackend",)
    assert len(manifest.operators) > 200
    assert manifest.source_digest == build.source_digest()
    assert manifest.note == ""
    assert BundleManifest.parse(json.dumps(manifest.to_json())) == manifest


def test_the_bundle_needs_nothing_of_the_system(runner_bundle: Bundle) -> None:
    loader, *rest = runner_bundle.command()
    listed = subprocess.run([loader, "--list", *rest], capture_output=True, text=True, check=True).stdout
    paths = [line.split("=>")[1].split()[0] for line in listed.splitlines() if "=>" in line]
    assert paths
    assert {Path(path).parent for path in paths} == {runner_bundle.folder}


def test_no_path_of_the_building_machine_is_in_the_runner(runner_bundle: Bundle) -> None:
    binary = (runner_bundle.folder / build.ENTRY).read_bytes()
    assert str(build.SOURCES).encode() not in binary
    assert b"site-packages" not in binary


def test_packing_twice_gives_the_same_bytes(runner_bundle: Bundle) -> None:
    folder, manifest = runner_bundle.folder, runner_bundle.manifest
    assert build.pack(folder, manifest) == build.pack(folder, replace(manifest, files=dict(reversed(manifest.files.items()))))


@pytest.mark.slow(reason="builds the runner twice")
def test_compiling_twice_gives_the_same_runner(runner_bundle: Bundle, tmp_path: Path) -> None:
    compiler = Compiler.find(runner_bundle.manifest.arch)
    package = ExecutorchPackage.find(runner_bundle.manifest.arch, None, tmp_path)
    torch = stand_ins.compile_stand_ins(compiler, package.library(CUSTOM_OPERATORS), tmp_path / "stand-ins")
    again = build.compile_runner(compiler, package, torch, tmp_path / "elsewhere")
    for file in (again, *torch):
        assert file.read_bytes() == (runner_bundle.folder / file.name).read_bytes(), file.name


def test_a_bundle_without_a_symbol_of_the_custom_operators_is_refused(runner_bundle: Bundle) -> None:
    operators = runner_bundle.folder / CUSTOM_OPERATORS
    libraries = [runner_bundle.folder / name for name in runner_bundle.manifest.files]
    stand_ins.require_symbols(operators, libraries)
    lacking = [path for path in libraries if path.name != "libtorch_cpu.so"]
    with pytest.raises(CompilerFailed, match=r"no library of the bundle defines \S*UndefinedTensorImpl\S*; add it to torch.cpp"):
        stand_ins.require_symbols(operators, lacking)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("a.cpp: In function 'x':\na.cpp:3:1: error: expected ';'\n   3 | }\n     | ^\n", "a.cpp:3:1: error: expected ';'"),
        ("ld: a.o: in function `x':\na.cpp:(.text+0x9): undefined reference to `f()'\ncollect2: error: ld failed\n",
         "undefined reference to `f()'"),
        ("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n", "Killed signal"),
        ("ld: b.o: multiple definition of `f()'; a.o: first here\ncollect2: error: ld failed\n", "multiple definition of"),
        ("note: killed threads are none\na.cpp:3:1: error: expected ';'\n", "a.cpp:3:1: error: expected ';'"),
        ("something else\n", "something else"),
    ],
)  # fmt: skip
def test_the_message_of_a_failed_compiler_is_the_line_with_the_reason(output: str, why: str) -> None:
    error = CompilerFailed("compiling a.cpp", output)
    assert why in error.message and "\n" not in error.message and error.metadata["output"] == output


@pytest.mark.remedy("COMPILER_FAILED")
def test_what_a_compiler_lacks_is_named_and_it_succeeds_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text('#include "missing.h"\nint main() { return zero; }\n')
    compiler = Compiler.find(platform.machine())
    with pytest.raises(CompilerFailed, match=r"a\.cpp:1:10: fatal error: missing\.h"):
        compiler.run(["a.cpp", "-o", "a"], "compiling a.cpp", tmp_path)
    (tmp_path / "missing.h").write_text("const int zero = 0;\n")
    compiler.run(["a.cpp", "-o", "a"], "compiling a.cpp", tmp_path)
    subprocess.run([tmp_path / "a"], check=True)


def test_functions_that_are_bound_when_they_are_called_are_not_required(runner_bundle: Bundle) -> None:
    symbols = LibrarySymbols.read(runner_bundle.folder / CUSTOM_OPERATORS)
    assert "libtorch_cpu.so" in symbols.needed
    assert "sgemm_" not in symbols.required  # a function that another library of the bundle provides
    assert "sgemm_" in LibrarySymbols.read(runner_bundle.folder / "libexecutorch_kernels_optimized.so").defined


@pytest.mark.parametrize("content", [b"", b"MZ", b"\x7fELF\x02\x01" + bytes(10), b"\x7fELF\x02\x01" + b"\xff" * 80])
def test_what_is_no_library_has_no_symbols(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.so").write_bytes(content)
    with pytest.raises(ValueError, match="ELF"):
        LibrarySymbols.read(tmp_path / "x.so")


def test_building_imports_neither_torch_nor_executorch() -> None:
    code = (
        "import sys; from pathlib import Path; import etfarm.device_agents.native.build;"
        "from etfarm.device_agents.native.toolchain import ExecutorchPackage, Compiler;"
        "import platform; ExecutorchPackage.find(platform.machine(), None, Path('.'));"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'executorch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arch", sorted(LOADERS))
def test_a_missing_compiler_is_one_sentence_with_its_package(arch: str, tmp_path: Path) -> None:
    code, text = said_by("--arch", arch, "-o", str(tmp_path / "b.tar.gz"), PATH=str(tmp_path))
    (line,) = text.splitlines()
    assert code == 1
    package = {"x86_64": "g++", "aarch64": "g++-aarch64-linux-gnu"}[arch]
    assert line.startswith(f"etfarm: Building a runner for {arch} needs the compiler")
    assert f"`apt-get install {package}`" in line
    assert not (tmp_path / "b.tar.gz").exists()


@pytest.mark.remedy("EXECUTORCH_MISSING")
def test_a_foreign_wheel_says_where_to_get_the_right_one(runner_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.whl").write_bytes(b"PK no")
    for values in ("empty", "no.whl"):
        with pytest.raises(ExecutorchMissing) as refused:
            build.build_bundle(runner_bundle.manifest.arch, tmp_path / "b.tar.gz", executorch=tmp_path / values)
        assert "pip download --no-deps" in refused.value.remedy
    arch, wheel = runner_bundle.manifest.arch, tmp_path / "executorch.whl"
    installed = ExecutorchPackage.find(arch, None, tmp_path).folder
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (*installed.glob("lib/*"), *installed.rglob(CUSTOM_OPERATORS), installed / "version.py"):
            archive.write(path, path.relative_to(installed.parent))
    assert ExecutorchPackage.find(arch, wheel, tmp_path).version == runner_bundle.manifest.executorch


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "{here}/bundle.zip"], "bundle.zip does not name a compression. Name it *.tar.gz or *.tar.xz."),
        (["-o", "{here}/no/b.tar.gz"], "There is no folder {here}/no. Create it, or choose another -o."),
        (["-o", "{here}/b.tar.gz", "--executorch", "{here}/no.whl"], "There is no {here}/no.whl. Check --executorch."),
    ],
)
def test_a_wrong_file_is_a_usage_error(tmp_path: Path, arguments: list[str], expected: str) -> None:
    code, line = said_by(*(word.format(here=tmp_path) for word in arguments))
    assert (code, line) == (2, f"etfarm: {expected.format(here=tmp_path)}\n")
    assert list(tmp_path.iterdir()) == []


def _flip_a_byte(folder: Path) -> None:
    library = folder / "libexecutorch.so"
    library.write_bytes(library.read_bytes()[:-1] + b"x")


def _lose_a_file(folder: Path) -> None:
    (folder / "libc.so.6").unlink()


def _empty_the_manifest(folder: Path) -> None:
    (folder / "bundle.json").write_bytes(b"")


def _put_a_folder_in_place_of_a_file(folder: Path) -> None:
    _lose_a_file(folder)
    (folder / "libc.so.6").mkdir()


def test_unpacking_again_verifies_what_is_there(tmp_path: Path) -> None:
    first = unpack(runner_archive(), tmp_path / "bundle")
    before = first.folder.stat().st_ino
    assert unpack(runner_archive(), tmp_path / "bundle") == first
    assert first.folder.stat().st_ino == before
    _flip_a_byte(first.folder)
    with pytest.raises(NotABundle, match=r"'libexecutorch\.so' is damaged"):
        open_folder(first.folder)


@pytest.mark.parametrize("damage", [_flip_a_byte, _lose_a_file, _empty_the_manifest, _put_a_folder_in_place_of_a_file])
def test_what_was_damaged_since_it_was_unpacked_is_unpacked_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    first = unpack(runner_archive(), tmp_path / "bundle")
    damage(first.folder)
    assert unpack(runner_archive(), tmp_path / "bundle") == first
    assert open_folder(first.folder) == first
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_full_disk_is_not_the_bundles_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("etfarm.device_agents.runners.bundle.shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(runner_archive(), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


DAMAGES: dict[str, Callable[[str, bytes], tuple[str, bytes] | None]] = {
    "is damaged": lambda name, data: (name, data[:-1] + b"?" if name == build.ENTRY else data),
    "are not those": lambda name, data: None if name == "libc.so.6" else (name, data),
    "not a regular file": lambda name, data: (f"../{name}" if name == "libc.so.6" else name, data),
    "cannot be read": lambda name, data: (name, b"{}" if name == "bundle.json" else data),
    "its schema is": lambda name, data: (name, data.replace(b"etfarm.bundle/1", b"etfarm.bundle/9")),
}


@pytest.mark.slow(reason="packs and unpacks the runner for each damage")
@pytest.mark.parametrize("complaint", sorted(DAMAGES))
def test_a_damaged_bundle_is_refused_and_leaves_nothing(complaint: str, tmp_path: Path) -> None:
    bad = repacked(runner_archive(), tmp_path / "bad.tar.gz", DAMAGES[complaint])
    with pytest.raises(NotABundle, match=complaint):
        unpack(bad, tmp_path / "folder" / "bundle")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("keep", [0, 100, 1_000_000])
def test_a_cut_archive_is_refused(keep: int, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(runner_archive().read_bytes()[:keep])
    with pytest.raises(NotABundle):
        unpack(cut, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_links_and_repeated_names_are_refused(tmp_path: Path) -> None:
    for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("device", tarfile.CHRTYPE)):
        with tarfile.open(tmp_path / "odd.tar.gz", "w:gz") as tar:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        with pytest.raises(NotABundle, match="not a regular file"):
            unpack(tmp_path / "odd.tar.gz", tmp_path / "bundle")
    with tarfile.open(tmp_path / "twice.tar.gz", "w:gz") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("same"))
    with pytest.raises(NotABundle, match="twice"):
        unpack(tmp_path / "twice.tar.gz", tmp_path / "bundle")
