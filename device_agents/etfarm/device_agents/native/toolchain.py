"""The inputs of a bundle: the compiler for an architecture, and the ExecuTorch package whose libraries it links."""

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
"""The dynamic loader's file by architecture; the keys are all architectures of bundles."""
EXECUTORCH: Final = "1.5.1"
"""The version of ExecuTorch that etfarm supports."""
_PACKAGES: Final = {"x86_64": "g++", "aarch64": "g++-aarch64-linux-gnu"}
SYSTEM_LIBRARIES: Final = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1")
"""All system libraries that the runner and ExecuTorch's libraries need, beside the loader."""
EXECUTORCH_LIBRARIES: Final = tuple(
    f"libexecutorch{part}.so"
    for part in ("", "_kernels_optimized", "_kernels_quantized", "_backend_xnnpack", "_etdump", "_threadpool")
)
"""ExecuTorch's libraries in a bundle; without OpenVINO and QNN, which open runtimes that a bundle does not contain."""
CUSTOM_OPERATORS: Final = "libcustom_ops_aot_lib.so"
"""ExecuTorch's library of the operators of language models, such as `llama::custom_sdpa`. It is made for a process with torch:
see native/stand_ins."""
_CUSTOM_OPERATORS_FOLDER: Final = "extension/llm/custom_ops"


class CompilerMissing(UserError):
    """A missing C++ compiler for the architecture."""

    reason = "COMPILER_MISSING"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, arch: str, compiler: str) -> None:
        super().__init__(
            f"Building a runner for {arch} needs the compiler {compiler}, which is not installed.",
            f"Install it, for example with `apt-get install {_PACKAGES[arch]}`.",
            arch=arch,
            compiler=compiler,
        )


_WHY: Final = (
    re.compile(r"\berror: "), re.compile(r"undefined reference|multiple definition|cannot find|relocation "),
    re.compile(r"[Kk]illed"),
)  # fmt: skip
"""What the line that states the reason has in the output of g++ or ld, the surest first; those after it show code."""
_CONSEQUENCE: Final = re.compile(r"collect2: error|linker command failed|compilation terminated")
"""Lines that only say that it failed."""


class CompilerFailed(UserError):
    """A compiler that is installed but fails."""

    reason = "COMPILER_FAILED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, what: str, output: str) -> None:
        lines = [line for line in output.strip().splitlines() if not _CONSEQUENCE.search(line)] or [output]
        why = next((line for pattern in _WHY for line in lines if pattern.search(line)), lines[-1])
        super().__init__(f"The compiler failed at {what}: {why.strip()[:2000]}", what=what, output=output[-20_000:])


class ExecutorchMissing(UserError):
    """A missing ExecuTorch package with a native runtime for the architecture."""

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
    """A g++ that compiles programs for `arch`."""

    path: str
    arch: str

    @classmethod
    def find(cls, arch: str) -> Compiler:
        """Find the compiler: the cross compiler's full name first, then plain g++ if it is native.

        Raises:
            CompilerMissing: neither is installed.
        """
        for name in (f"{arch}-linux-gnu-g++", "g++", "c++"):
            path = shutil.which(name)
            if path and _run([path, "-dumpmachine"], "asking for its target").split("-")[0] == arch:
                return cls(path, arch)
        raise CompilerMissing(arch, f"{arch}-linux-gnu-g++")

    def version(self) -> str:
        """Return the version, such as `12.2.0`; it is an input of a bundle."""
        return _run([self.path, "-dumpfullversion"], "asking for its version").strip()

    def system_library(self, name: str) -> Path:
        """Return a library from the compiler's own sysroot, which the runner is linked against.

        Raises:
            CompilerFailed: the sysroot does not contain it.
        """
        output = _run([self.path, f"-print-file-name={name}"], f"looking for {name}").strip()
        candidates = [Path(output)] if "/" in output else []
        # Debian keeps a native compiler's loader outside the folders that -print-file-name searches.
        candidates += [Path(root) / name for root in ("/lib64", "/lib", f"/lib/{self.arch}-linux-gnu")]
        candidates += [Path(f"/usr/{self.arch}-linux-gnu/lib") / name]
        for candidate in candidates:
            if candidate.is_file() and elf_arch(candidate) == self.arch:
                return candidate.resolve()
        raise CompilerFailed(f"finding {name}", f"not in {', '.join(str(c) for c in candidates)}")

    def run(self, arguments: list[str], what: str, folder: Path) -> None:
        """Run the compiler in `folder`.

        Raises:
            CompilerFailed: it ended with an error; its output is in the message.
        """
        _run([self.path, *arguments], what, folder)


@dataclass(frozen=True)
class ExecutorchPackage:
    """An `executorch` package folder with `lib/` and `include/`, for `arch`."""

    folder: Path
    version: str
    """The version without its local part: `1.5.1` for `1.5.1+cpu`."""

    @classmethod
    def find(cls, arch: str, location: Path | None, scratch: Path) -> ExecutorchPackage:
        """Find the package at `location` (a folder or a wheel), else the installed one, without importing it.

        The required part of a wheel is unpacked into `scratch`.

        Raises:
            ExecutorchMissing: there is no package, or it is for another architecture.
        """
        if location is None:
            spec = importlib.util.find_spec("executorch")
            folders = list(spec.submodule_search_locations or []) if spec else []
            if not folders:
                raise ExecutorchMissing(arch, "the package is not installed here")
            folder = Path(folders[0])
        elif location.is_file():
            folder = _unpacked(arch, location, scratch)
        else:
            folder = location if (location / "version.py").is_file() else location / "executorch"
        return cls._validated(arch, folder)

    def library(self, name: str) -> Path:
        """Return one of the libraries of a bundle."""
        return self.folder / (_CUSTOM_OPERATORS_FOLDER if name == CUSTOM_OPERATORS else "lib") / name

    @classmethod
    def _validated(cls, arch: str, folder: Path) -> ExecutorchPackage:
        for name in (*EXECUTORCH_LIBRARIES, CUSTOM_OPERATORS):
            path = cls(folder, "").library(name)
            if not path.is_file():
                raise ExecutorchMissing(arch, f"{folder} has no {path.relative_to(folder)}")
        actual_arch = elf_arch(folder / "lib" / EXECUTORCH_LIBRARIES[0])
        if actual_arch != arch:
            raise ExecutorchMissing(arch, f"the one in {folder} is for {actual_arch or 'another architecture'}")
        match = re.search(r"""^__version__ = ['"]([^'"+]+)""", (folder / "version.py").read_text(), re.MULTILINE)
        if not match:
            raise ExecutorchMissing(arch, f"{folder}/version.py has no version")
        return cls(folder, match[1])


def elf_arch(path: Path) -> str | None:
    """Return the architecture of an ELF file; None if it is unknown."""
    with path.open("rb") as file:
        return elf.arch_of(file.read(elf.HEAD_BYTES))


def _unpacked(arch: str, wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                name
                for name in archive.namelist()
                if name.startswith(("executorch/lib/libexecutorch", "executorch/include/"))
                or name in ("executorch/version.py", f"executorch/{_CUSTOM_OPERATORS_FOLDER}/{CUSTOM_OPERATORS}")
            ]
            archive.extractall(scratch, members)  # refuses names that point outside `scratch`
    except (OSError, zipfile.BadZipFile) as error:
        raise ExecutorchMissing(arch, f"{wheel} cannot be read ({error})") from None
    if not (scratch / "executorch" / "version.py").is_file():
        raise ExecutorchMissing(arch, f"{wheel} is not a wheel of executorch")
    return scratch / "executorch"


def _run(command: list[str], what: str, folder: Path | None = None) -> str:
    # Files that a killed compiler leaves behind are deleted with the folder.
    environment = os.environ | ({"TMPDIR": str(folder)} if folder else {})
    try:
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise CompilerFailed(what, str(error)) from None
    if process.returncode != 0:
        raise CompilerFailed(what, process.stderr or process.stdout or f"exit code {process.returncode}")
    return process.stdout
