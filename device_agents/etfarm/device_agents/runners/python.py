"""ExecuTorch's Python binding in a child process, as a `Runner`, for machines with torch installed and no bundle."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from etfarm.device_agents.runners.child import Spawn, spawn_here
from etfarm.device_agents.runners.process import Limits, OnLog
from etfarm.device_agents.runners.remote import RemoteRunner


class PythonRunner(RemoteRunner):
    """A `Runner` in a child process of this interpreter. `async with PythonRunner.start(...) as runner:` cleans up completely."""

    kind: ClassVar[str] = "python"

    @staticmethod
    def available() -> bool:
        """Return whether torch and ExecuTorch are installed here; neither is imported."""
        return all(importlib.util.find_spec(name) is not None for name in ("torch", "executorch"))

    @staticmethod
    def command() -> list[str]:
        """Return the child's command line."""
        # -P: modules that a program left in its folder must not be imported.
        return [sys.executable, "-P", "-m", "etfarm.device_agents.runners.python_child"]

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        folder: Path,
        *,
        limits: Limits | None = None,
        on_log: OnLog | None = None,
        spawn: Spawn = spawn_here,
    ) -> AsyncIterator[PythonRunner]:
        """Start a child that works in `folder`; it is killed and reaped at the end. Its first answer takes about a second.

        Raises:
            RUNNER_BROKEN: the child cannot be started.
        """
        async with cls.connect(cls.command(), folder, limits or Limits(), on_log, spawn) as runner:
            yield runner
