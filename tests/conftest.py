"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tests.support.adbd import adb_phone  # noqa: F401 - a fixture
from tests.support.farm import FarmProcess
from tests.support.runner import runner_bundle  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from etfarm.server.workers.pool import Workers

# Which pytest's processes are told of a terminal that they do not write to.
os.environ.pop("COLUMNS", None)

# No clock decides over a property, and the same commit is tried with the same examples each time.
settings.register_profile("etfarm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("etfarm")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """One warm forkserver for all tests that compile in its children, which find their tasks beside the tests. Tests that use
    it share an event loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`."""
    from tests.support.compiling import warm_workers

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        async with warm_workers(tmp_path_factory.mktemp("workers")) as pool:
            await pool.ready()
            yield pool


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
