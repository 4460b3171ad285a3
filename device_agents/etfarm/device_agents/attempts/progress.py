"""What the server is told of a candidate while it is carried out: phases, how far they are, what its runner prints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from etfarm.device_agents.attempts.fetch import KEPT_LOG_LINES
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.runners.process import LogLine
from etfarm.v1 import agent_pb2

_RECENT_LINES: Final = 60


class Teller(Protocol):
    """The attempt, as far as its candidates tell of it."""

    config: AgentConfig
    phase: str
    """What is under way."""
    received_s: float
    """When, by the monotonic clock; phases are told from there."""

    def tell(self, progress: agent_pb2.RunProgress) -> None:
        """Sends progress."""


class Story:
    """Of one candidate; its phases are in its result, too.

    Args:
        attempt: the candidate's.
        result: the candidate's.
    """

    def __init__(self, attempt: Teller, result: agent_pb2.CandidateResult) -> None:
        self._told = attempt
        self.result = result
        self._lines: deque[str] = deque(maxlen=KEPT_LOG_LINES)
        self._told_s = 0.0
        self.recent: deque[str] = deque(maxlen=_RECENT_LINES)
        """What the runner printed last."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the result, told when it begins and when it ends."""
        self.switch(name)
        began_s = time.monotonic()
        self.tell(force=True)
        yield
        self.ended(name, began_s, time.monotonic())

    def switch(self, name: str) -> None:
        """Another phase is under way."""
        self._told.phase = name

    def ended(self, name: str, began_s: float, ended_s: float) -> None:
        """A phase of the result is over."""
        duration_ms = (ended_s - began_s) * 1e3
        start_ms = (began_s - self._told.received_s) * 1e3
        self.result.phases.add(actor="DEVICE", phase=name, start_ms=start_ms, duration_ms=duration_ms)
        self.switch(name)
        self.tell(duration_ms=duration_ms, force=True)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """So much of the current phase is done."""
        self.tell(done, total, message=message)

    def take_log(self, line: LogLine) -> None:
        """The runner printed a line."""
        self._lines.append(str(line))
        self.recent.append(str(line))

    def tell(
        self,
        done: int | None = None,
        total: int | None = None,
        *,
        duration_ms: float | None = None,
        message: str = "",
        force: bool = False,
    ) -> None:
        """Progress of the current phase. Not more often than the configuration allows, unless it is the phase's begin or end."""
        now = time.monotonic()
        if not force and now - self._told_s < self._told.config.progress_interval_s:
            return
        self._told_s = now
        progress = agent_pb2.RunProgress(
            cell_id=self.result.cell_id, phase=self._told.phase, log_lines=self._lines, message=message
        )  # fmt: skip
        self._lines.clear()
        if duration_ms is not None:
            progress.duration_ms = duration_ms
        if done is not None:
            progress.done = done
            # A pass that goes on for its least time passes the least number of iterations.
            if total is not None and done <= total:
                progress.total = total
        self._told.tell(progress)
