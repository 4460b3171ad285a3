"""Tiny programs for tests: made once, kept in a cache outside of the checkout, loaded without torch afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from etfarm.wire import digest, tensors
from etfarm.wire.tensors import Value


@dataclass(frozen=True)
class Program:
    """A .pte, inputs for it, and what torch gave for them."""

    path: Path
    inputs: list[Value]
    expected: list[Value]
    data: tuple[Path, ...] = ()
    """Its .ptd files."""

    @property
    def bytes(self) -> bytes:
        """The .pte's content."""
        return self.path.read_bytes()


def cache_folder() -> Path:
    """Where tests keep what is expensive to make; per user, outside of the checkout."""
    folder = Path(tempfile.gettempdir()) / f"etfarm-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one test run at a time make what the cache folder keeps under a name: another one may read it already."""
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _toolchain() -> str:
    makers = [Path(__file__).with_name(f"{name}.py") for name in ("program_makers", "language_models", "flow_models")]
    return digest.of_value([*map(digest.of_file, makers), version("torch"), version("executorch")])[:16]


def program(name: str) -> Program:
    """The program of that name; see `tests.support.program_makers`."""
    folder = cache_folder() / f"programs-{_toolchain()}" / name
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with locked(f"program-{name}"):
            if not (folder / "done").exists():
                from tests.support.program_makers import MAKERS

                MAKERS[name](folder)
                (folder / "done").write_text(json.dumps(name))
    inputs = tensors.decode((folder / "inputs.ett").read_bytes())
    expected = tensors.decode((folder / "expected.ett").read_bytes())
    return Program(folder / "program.pte", inputs, expected, tuple(sorted(folder.glob("*.ptd"))))
