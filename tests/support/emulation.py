"""The aarch64 runner for tests, and the system packages that it takes: built once for its sources, outside of the checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etfarm.device_agents.native.build import build_bundle, fetch_wheel, source_digest
from etfarm.device_agents.native.toolchain import ExecutorchMissing
from tests.support.programs import cache_folder, locked

ARCH = "aarch64"


def need_emulator() -> None:
    """Skips where qemu's user mode is not installed."""
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("needs an emulator: apt-get install qemu-user-static")


def need_compiler() -> None:
    """Skips where the cross compiler is not installed."""
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("needs a cross compiler: apt-get install g++-aarch64-linux-gnu")


def aarch64_wheel() -> Path:
    """ExecuTorch's wheel for aarch64; 18 MB, fetched once."""
    with locked("wheels"):
        try:
            return fetch_wheel(ARCH, cache_folder() / "wheels")
        except ExecutorchMissing as error:
            pytest.skip(str(error))


def aarch64_archive() -> Path:
    """Return the bundle for aarch64; several test runs at once build it one time."""
    need_emulator()
    need_compiler()
    archive = cache_folder() / f"runner-{ARCH}-{source_digest()[:16]}.tar.gz"
    wheel = aarch64_wheel()
    with locked(f"runner-{ARCH}"):
        if not archive.exists():
            build_bundle(ARCH, archive, executorch=wheel)
    return archive
