"""Fixtures of tests that break a farm."""

from __future__ import annotations

from tests.support.databases import postgres_databases  # noqa: F401 - a fixture
