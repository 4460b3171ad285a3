"""Fixtures of the tests of jobs."""

from __future__ import annotations

from tests.support.cells import world

__all__ = ["world"]
