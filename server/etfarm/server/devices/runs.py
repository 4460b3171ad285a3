"""Attempts that are on devices now: who waits for their results, and when they are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from etfarm.v1 import agent_pb2
from etfarm.wire.errors import DeviceError

Progressed = Callable[[agent_pb2.RunProgress], None]


class AttemptLost(DeviceError):
    """The device no longer runs the attempt, or did not come back in time."""

    reason = "ATTEMPT_LOST"


@dataclass
class _Run:
    attempt_id: str
    device_id: str
    result: asyncio.Future[agent_pb2.RunResult]
    on_progress: Progressed
    sent: bool
    """Whether the agent was told; before, it cannot be expected to know the run."""
    giving_up: asyncio.TimerHandle | None = field(default=None)


class Runs:
    """The live attempts, by id. An attempt outlives its connection: it is given up only when its agent comes back without
    it, or does not come back for `patience_s` seconds."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._runs: dict[str, _Run] = {}

    def on_device(self, device_id: str) -> str | None:
        """The attempt that occupies a device."""
        return next((run.attempt_id for run in self._runs.values() if run.device_id == device_id), None)

    def busy(self) -> dict[str, str]:
        """Device id to attempt id, of all that run."""
        return {run.device_id: run.attempt_id for run in self._runs.values()}

    def begin(self, attempt_id: str, device_id: str, on_progress: Progressed, *, sent: bool = False) -> None:
        """Occupies a device with an attempt that nobody has begun yet.

        Args:
            sent: the agent was told already, by an earlier server.
        """
        assert attempt_id not in self._runs, attempt_id
        future: asyncio.Future[agent_pb2.RunResult] = asyncio.get_running_loop().create_future()
        self._runs[attempt_id] = _Run(attempt_id, device_id, future, on_progress, sent)

    def mark_sent(self, attempt_id: str) -> None:
        """The agent is told now: from here on it has to know the attempt."""
        self._runs[attempt_id].sent = True

    def has_answer(self, attempt_id: str) -> bool:
        """Whether the agent's result is here."""
        run = self._runs.get(attempt_id)
        return run is not None and run.result.done() and not run.result.cancelled() and run.result.exception() is None

    async def result(self, attempt_id: str) -> agent_pb2.RunResult:
        """Waits for an attempt's result.

        Raises:
            AttemptLost: it was given up.
        """
        return await self._runs[attempt_id].result

    def end(self, attempt_id: str) -> None:
        """Frees the attempt's device."""
        run = self._runs.pop(attempt_id, None)
        if run is None:
            return
        if run.giving_up is not None:
            run.giving_up.cancel()
        run.result.cancel()

    def knows(self, attempt_id: str) -> bool:
        """Whether somebody still waits for the attempt."""
        return attempt_id in self._runs

    def progressed(self, progress: agent_pb2.RunProgress) -> None:
        """Hands on what an agent tells of an attempt."""
        run = self._runs.get(progress.attempt_id)
        if run is not None and run.device_id == progress.device_id:
            run.on_progress(progress)

    def deliver(self, result: agent_pb2.RunResult) -> bool:
        """Takes a result; whether anybody waits for it. A second delivery changes nothing."""
        run = self._runs.get(result.attempt_id)
        if run is None or run.device_id != result.device_id:
            return False
        if not run.result.done():
            run.result.set_result(result)
        return True

    def device_went(self, device_id: str) -> None:
        """The device's connection ended: what runs there has `patience_s` to be heard of again."""
        for run in self._runs.values():
            if run.device_id == device_id and run.sent and run.giving_up is None:
                loop = asyncio.get_running_loop()
                run.giving_up = loop.call_later(self._patience_s, self._lose, run, f"was not heard of for {self._patience_s:g} s")

    def agent_said(self, device_ids: set[str], attempts: set[str], why: str = "came back without the run") -> None:
        """An agent (re)connected with these devices and still has these attempts; its others are lost: the device `why`."""
        for run in list(self._runs.values()):
            if run.device_id not in device_ids or not run.sent:
                continue
            if run.giving_up is not None:
                run.giving_up.cancel()
                run.giving_up = None
            if run.attempt_id not in attempts:
                self._lose(run, why)

    def _lose(self, run: _Run, why: str) -> None:
        if not run.result.done():
            message = f"The device {run.device_id} {why}."
            run.result.set_exception(AttemptLost(message, device=run.device_id, attempt=run.attempt_id))
