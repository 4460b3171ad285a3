"""What a bundle is made of: the compiler for an architecture, and the ExecuTorch package whose libraries it links."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.wire import elf
from etfarm.wire.errors import Kind, UserError

LOADERS: Final = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
"""The dynamic loader's file by architecture; its keys are the architectures that bundles exist for."""
EXECUTORCH: Final = "1.5.1"
"""The version that etfarm is made for."""
_PACKAGES: Final = {"x86_64": "g++", "aarch64": "g++-aarch64-linux-gnu"}
SYSTEM_LIBRARIES: Final = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1")
"""Beside the loader, everything that the runner and ExecuTorch's libraries need of a system."""
EXECUTORCH_LIBRARIES: Final = tuple(
    f"libexecutorch{part}.so"
    for part in ("", "_kernels_optimized", "_kernels_quantized", "_backend_xnnpack", "_etdump", "_threadpool")
)
"""Not among them: OpenVINO and QNN, which open runtimes that a bundle does not carry."""


class CompilerMissing(UserError):
    """No C++ compiler for the architecture."""

    reason = "COMPILER_MISSING"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, arch: str, compiler: str) -> None:
        super().__init__(
            f"Building a runner for {arch} needs the compiler {compiler}, which is not installed.",
            f"Install it, for example with `apt-get install {_PACKAGES[arch]}`.",
            arch=arch,
            compiler=compiler,
        )


class CompilerFailed(UserError):
    """The compiler is there, and what it was asked for does not work."""

    reason = "COMPILER_FAILED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, what: str, output: str) -> None:
        # The end of the output is where g++ and ld say why.
        super().__init__(f"The compiler failed at {what}: {output.strip()[-2000:]}", what=what, output=output)


class ExecutorchMissing(UserError):
    """No ExecuTorch package with a native runtime for the architecture."""

    reason = "EXECUTORCH_MISSING"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, arch: str, why: str) -> None:
        tag = f"manylinux_2_28_{arch}"
        super().__init__(
            f"Building a runner for {arch} needs ExecuTorch's wheel: {why}.",
            f"Get it with `pip download --no-deps --only-binary=:all: --platform {tag} executorch=={EXECUTORCH}` and name the "
            "file with --executorch.",
            arch=arch,
            why=why,
        )


@dataclass(frozen=True)
class Compiler:
    """A g++ that makes programs for `arch`."""

    path: str
    arch: str

    @classmethod
    def find(cls, arch: str) -> Compiler:
        """The cross compiler's full name first, then plain g++ where that is native.

        Raises:
            CompilerMissing: neither is there.
        """
        for name in (f"{arch}-linux-gnu-g++", "g++", "c++"):
            path = shutil.which(name)
            if path and _run([path, "-dumpmachine"], "asking for its target").split("-")[0] == arch:
                return cls(path, arch)
        raise CompilerMissing(arch, f"{arch}-linux-gnu-g++")

    def version(self) -> str:
        """Such as `12.2.0`; part of what a bundle is made from."""
        return _run([self.path, "-dumpfullversion"], "asking for its version").strip()

    def system_library(self, name: str) -> Path:
        """A library of the compiler's own sysroot: the one that the runner is linked against.

        Raises:
            CompilerFailed: there is none.
        """
        found = _run([self.path, f"-print-file-name={name}"], f"looking for {name}").strip()
        candidates = [Path(found)] if "/" in found else []
        # Debian keeps the loader of a native compiler outside of what -print-file-name searches.
        candidates += [Path(root) / name for root in ("/lib64", "/lib", f"/lib/{self.arch}-linux-gnu")]
        candidates += [Path(f"/usr/{self.arch}-linux-gnu/lib") / name]
        for candidate in candidates:
            if candidate.is_file() and elf_arch(candidate) == self.arch:
                return candidate.resolve()
        raise CompilerFailed(f"finding {name}", f"not in {', '.join(str(c) for c in candidates)}")

    def run(self, arguments: list[str], what: str, folder: Path) -> None:
        """One call of the compiler in `folder`.

        Raises:
            CompilerFailed: it ended with an error; its output is in the message.
        """
        _run([self.path, *arguments], what, folder)


@dataclass(frozen=True)
class ExecutorchPackage:
    """An `executorch` package folder with `lib/` and `include/`, for `arch`."""

    folder: Path
    version: str
    """Without its local part: `1.5.1` of `1.5.1+cpu`."""

    @classmethod
    def find(cls, arch: str, given: Path | None, scratch: Path) -> ExecutorchPackage:
        """The package that `given` names (a folder or a wheel), else the installed one. Nothing of it is imported.

        A wheel is unpacked into `scratch`, as far as it is needed.

        Raises:
            ExecutorchMissing: there is none, or it is for another architecture.
        """
        if given is None:
            spec = importlib.util.find_spec("executorch")
            folders = list(spec.submodule_search_locations or []) if spec else []
            if not folders:
                raise ExecutorchMissing(arch, "the package is not installed here")
            folder = Path(folders[0])
        elif given.is_file():
            folder = _unpacked(arch, given, scratch)
        else:
            folder = given if (given / "version.py").is_file() else given / "executorch"
        return cls._checked(arch, folder)

    @classmethod
    def _checked(cls, arch: str, folder: Path) -> ExecutorchPackage:
        for name in EXECUTORCH_LIBRARIES:
            if not (folder / "lib" / name).is_file():
                raise ExecutorchMissing(arch, f"{folder} has no lib/{name}")
        found = elf_arch(folder / "lib" / EXECUTORCH_LIBRARIES[0])
        if found != arch:
            raise ExecutorchMissing(arch, f"the one in {folder} is for {found or 'another architecture'}")
        match = re.search(r"""^__version__ = ['"]([^'"+]+)""", (folder / "version.py").read_text(), re.MULTILINE)
        if not match:
            raise ExecutorchMissing(arch, f"{folder}/version.py tells no version")
        return cls(folder, match[1])


def elf_arch(path: Path) -> str | None:
    """The architecture of an ELF file, where it is one that we know."""
    with path.open("rb") as file:
        return elf.arch_of(file.read(elf.HEAD_BYTES))


def _unpacked(arch: str, wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [
                name
                for name in archive.namelist()
                if name.startswith(("executorch/lib/libexecutorch", "executorch/include/")) or name == "executorch/version.py"
            ]
            archive.extractall(scratch, wanted)  # refuses names that leave `scratch`
    except (OSError, zipfile.BadZipFile) as error:
        raise ExecutorchMissing(arch, f"{wheel} cannot be read ({error})") from None
    if not (scratch / "executorch" / "version.py").is_file():
        raise ExecutorchMissing(arch, f"{wheel} is no wheel of executorch")
    return scratch / "executorch"


def _run(command: list[str], what: str, folder: Path | None = None) -> str:
    # What a compiler that is killed leaves of its own goes with the folder.
    environment = os.environ | ({"TMPDIR": str(folder)} if folder else {})
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerFailed(what, str(error)) from None
    if done.returncode != 0:
        raise CompilerFailed(what, done.stderr or done.stdout or f"exit code {done.returncode}")
    return done.stdout
