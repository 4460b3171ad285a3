"""Progress of a candidate as reported to the server: its phases, their progress, and the runner's output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.runners.process import LogLine
from etfarm.v1 import agent_pb2, common_pb2

OnRunProgress = Callable[[agent_pb2.RunProgress], None]
"""Callback that takes an attempt's progress for the server; never blocks."""

KEPT_LOG_LINES: Final = 200
"""Number of the runner's latest lines that are kept for the next message."""
_RECENT_LINES: Final = 60


class ProgressSink(Protocol):
    """The attempt, as its candidates see it when they report progress."""

    config: AgentConfig
    phase: str
    """The current phase."""
    received_s: float
    """The monotonic time of the attempt's receipt, which phases start from."""

    def send_progress(self, progress: agent_pb2.RunProgress) -> None:
        """Send progress to the server."""


class CandidateProgress:
    """The progress of one candidate; its phases are in its result, too.

    Args:
        sink: the candidate's attempt.
        result: the candidate's result.
    """

    def __init__(self, sink: ProgressSink, result: agent_pb2.CandidateResult) -> None:
        self._sink = sink
        self.result = result
        self._lines: deque[str] = deque(maxlen=KEPT_LOG_LINES)
        self._sent_s = 0.0
        self.step = ""
        """The part of the measurement that is in progress, such as `run 2 of 5`; empty if it has only one."""
        self.recent: deque[str] = deque(maxlen=_RECENT_LINES)
        """The runner's last lines."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add a phase to the result, and report when it begins and when it ends."""
        self.enter_phase(name)
        began_s = time.monotonic()
        self.report(force=True)
        yield
        self.end_phase(name, began_s, time.monotonic())

    def enter_phase(self, name: str) -> None:
        """Make another phase the current one."""
        self._sink.phase = name

    def end_phase(self, name: str, began_s: float, ended_s: float, *, p50_ns: float | None = None) -> None:
        """Add a phase that has ended to the result, and report it, with the median of its samples if it has samples."""
        duration_ms = (ended_s - began_s) * 1e3
        start_ms = (began_s - self._sink.received_s) * 1e3
        self.result.phases.add(actor=common_pb2.ACTOR_DEVICE, phase=name, start_ms=start_ms, duration_ms=duration_ms)
        self.enter_phase(name)
        self.report(duration_ms=duration_ms, p50_ns=p50_ns, force=True)

    def report_steps(self, done: int, total: int, message: str = "") -> None:
        """Report how many of the current phase's steps are done."""
        self.report(done, total, message=message)

    def take_log(self, line: LogLine) -> None:
        """Keep a line of the runner's output for the next message."""
        self._lines.append(str(line))
        self.recent.append(str(line))

    def report(
        self,
        done: int | None = None,
        total: int | None = None,
        *,
        duration_ms: float | None = None,
        p50_ns: float | None = None,
        message: str = "",
        force: bool = False,
    ) -> None:
        """Report progress of the current phase, not more often than the configuration allows.

        Args:
            done: steps that are done; None if the phase has none.
            total: steps in all, as far as that is known.
            duration_ms: the phase's duration, once it is over.
            p50_ns: the median of the phase's samples, once it is over.
            message: a line for people.
            force: report in any case.
        """
        now = time.monotonic()
        if not force and now - self._sent_s < self._sink.config.progress_interval_s:
            return
        self._sent_s = now
        progress = agent_pb2.RunProgress(
            cell_id=self.result.cell_id, phase=self._sink.phase, log_lines=self._lines,
            message=": ".join(text for text in (self.step, message) if text), p50_ns=p50_ns,
        )  # fmt: skip
        self._lines.clear()
        if duration_ms is not None:
            progress.duration_ms = duration_ms
        if done is not None:
            progress.done = done
            # A pass that continues to its minimum time exceeds the minimum number of iterations.
            if total is not None and done <= total:
                progress.total = total
        self._sink.send_progress(progress)
