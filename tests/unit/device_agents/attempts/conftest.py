"""Fixtures of the tests of attempts."""

from __future__ import annotations

from tests.support.attempts import address, blobs

__all__ = ["address", "blobs"]
