"""Fixtures of the tests of attempts."""

from __future__ import annotations

from tests.support.attempts import board

__all__ = ["board"]
