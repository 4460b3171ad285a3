"""Attempts that are on devices now: who waits for their results, and when they are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from etfarm.server.access.scope import DEFAULT_PROJECT, agent_holder
from etfarm.v1 import agent_pb2
from etfarm.wire.errors import DeviceError

Progressed = Callable[[agent_pb2.RunProgress], None]


PERMIT_TIMEOUT_S: Final = 30.0
"""How long an agent's download waits until the attempt of an earlier server is taken up."""


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
    project: str
    """Whose attempt it is."""
    giving_up: asyncio.TimerHandle | None = field(default=None)
    sent_s: float | None = None
    """When the agent was told, by the event loop's clock; None where an earlier server did."""
    elapsed_s: float | None = None
    """From then to the result."""
    holder: str = ""
    """Who holds what the agent uploaded; empty for an admin's agent, whose uploads a project holds."""
    artifacts: set[str] = field(default_factory=set)
    """The digests that its agent may read."""
    permitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `artifacts` is complete."""


class Runs:
    """The live attempts, by id. An attempt outlives its connection: it is given up only when its agent comes back without
    it, or does not come back for `patience_s` seconds."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._runs: dict[str, _Run] = {}

    def on_device(self, device_id: str) -> str | None:
        """The attempt that occupies a device."""
        return next((run.attempt_id for run in self._runs.values() if run.device_id == device_id), None)

    def project_of(self, attempt_id: str) -> str:
        """Return whose attempt it is; empty for one that is not live."""
        run = self._runs.get(attempt_id)
        return run.project if run is not None else ""

    def busy(self) -> dict[str, str]:
        """Device id to attempt id, of all that run."""
        return {run.device_id: run.attempt_id for run in self._runs.values()}

    def begin(
        self, attempt_id: str, device_id: str, on_progress: Progressed, *, sent: bool = False, project: str = DEFAULT_PROJECT
    ) -> None:
        """Occupies a device with an attempt that nobody has begun yet.

        Args:
            sent: the agent was told already, by an earlier server.
            project: whose attempt it is.
        """
        assert attempt_id not in self._runs, attempt_id
        future: asyncio.Future[agent_pb2.RunResult] = asyncio.get_running_loop().create_future()
        self._runs[attempt_id] = _Run(attempt_id, device_id, future, on_progress, sent, project)

    def mark_sent(self, attempt_id: str) -> None:
        """The agent is told now: from here on it has to know the attempt."""
        run = self._runs[attempt_id]
        run.sent, run.sent_s = True, asyncio.get_running_loop().time()

    def elapsed_s(self, attempt_id: str) -> float | None:
        """Return the seconds from sending an attempt to its result; None before, and where an earlier server sent it."""
        run = self._runs.get(attempt_id)
        return None if run is None else run.elapsed_s

    def permit(self, attempt_id: str, digests: Iterable[str]) -> None:
        """Let the attempt's agent read these artifacts, beside those that it was permitted before."""
        if (run := self._runs.get(attempt_id)) is not None:
            run.artifacts.update(digests)
            run.permitted.set()

    async def is_permitted(self, digest: str, serves: Callable[[str], bool]) -> bool:
        """Return whether an attempt on one of the devices that `serves` is true of needs the artifact.

        Waits for attempts of an earlier server, whose artifacts are known once their cells are taken up.
        """
        runs = [run for run in self._runs.values() if run.sent and serves(run.device_id)]
        if any(digest in run.artifacts for run in runs):
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(PERMIT_TIMEOUT_S):
                for run in runs:
                    await run.permitted.wait()
        return any(digest in run.artifacts for run in runs)

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
        run.permitted.set()

    def knows(self, attempt_id: str) -> bool:
        """Whether somebody still waits for the attempt."""
        return attempt_id in self._runs

    def progressed(self, progress: agent_pb2.RunProgress) -> None:
        """Hands on what an agent tells of an attempt."""
        run = self._runs.get(progress.attempt_id)
        if run is not None and run.device_id == progress.device_id:
            run.on_progress(progress)

    def holder_of(self, attempt_id: str) -> str:
        """Return the holder of what the attempt's agent uploaded; empty for an admin's agent, whose word is taken.

        Of an attempt that is not live, a holder that holds nothing.
        """
        run = self._runs.get(attempt_id)
        return agent_holder("") if run is None else run.holder

    def deliver(self, result: agent_pb2.RunResult, holder: str = "") -> bool:
        """Takes a result; whether anybody waits for it. A second delivery changes nothing.

        Args:
            holder: of the artifacts that the agent uploaded; empty for an admin's agent.
        """
        run = self._runs.get(result.attempt_id)
        if run is None or run.device_id != result.device_id:
            return False
        if not run.result.done():
            run.holder = holder
            if run.sent_s is not None:
                run.elapsed_s = asyncio.get_running_loop().time() - run.sent_s
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
