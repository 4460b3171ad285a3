"""Fixtures of the tests of runners."""

from __future__ import annotations

from tests.support.runner import native_runner, runner, start, start_native

__all__ = ["native_runner", "runner", "start", "start_native"]
