"""Live attempts on devices: the futures of their results, and the rules by which they count as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from etfarm.server.access.scope import DEFAULT_PROJECT, agent_holder
from etfarm.v1 import agent_pb2
from etfarm.wire.errors import DeviceError, error_for

Progressed = Callable[[agent_pb2.RunProgress], None]

PERMIT_TIMEOUT_S: Final = 30.0
"""Maximum time for which an agent's download waits until an earlier server's attempt is resumed."""


class AttemptLost(DeviceError):
    """An attempt that the device no longer runs, or whose agent did not reconnect in time."""

    reason = "ATTEMPT_LOST"


@dataclass
class _Run:
    attempt_id: str
    device_id: str
    result: asyncio.Future[agent_pb2.RunResult]
    on_progress: Progressed
    sent: bool
    """Whether the attempt was sent to the agent, which cannot know it before."""
    project: str
    """Project of the attempt."""
    exclusive: bool
    """Whether the device runs nothing else meanwhile."""
    giving_up: asyncio.TimerHandle | None = field(default=None)
    sent_s: float | None = None
    """Time at which the attempt was sent, by the event loop's clock; None if an earlier server sent it."""
    elapsed_s: float | None = None
    """Seconds from sending the attempt to its result."""
    holder: str = ""
    """Holder of the agent's uploads; empty for an admin's agent, whose uploads belong to a project."""
    artifacts: set[str] = field(default_factory=set)
    """Digests that the agent may read."""
    permitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `artifacts` is complete."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the attempt no longer occupies its device."""


class Runs:
    """The live attempts, by id.

    An attempt outlives its connection: it is lost only if its agent reconnects without it, or does not reconnect within
    `patience_s` seconds.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._runs: dict[str, _Run] = {}
        self._listeners: list[Callable[[Collection[str]], None]] = []
        self._on_devices: dict[str, dict[str, _Run]] = {}
        """The live attempts by id, oldest first, by device id."""

    def on_change(self, listener: Callable[[Collection[str]], None]) -> None:
        """Register a function to call with the ids of devices on which an attempt began or ended."""
        self._listeners.append(listener)

    def _announce(self, device_id: str) -> None:
        for listener in self._listeners:
            listener([device_id])

    def on_device(self, device_id: str) -> list[str]:
        """Return the attempts that occupy a device, oldest first."""
        return list(self._on_devices.get(device_id, ()))

    def exclusive_on(self, device_id: str) -> list[bool]:
        """Return for each attempt on a device, oldest first, whether the device runs nothing else meanwhile."""
        return [run.exclusive for run in self._on_devices.get(device_id, {}).values()]

    def device_of(self, attempt_id: str) -> str | None:
        """Return the device that an attempt occupies; None if the attempt is not live."""
        run = self._runs.get(attempt_id)
        return None if run is None else run.device_id

    def project_of(self, attempt_id: str) -> str:
        """Return the project of an attempt; empty if the attempt is not live."""
        run = self._runs.get(attempt_id)
        return run.project if run is not None else ""

    def busy(self) -> dict[str, str]:
        """Return the ids of the oldest live attempts by device id."""
        return {device_id: next(iter(attempts)) for device_id, attempts in self._on_devices.items()}

    def artifacts(self) -> set[str]:
        """Return the digests that the agents of live attempts and sessions may read."""
        return {digest for run in self._runs.values() for digest in run.artifacts}

    def begin(
        self,
        attempt_id: str,
        device_id: str,
        on_progress: Progressed,
        *,
        sent: bool = False,
        project: str = DEFAULT_PROJECT,
        exclusive: bool = True,
    ) -> None:
        """Occupy a device with a new attempt.

        Args:
            sent: whether an earlier server already sent the attempt to the agent.
            project: project of the attempt.
            exclusive: whether the device runs nothing else meanwhile.
        """
        assert attempt_id not in self._runs, attempt_id
        future: asyncio.Future[agent_pb2.RunResult] = asyncio.get_running_loop().create_future()
        run = self._runs[attempt_id] = _Run(attempt_id, device_id, future, on_progress, sent, project, exclusive)
        self._on_devices.setdefault(device_id, {})[attempt_id] = run
        self._announce(device_id)

    def mark_sent(self, attempt_id: str) -> None:
        """Record that the attempt is sent now: from now on the agent must know it."""
        run = self._runs[attempt_id]
        run.sent, run.sent_s = True, asyncio.get_running_loop().time()

    def elapsed_s(self, attempt_id: str) -> float | None:
        """Return the seconds from sending an attempt to its result; None before the result, or if an earlier server sent it."""
        run = self._runs.get(attempt_id)
        return None if run is None else run.elapsed_s

    def permit(self, attempt_id: str, digests: Iterable[str]) -> None:
        """Allow the attempt's agent to read these artifacts in addition to earlier ones."""
        if (run := self._runs.get(attempt_id)) is not None:
            run.artifacts.update(digests)
            run.permitted.set()

    async def is_permitted(self, digest: str, serves: Callable[[str], bool]) -> bool:
        """Return whether an attempt on a device for which `serves` returns true needs the artifact.

        Waits for attempts of an earlier server, whose artifacts are only known once their cells are resumed.

        Raises:
            ATTEMPT_NOT_RESUMED: one of them was not resumed in time.
        """
        runs = [run for run in self._runs.values() if run.sent and serves(run.device_id)]
        if any(digest in run.artifacts for run in runs):
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(PERMIT_TIMEOUT_S):
                for run in runs:
                    await run.permitted.wait()
        # The agent's identity may be another's by now.
        if any(digest in run.artifacts and serves(run.device_id) for run in runs):
            return True
        for run in runs:
            if not run.permitted.is_set():
                raise error_for(
                    "ATTEMPT_NOT_RESUMED",
                    f"The server has not resumed attempt {run.attempt_id} yet.",
                    "Try again in a few seconds.",
                    attempt=run.attempt_id,
                )
        return False

    def has_answer(self, attempt_id: str) -> bool:
        """Return whether the agent's result has arrived."""
        run = self._runs.get(attempt_id)
        return run is not None and run.result.done() and not run.result.cancelled() and run.result.exception() is None

    def has_succeeded(self, attempt_id: str) -> bool:
        """Return whether the agent's result has arrived, and reports no error."""
        if not self.has_answer(attempt_id):
            return False
        result = self._runs[attempt_id].result.result()
        return not (result.HasField("error") or any(each.HasField("error") for each in result.candidates))

    async def result(self, attempt_id: str) -> agent_pb2.RunResult:
        """Wait for an attempt's result.

        Raises:
            AttemptLost: the attempt is lost.
        """
        return await self._runs[attempt_id].result

    def end(self, attempt_id: str) -> None:
        """End the attempt's use of its device."""
        run = self._runs.pop(attempt_id, None)
        if run is None:
            return
        on_device = self._on_devices[run.device_id]
        del on_device[attempt_id]
        if not on_device:
            del self._on_devices[run.device_id]
        if run.giving_up is not None:
            run.giving_up.cancel()
        run.result.cancel()
        run.permitted.set()
        run.over.set()
        self._announce(run.device_id)

    async def wait_alone(self, attempt_id: str) -> None:
        """Wait until no other attempt occupies the attempt's device."""
        device_id = self._runs[attempt_id].device_id
        while others := [run for run in self._on_devices.get(device_id, {}).values() if run.attempt_id != attempt_id]:
            await others[0].over.wait()

    async def wait_idle(self, device_id: str) -> None:
        """Wait until no attempt occupies a device."""
        while runs := self._on_devices.get(device_id):
            await next(iter(runs.values())).over.wait()

    def knows(self, attempt_id: str) -> bool:
        """Return whether the attempt is live."""
        return attempt_id in self._runs

    def progressed(self, progress: agent_pb2.RunProgress) -> None:
        """Pass an agent's progress report to the attempt's callback."""
        run = self._runs.get(progress.attempt_id)
        if run is not None and run.device_id == progress.device_id:
            run.on_progress(progress)

    def holder_of(self, attempt_id: str) -> str:
        """Return the holder of the agent's uploads for an attempt; empty for an admin's agent, which is trusted.

        For an attempt that is not live, return a holder without holdings.
        """
        run = self._runs.get(attempt_id)
        return agent_holder("") if run is None else run.holder

    def deliver(self, result: agent_pb2.RunResult, holder: str = "") -> bool:
        """Accept a result; return whether its attempt is live. Repeated deliveries have no effect.

        Args:
            holder: holder of the agent's uploads; empty for an admin's agent.
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
        """Start the timeout of `patience_s`, after which an attempt on a disconnected device is lost."""
        for run in self._on_devices.get(device_id, {}).values():
            if run.sent and run.giving_up is None:
                loop = asyncio.get_running_loop()
                run.giving_up = loop.call_later(self._patience_s, self._lose, run, f"sent nothing for {self._patience_s:g} s")

    def reconcile(
        self, device_ids: set[str], attempts: set[str], why: str = "reconnected without the run", cause: str = "restarted"
    ) -> None:
        """Compare the live attempts with those of an agent that has connected: attempts that the agent no longer has are lost.

        Args:
            device_ids: the agent's devices.
            attempts: ids of the agent's attempts.
            why: what happened to the device, for the error's message.
            cause: the same as a word, for the error's metadata.
        """
        for run in list(self._runs.values()):
            if run.device_id not in device_ids or not run.sent:
                continue
            if run.giving_up is not None:
                run.giving_up.cancel()
                run.giving_up = None
            if run.attempt_id not in attempts:
                self._lose(run, why, cause)

    def _lose(self, run: _Run, why: str, cause: str = "silent") -> None:
        if not run.result.done():
            message = f"The device {run.device_id} {why}."
            # This server cannot know what became of an agent while no server ran.
            known_cause = cause if run.sent_s is not None else "server-restart"
            run.result.set_exception(AttemptLost(message, device=run.device_id, attempt=run.attempt_id, cause=known_cause))
