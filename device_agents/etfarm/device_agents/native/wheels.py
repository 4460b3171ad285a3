"""ExecuTorch's wheel for another architecture, fetched once with pip and kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from etfarm.device_agents.native.toolchain import EXECUTORCH, ExecutorchMissing

Say = Callable[[str], None]

_TAGS: Final = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311")
"""Tags of the same wheel for any Python: equal inputs produce equal bundles, which contain nothing of Python."""


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
