"""Fixtures of tests of whole farms."""

from __future__ import annotations

from tests.support.databases import postgres_databases  # noqa: F401 - a fixture
