"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.farm import FarmProcess
from tests.support.runner import runner_bundle  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server with one agent, for tests that break nothing. Its workers are warm after the first job."""
    running = FarmProcess(tmp_path_factory.mktemp("farm"))
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.fixture
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of the test's own, not yet started."""
    running = FarmProcess(tmp_path_factory.mktemp("breakable"))
    try:
        yield running
    finally:
        running.stop()
