"""Fixtures of the tests of jobs."""

from __future__ import annotations

from tests.support.cells import bare_world, world

__all__ = ["bare_world", "world"]
