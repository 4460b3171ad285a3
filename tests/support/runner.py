"""The real C++ runner for tests: built once for its sources, unpacked outside of the checkout."""

from __future__ import annotations

import fcntl
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.device_agents.native.build import build_bundle, source_digest
from etfarm.device_agents.runners.bundle import Bundle, unpack
from tests.support.programs import cache_folder


def runner_archive() -> Path:
    """The bundle of this machine's architecture; several test runs at once build it one time."""
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler: apt-get install g++")
    archive = cache_folder() / f"runner-{source_digest()[:16]}.tar.gz"
    with (cache_folder() / "runner.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            build_bundle(platform.machine(), archive)
    return archive


@pytest.fixture(scope="session")
def runner_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """The runner, unpacked and verified."""
    yield unpack(runner_archive(), tmp_path_factory.mktemp("runner") / "bundle")
