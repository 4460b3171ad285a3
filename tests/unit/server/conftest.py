"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.support.databases import each_database, new_postgres, postgres_databases  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def unchanged_logs() -> Iterator[None]:
    """Let no later test log to the stderr that a test's command had."""
    yield
    structlog.reset_defaults()
