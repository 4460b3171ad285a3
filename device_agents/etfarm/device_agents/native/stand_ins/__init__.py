"""Libraries in the place of torch's, so that ExecuTorch's custom operators run without torch.

ExecuTorch's wheel has the operators of language models in one library only, which is made for a Python process with torch: it
needs torch's libraries to be loaded, though its kernels for ExecuTorch use nothing of them. A stand-in has the name of one of
these libraries; one of them, `torch.cpp`, defines the few symbols that loading takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from etfarm.device_agents.native.elf_symbols import LibrarySymbols
from etfarm.device_agents.native.toolchain import (
    EXECUTORCH_LIBRARIES,
    LOADERS,
    SYSTEM_LIBRARIES,
    Compiler,
    CompilerFailed,
)

SOURCE: Final = Path(__file__).parent / "torch.cpp"
FLAGS: Final = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wl,--build-id=none", "-s")
_DEFINING: Final = "libtorch_cpu.so"
"""The library that gets the symbols; the others are empty."""


def compile_stand_ins(compiler: Compiler, custom_operators: Path, folder: Path) -> Sequence[Path]:
    """Compile a stand-in in `folder` for each library that the custom operators need and a bundle does not have.

    Raises:
        CompilerFailed: the message contains the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bundled = {*EXECUTORCH_LIBRARIES, *SYSTEM_LIBRARIES, *LOADERS.values()}
    names = [name for name in LibrarySymbols.read(custom_operators).needed if name not in bundled]
    for name in names:
        source = [str(SOURCE)] if name == _DEFINING else ["-nostdlib", "-x", "c++", "/dev/null"]
        compiler.run([*FLAGS, f"-Wl,-soname,{name}", "-o", name, *source], f"compiling {name}", folder)
    return [folder / name for name in names]


def require_symbols(custom_operators: Path, libraries: Iterable[Path]) -> None:
    """Require that the custom operators can be loaded with `libraries`.

    Functions that are bound when they are first called are not required: the loader does not look for them, and only code for
    PyTorch calls them.

    Raises:
        CompilerFailed: a symbol that the loader needs is missing.
    """
    defined = frozenset().union(*(LibrarySymbols.read(path).defined for path in libraries))
    if missing := sorted(LibrarySymbols.read(custom_operators).required - defined):
        raise CompilerFailed(
            f"linking {custom_operators.name}", f"no library of the bundle defines {', '.join(missing)}; add it to {SOURCE.name}"
        )
