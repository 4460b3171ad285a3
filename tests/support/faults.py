"""Programs that misbehave on the real runner: its bundle with kernels of `faults.cpp` beside its own."""

from __future__ import annotations

import dataclasses
import gzip
import platform
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from etfarm.device_agents.native.build import pack
from etfarm.device_agents.native.toolchain import Compiler, ExecutorchPackage
from etfarm.device_agents.runners.bundle import unpack
from etfarm.wire import digest
from etfarm.wire.bundles import BundledFile
from tests.support.emulation import aarch64_archive, aarch64_wheel
from tests.support.programs import cache_folder, locked, program
from tests.support.runner import runner_archive

SOURCE: Final = Path(__file__).with_suffix(".cpp")
_REPLACED: Final = "libexecutorch_kernels_quantized.so"
_MOVED: Final = "libquantized.so"


def faulty_program(fault: str) -> bytes:
    """The program `add` with the kernel `evil::FAULT`, of three letters: see faults.cpp."""
    return program("add").bytes.replace(b"aten::add", f"evil::{fault}".encode())


def faulty_archive(source: Path = SOURCE, arch: str = platform.machine()) -> Path:
    """The runner's bundle with the kernels of `source`; several test runs at once build it one time."""
    runner = runner_archive() if arch == platform.machine() else aarch64_archive()
    made_of = digest.of_value([digest.of_file(path) for path in (runner, source, Path(__file__))])
    archive = cache_folder() / f"{source.stem}-{made_of[:16]}.tar.gz"
    with locked("faulty"):
        if not archive.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                _build(Path(folder), archive, runner, source, arch)
    return archive


def _build(folder: Path, archive: Path, runner: Path, source: Path, arch: str) -> None:
    bundle = unpack(runner, folder / "bundle")
    compiler = Compiler.find(arch)
    package = ExecutorchPackage.find(arch, None if arch == platform.machine() else aarch64_wheel(), folder)
    include = package.folder / "include"
    # Something to link with that has the name which the quantized kernels get.
    shared = ["-shared", "-fPIC", "-s", f"-Wl,-soname,{_MOVED}", "-x", "c++", "/dev/null", "-o", _MOVED]
    compiler.run(shared, "the name", folder)
    compiler.run(
        ["-std=c++17", "-O1", "-shared", "-fPIC", "-s", "-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED",
         "-isystem", str(include), "-isystem", str(include / "executorch/runtime/core/portable_type/c10"),
         str(source), "-o", _REPLACED, f"-Wl,-soname,{_REPLACED}", "-Wl,--no-as-needed", f"-L{package.folder / 'lib'}",
         "-lexecutorch", str(folder / _MOVED)],
        source.name, folder,
    )  # fmt: skip
    shutil.move(bundle.folder / _REPLACED, bundle.folder / _MOVED)
    shutil.move(folder / _REPLACED, bundle.folder / _REPLACED)
    (bundle.folder / "bundle.json").unlink()
    members = sorted(bundle.folder.iterdir())
    files = {path.name: BundledFile(digest.of_file(path), path.stat().st_size) for path in members}
    operators = {*bundle.manifest.operators, *re.findall(r'"(evil::\w+\.out)"', source.read_text())}
    manifest = dataclasses.replace(bundle.manifest, files=files, operators=tuple(sorted(operators)))
    partial = archive.with_name(f".{archive.name}")
    partial.write_bytes(gzip.compress(pack(bundle.folder, manifest), 1, mtime=0))
    partial.replace(archive)
