"""A bundle's C++ runner as a `Runner`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from etfarm.device_agents.runners.child import Spawn, spawn_here
from etfarm.device_agents.runners.process import Limits, LogLine, OnLog
from etfarm.device_agents.runners.remote import PROTOCOL, RemoteRunner

__all__ = ["PROTOCOL", "Limits", "LogLine", "NativeRunner"]


class NativeRunner(RemoteRunner):
    """A `Runner` from a bundle. `async with NativeRunner.start(...) as runner:` cleans up completely."""

    kind: ClassVar[str] = "native"

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        command: Sequence[str],
        folder: Path,
        *,
        limits: Limits | None = None,
        on_log: OnLog | None = None,
        spawn: Spawn = spawn_here,
    ) -> AsyncIterator[NativeRunner]:
        """Start a runner with `command` (`Bundle.command()`) in `folder`; it is killed and reaped at the end.

        Raises:
            RUNNER_BROKEN: the command cannot be started.
        """
        async with cls.connect(command, folder, limits or Limits(), on_log, spawn) as runner:
            yield runner
