"""Fixtures of tests of whole farms."""

from __future__ import annotations

from tests.support.databases import postgres_databases  # noqa: F401 - a fixture
from tests.support.local_sessions import open_session  # noqa: F401 - a fixture
