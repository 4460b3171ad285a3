"""Databases of tests, on the engine that the running test has chosen."""

from __future__ import annotations

from pathlib import Path

from etfarm.server.state.databases import create_database
from etfarm.server.state.engine import Database


def new_database(path: Path) -> Database:
    """Return the database of a path, not yet opened; the same path is the same database throughout a test."""
    return create_database(path)
