"""Fixtures of the server's tests."""

from __future__ import annotations

from tests.support.databases import each_database, new_postgres, postgres_databases  # noqa: F401 - fixtures
