"""The command `etfarm bundle build`, which compiles the C++ runner against ExecuTorch's wheel and packs all it needs.

It needs no CMake and no torch, only g++, the libraries and headers in the wheel, and Python's standard library. Equal inputs
produce equal bytes.

Working folders are created beside the output, and deleted with the build, or by the next build if it was killed. The wheel
for another architecture is fetched once with pip and kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import gzip
import io
import json
import lzma
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from etfarm.device_agents.native import stand_ins
from etfarm.device_agents.native.toolchain import (
    CUSTOM_OPERATORS,
    EXECUTORCH,
    EXECUTORCH_LIBRARIES,
    LOADERS,
    SYSTEM_LIBRARIES,
    Compiler,
    ExecutorchMissing,
    ExecutorchPackage,
)
from etfarm.device_agents.runners.bundle import CONFINE, Bundle
from etfarm.device_agents.runners.emulator import DEFAULT_CPUS, Emulator, EmulatorMissing
from etfarm.wire import digest
from etfarm.wire.bundles import MANIFEST_NAME, BundledFile, BundleManifest
from etfarm.wire.errors import UserError, error_for

SOURCES: Final = Path(__file__).parent
ENTRY: Final = "etfarm-runner"
_FLAGS: Final = (
    "-std=c++17", "-O2", "-fPIE", "-Wall", "-Wextra",
    # The c10 headers in the wheel would include a file that only a build of PyTorch generates.
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    # These change the layout and the inline functions of classes shared with the wheel's libraries.
    "-DET_EVENT_TRACER_ENABLED", "-DET_USE_THREADPOOL",
)  # fmt: skip
_LINK_FLAGS: Final = (
    # Nothing refers to the kernel and backend libraries, which only register themselves, yet they must be loaded.
    "-pie", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-Wl,--build-id=none", "-s",
    # The custom operators refer to functions of torch that are never called.
    "-Wl,--allow-shlib-undefined",
)  # fmt: skip
_OPTIONS: Final = (CONFINE,)
_PROBE_SECONDS: Final = 30

Say = Callable[[str], None]
_PREFIX: Final = ".etfarm-bundle-"
_TRIES: Final = 5
"""Number of tries to empty a folder, into which a compiler that still runs may put a file."""
_OPEN: Final[set[Path]] = set()
"""Folders of builds in this process."""
_TAGS: Final = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
"""Tags of the same wheel for any Python: equal inputs produce equal bundles, which contain nothing of Python."""


def source_digest() -> str:
    """Return the digest of the runner's sources and of how they are compiled: equal for equal behaviour."""
    sources = {path.name: digest.of_file(path) for path in [*_sources("*.cpp"), *_sources("*.h"), stand_ins.SOURCE]}
    flags = [*_FLAGS, *_LINK_FLAGS, *stand_ins.FLAGS]
    return digest.of_value({"sources": sources, "flags": flags, "libraries": [*EXECUTORCH_LIBRARIES, CUSTOM_OPERATORS]})


def build_bundle(
    arch: str,
    out: Path,
    *,
    executorch: Path | None = None,
    say: Say = lambda line: None,
    jobs: int | None = None,
) -> BundleManifest:
    """Write the bundle for `arch` to `out`, whole or not at all. Blocks for some seconds.

    Args:
        arch: `x86_64` or `aarch64`.
        out: ends in `.tar.gz`, `.tgz` or `.tar.xz`, which selects the compression (xz: smaller by half, slower). Its folder must
            exist.
        executorch: an `executorch` package folder, a folder that contains one, or its wheel. By default the installed one, or, if
            that is for another architecture, the wheel of its version, which pip fetches once.
        say: takes a line of progress.
        jobs: number of concurrent compilers; the number of CPUs by default.

    Raises:
        CompilerMissing, CompilerFailed, ExecutorchMissing: the build's prerequisites are missing.
        RUNNER_UNUSABLE: the runner does not start on the architecture that it was built for.
        UserError: `out` cannot be written, or has another ending; there is no `executorch`.
    """
    if arch not in LOADERS:
        raise UserError(f"There is no runner for {arch!r}.", f"Choose one of {', '.join(LOADERS)}.", arch=arch)
    compressor = _compressor(out)
    if executorch is not None and not executorch.exists():
        raise UserError(f"There is no {executorch}.", "Check --executorch.", executorch=executorch)
    if not out.absolute().parent.is_dir():
        raise UserError(f"There is no folder {out.parent}.", "Create it, or choose another -o.", output=out)
    with _scratch(out) as scratch:
        compiler = Compiler.find(arch)
        package = _package(arch, executorch, scratch, say)
        say(f"compiling for {arch} with {Path(compiler.path).name} {compiler.version()}, ExecuTorch {package.version}")
        torch = stand_ins.compile_stand_ins(compiler, package.library(CUSTOM_OPERATORS), scratch / "stand_ins")
        binary = compile_runner(compiler, package, torch, scratch / "objects", jobs=jobs)

        folder = scratch / "bundle"
        folder.mkdir()
        members = {ENTRY: binary, LOADERS[arch]: compiler.system_library(LOADERS[arch])}
        members |= {library: package.library(library) for library in (*EXECUTORCH_LIBRARIES, CUSTOM_OPERATORS)}
        members |= {library: compiler.system_library(library) for library in SYSTEM_LIBRARIES}
        members |= {library.name: library for library in torch}
        stand_ins.require_symbols(members[CUSTOM_OPERATORS], members.values())
        for member, path in members.items():
            shutil.copyfile(path, folder / member)
            # The loader and the runner are started; libraries are only mapped.
            (folder / member).chmod(0o755 if member in (ENTRY, LOADERS[arch]) else 0o644)

        manifest = _probed(arch, package.version, folder)
        say(f"packing {len(members)} files, {sum(file.size for file in manifest.files.values()) / 1e6:.1f} MB")
        _write(out, compressor(pack(folder, manifest)))
    return manifest


def _package(arch: str, executorch: Path | None, scratch: Path, say: Say) -> ExecutorchPackage:
    try:
        return ExecutorchPackage.find(arch, executorch, scratch)
    except ExecutorchMissing:
        if executorch is not None:
            raise
    return ExecutorchPackage.find(arch, fetch_wheel(arch, say=say), scratch)


def compile_runner(
    compiler: Compiler, package: ExecutorchPackage, torch: Sequence[Path], folder: Path, *, jobs: int | None = None
) -> Path:
    """Compile the runner in `folder` and return its executable.

    Args:
        compiler: compiles for the package's architecture.
        package: has the headers and libraries.
        torch: the stand-ins for torch, which the custom operators need.
        folder: where to put the executable; created if missing.
        jobs: number of concurrent compilers; the number of CPUs by default.

    Raises:
        CompilerFailed: the message contains the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    include = package.folder / "include"
    flags = [
        *_FLAGS,
        f'-DETFARM_EXECUTORCH_VERSION="{package.version}"',
        # Paths of this machine must not become part of the program, whose log lines contain __FILE__.
        f"-ffile-prefix-map={SOURCES}=.",
        f"-ffile-prefix-map={include}=include",
        "-isystem", str(include),
        "-isystem", str(include / "executorch" / "runtime" / "core" / "portable_type" / "c10"),
    ]  # fmt: skip

    def compile_one(source: Path) -> str:
        compiler.run([*flags, "-c", str(source), "-o", f"{source.stem}.o"], source.name, folder)
        return f"{source.stem}.o"

    # Start with the largest file: with few CPUs, the last one to start determines the total time.
    sources = sorted(_sources("*.cpp"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        objects = sorted(pool.map(compile_one, sources))
    libraries = [package.library(name) for name in EXECUTORCH_LIBRARIES] + [*torch, package.library(CUSTOM_OPERATORS)]
    linked = [argument for path in libraries for argument in (f"-L{path.parent}", f"-l:{path.name}")]
    compiler.run([*objects, "-o", ENTRY, *_LINK_FLAGS, *linked], "linking", folder)
    return folder / ENTRY


def pack(folder: Path, manifest: BundleManifest) -> bytes:
    """Return the uncompressed tar of a bundle's folder: sorted by name, the manifest first, without times and owners."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        text = json.dumps(manifest.to_json(), indent=1, sort_keys=True).encode() + b"\n"
        _add(tar, MANIFEST_NAME, text, 0o644)
        for name in sorted(manifest.files):
            path = folder / name
            _add(tar, name, path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644)
    return stream.getvalue()


def main(argv: list[str]) -> int:
    """Run the command; `argv` is what follows `bundle build`.

    Raises:
        EtfarmError: as `build_bundle`; the message is for people.
    """
    parser = argparse.ArgumentParser(prog="etfarm bundle build", description="Build a runner bundle for devices.")
    parser.add_argument("--arch", choices=sorted(LOADERS), default=platform.machine(), help="default: this machine's")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("-o", "--output", type=Path, metavar="FILE", help=".tar.gz or .tar.xz")
    mode.add_argument("--source-digest", action="store_true", help="only print the digest of the runner's sources")
    parser.add_argument(
        "--executorch",
        type=Path,
        metavar="DIR|WHEEL",
        help="default: the installed package, or its wheel for --arch, which pip fetches once",
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="end, compilers included, when stdin ends")
    options = parser.parse_args(argv)
    if options.exit_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    if options.source_digest:
        print(source_digest())
        return 0

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    started = time.monotonic()
    manifest = build_bundle(options.arch, options.output, executorch=options.executorch, say=say)
    if manifest.note:
        say(manifest.note)
    size, bundle_digest = options.output.stat().st_size, digest.of_file(options.output)
    say(
        f"{options.output}: {size / 1e6:.1f} MB, sha256 {bundle_digest[:12]}, {len(manifest.operators)} operators, "
        f"backends {', '.join(manifest.backends) or 'unknown'}, {time.monotonic() - started:.1f} s"
    )
    return 0


def _end_with_stdin() -> None:
    """Kill this process group once the other end of stdin is closed."""
    # Not sys.stdin: a thread that holds its lock breaks the interpreter's exit.
    while os.read(0, 4096):
        continue
    delete_own()
    os.killpg(0, signal.SIGKILL)


def _probed(arch: str, version: str, folder: Path) -> BundleManifest:
    """Return the manifest of `folder`, with the properties that its runner reports."""
    files = {path.name: BundledFile(digest.of_file(path), path.stat().st_size) for path in folder.iterdir()}
    manifest = BundleManifest(arch, version, source_digest(), (), (), files, LOADERS[arch], ENTRY, options=_OPTIONS)
    emulator: Sequence[str] = ()
    if arch != platform.machine():
        try:
            emulator = Emulator.find(arch).prefix if arch in DEFAULT_CPUS else ()
        except EmulatorMissing:
            emulator = ()
        if not emulator:
            note = f"Backends and operators are not listed: this machine cannot run programs for {arch}."
            return dataclasses.replace(manifest, note=note)
    try:
        process = subprocess.run(
            Bundle(folder, manifest).command(emulator),
            input=b"hello\nself_test\n", capture_output=True, check=True, timeout=_PROBE_SECONDS, env={"LC_ALL": "C"},
        )  # fmt: skip
        events = [json.loads(line) for line in process.stdout.splitlines()]
        if failed := [event["message"] for event in events if event["event"] == "error"]:
            raise error_for(
                "RUNNER_UNUSABLE", f"The runner for {arch} was built, but fails its self-test: {failed[0]}.", arch=arch
            )
        result = next(event for event in events if event["event"] == "result")
        backends, operators = tuple(result["backends"]), tuple(result["operators"])
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip() or f"exit code {error.returncode}"
        raise error_for("RUNNER_UNUSABLE", f"The runner for {arch} was built, but does not start: {why}", arch=arch) from None
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, StopIteration) as error:
        raise error_for("RUNNER_UNUSABLE", f"The runner for {arch} was built, but does not answer: {error}", arch=arch) from None
    return dataclasses.replace(manifest, backends=backends, operators=operators)


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _compressor(out: Path) -> Callable[[bytes], bytes]:
    if out.name.endswith((".tar.gz", ".tgz")):
        return lambda data: gzip.compress(data, 6, mtime=0)
    if out.name.endswith(".tar.xz"):
        return lambda data: lzma.compress(data, preset=6)
    raise UserError(f"{out.name} does not name a compression.", "Name it *.tar.gz or *.tar.xz.", output=out)


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(out.absolute().parent))
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}.", output=out) from None
        yield folder


def _write(out: Path, data: bytes) -> None:
    """Write next to `out` and rename, so that a process watching for the file never sees a part of it."""
    try:
        partial = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}.", output=out) from None


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Provide an empty folder in `parent`, which is created if missing. Folders that killed builds left there are deleted.

    A folder is locked until its build ends, however it ends, so an unlocked folder is abandoned.

    Raises:
        OSError: `parent` cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Prevents other builds from deleting a folder between its creation and its locking.
        fcntl.flock(parent_fd, fcntl.LOCK_EX)
        _sweep(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent_fd)
    _OPEN.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _OPEN.discard(folder)
        os.close(lock)


def delete_own() -> None:
    """Delete the folders of this process, which is about to be killed."""
    for folder in list(_OPEN):
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is gone meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def wheels_folder() -> Path:
    """Return the folder of fetched wheels: $XDG_CACHE_HOME/etfarm/wheels, else below ~/.cache. It may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "etfarm" / "wheels"


def fetch_wheel(arch: str, folder: Path | None = None, say: Say = lambda line: None) -> Path:
    """Return the wheel for `arch` of the installed ExecuTorch's version, or of the supported version if none is installed.

    Args:
        arch: architecture in the terms of `uname -m`.
        folder: the folder of fetched wheels; `wheels_folder()` by default.
        say: takes a line of progress.

    Raises:
        ExecutorchMissing: pip is missing, or cannot fetch the wheel.
    """
    requirement, folder = _required_version(), folder or wheels_folder()
    pattern = f"executorch-{requirement}-*{arch}.whl"
    if wheels := sorted(folder.glob(pattern)):
        return wheels[0]
    say(f"fetching executorch {requirement} for {arch} with pip, about 20 MB, into {folder}")
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as staging:
            command = [
                sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
                "--retries", "2", "--platform", f"manylinux_2_28_{arch}", *_TAGS, "--dest", staging, f"executorch=={requirement}",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            wheels = sorted(Path(staging).glob(pattern))
            if done.returncode != 0 or not wheels:
                raise ExecutorchMissing(arch, f"pip cannot fetch it ({_reason(done.stderr or done.stdout)})")
            path = folder / wheels[0].name
            shutil.move(wheels[0], path)
    except OSError as error:
        raise ExecutorchMissing(arch, f"it cannot be kept in {folder} ({error.strerror})") from None
    say(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {time.monotonic() - started:.1f} s")
    return path


def _required_version() -> str:
    try:
        return version("executorch").partition("+")[0]
    except PackageNotFoundError:
        return EXECUTORCH


def _reason(output: str) -> str:
    """Return pip's first statement of a reason; the following ones repeat it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # If no index could be reached, the errors list no versions, and a warning states the reason.
    broken = re.findall(r"connection broken by '(\w+).*'", output)
    return (broken or errors or lines[-1:] or ["no output"])[0].rstrip(".")
