"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from etfarm.server.state.engine import Database
from tests.support.databases import each_database, new_database, new_postgres, opened, postgres_databases  # noqa: F401 - fixtures


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """An open database of the engine of the running test."""
    async with opened(new_database(tmp_path / "farm.sqlite")) as created:
        yield created


@pytest.fixture(autouse=True)
def unchanged_logs() -> Iterator[None]:
    """Let no later test log to the stderr that a test's command had."""
    yield
    structlog.reset_defaults()
