"""A cell's time on a device: what it needs is checked, it is placed, started, and its result fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.compiler import facts_of
from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.result import MethodFacts
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.registry import DeviceOffline, Registry
from etfarm.server.devices.runs import Progressed, Runs
from etfarm.server.devices.schedule import Waiting
from etfarm.server.jobs.placement import Placement
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Attempt, Cell, Job, Progress
from etfarm.wire import selectors, tensors
from etfarm.wire.errors import DeviceError, UserError
from etfarm.wire.status import from_proto

DEADLINE_S = 600.0
"""How long an attempt may take where the job does not say."""

GRACE_S = 300.0
"""How long after its deadline an attempt's result may come: uploads over a bad link, reconnections."""

ProgressTold = Callable[[str, Progress], None]
"""Told (job id, progress)."""
LineTold = Callable[[str, str, str, str], None]
"""Told (job id, cell id, source, text)."""


class MethodMissing(UserError):
    """The program has no method of the name."""

    reason = "METHOD_MISSING"


class DeviceLacks(UserError):
    """The device's runner has no such backend or kernel."""

    reason = "BACKEND_MISSING"


class AttemptOverdue(DeviceError):
    """The agent is alive, and long after the attempt's deadline there is no result."""

    reason = "ATTEMPT_OVERDUE"


class ResultMissing(DeviceError):
    """The agent answered without a result for the cell."""

    reason = "RESULT_MISSING"


class Execution:
    """Runs cells on devices."""

    def __init__(
        self, registry: Registry, runs: Runs, placement: Placement, bundles: Bundles, store: Store, new_id: Callable[[], str]
    ) -> None:
        self._registry = registry
        self._runs = runs
        self._placement = placement
        self._bundles = bundles
        self._store = store
        self._new_id = new_id

    async def check_inputs(self, job: Job, cell: Cell, compilation: compile_pb2.Compilation) -> None:
        """Settles the cell's method and refuses inputs that do not fit it, before any device sees them.

        Raises:
            MethodMissing: the program has no such method.
            InputMismatch: a count, dtype, shape or dim order is not what the method takes.
        """
        methods = compilation.facts.methods
        if cell.method not in methods and not job.spec.methods and len(methods) == 1:
            cell.method = next(iter(methods))
        if cell.method not in methods:
            names = ", ".join(sorted(methods))
            raise MethodMissing(f"{cell.candidate_name} has no method {cell.method!r}.", f"It has: {names}.", method=cell.method)
        if strangers := sorted(set(job.spec.inputs) - set(methods)):
            what = f"The inputs are for the method {strangers[0]!r}, which {cell.candidate_name} does not have."
            raise MethodMissing(what, f"It has: {', '.join(sorted(methods))}.", method=strangers[0])
        given = job.spec.inputs.get(cell.method)
        if given is not None:
            await asyncio.to_thread(_check_file, self._store.path(given.digest), cell.method, facts_of(methods[cell.method]))

    def inputs_of(self, job: Job, cell: Cell, compilation: compile_pb2.Compilation) -> common_pb2.Artifact | None:
        """What the program is run on: the job's inputs, else the model's own; None where the runner makes them."""
        return job.spec.inputs.get(cell.method) or compilation.example_inputs.get(cell.method)

    async def place(
        self, job: Job, cell: Cell, compilation: compile_pb2.Compilation, progress: ProgressTold, line: LineTold
    ) -> tuple[Device, Attempt]:
        """Waits for a device that can run the program and occupies it with a new attempt.

        Raises:
            DeviceLacks: no device that the selector matches can.
        """
        attempt_id = self._new_id()
        selector = selectors.parse(cell.selector)
        unfit = self._unfit(selector, compilation.facts.methods[cell.method])

        def on_wait(why: str) -> None:
            progress(job.id, Progress(cell_id=cell.id, actor="SERVER", phase="WAIT_FOR_DEVICE", message=why))

        waiting = Waiting(
            cell_id=cell.id,
            selector=selector,
            priority=job.spec.priority,
            order=(job.submitted_at.seconds * 10**9 + job.submitted_at.nanos, cell.index),
            avoid=frozenset(attempt.device_id for attempt in cell.attempts),
            unfit=unfit,
        )
        device = await self._placement.device(waiting, attempt_id, self._listener(job, cell, progress, line), on_wait)
        return device, Attempt(id=attempt_id, device_id=device.id)

    def _unfit(self, selector: selectors.Selector, facts: compile_pb2.MethodFacts) -> frozenset[str]:
        """Architectures among the matching devices' whose runner cannot run the program, as far as runners are known."""
        matching = [device for device in self._registry.devices() if selector.matches(device)]
        lacking: dict[str, DeviceLacks] = {}
        for device in matching:
            if (bundle := self._bundles.get(device.arch)) is not None and device.arch not in lacking:
                try:
                    _check_device(facts, bundle, device)
                except DeviceLacks as error:
                    lacking[device.arch] = error
        if lacking and all(device.arch in lacking for device in matching):
            raise lacking[matching[0].arch]
        return frozenset(lacking)

    def rejoin(self, job: Job, cell: Cell, progress: ProgressTold, line: LineTold) -> None:
        """Takes up an attempt that an earlier server started; its agent is waited for."""
        attempt = cell.attempts[-1]
        self._runs.begin(attempt.id, attempt.device_id, self._listener(job, cell, progress, line), sent=True)
        self._runs.device_went(attempt.device_id)

    def is_on_this_machine(self, device: Device) -> bool:
        """Whether the device's agent runs on the server's own machine."""
        return self._registry.is_on_this_machine(device.id)

    def device_of(self, cell: Cell) -> Device:
        """The device of the cell's last attempt."""
        return self._registry.get(cell.attempts[-1].device_id)

    def _listener(self, job: Job, cell: Cell, progress: ProgressTold, line: LineTold) -> Progressed:
        def on_progress(said: agent_pb2.RunProgress) -> None:
            device = self._registry.get(said.device_id)
            told = Progress(cell_id=cell.id, actor=device.name, phase=said.phase)
            for name in ("duration_ms", "done", "total"):
                if said.HasField(name):
                    setattr(told, name, getattr(said, name))
            progress(job.id, told)
            for text in said.log_lines:
                line(job.id, cell.id, "RUNNER", text)

        return on_progress

    @property
    def starting(self) -> str:
        """What the farm still does before anything can run, for people; empty when nothing."""
        return self._bundles.starting

    async def start(self, job: Job, cell: Cell, device: Device, compilation: compile_pb2.Compilation) -> None:
        """Sends the cell's last attempt to its device.

        Raises:
            DeviceLacks: the device's runner cannot run the program; nothing was sent.
            BundleMissing: the farm has no runner for the device.
            DeviceOffline: the device went meanwhile.
        """
        bundle = await self._bundles.demand(device.arch)
        _check_device(compilation.facts.methods[cell.method], bundle, device)
        candidate = agent_pb2.RunCandidate(
            cell_id=cell.id, program=compilation.program, method=cell.method, bundle=bundle,
            inputs=self.inputs_of(job, cell, compilation), threads=cell.threads if cell.HasField("threads") else None,
        )  # fmt: skip
        # The agent has them in the bundle itself.
        del candidate.bundle.operators[:]
        start = agent_pb2.StartRun(
            attempt_id=cell.attempts[-1].id, device_id=device.id, candidates=[candidate],
            measurement=job.spec.measurement if job.spec.HasField("measurement") else None,
            deadline_s=_deadline_s(job),
        )  # fmt: skip
        session = self._registry.session_of(device.id)
        self._runs.mark_sent(start.attempt_id)
        session.send(agent_pb2.ServerMessage(start_run=start))

    async def result(self, job: Job, cell: Cell) -> agent_pb2.CandidateResult:
        """Waits for what the last attempt gives for the cell.

        Raises:
            AttemptLost: the device gave it up, or was not heard of again.
            AttemptOverdue: its agent lives and does not answer.
            EtfarmError: why the attempt as a whole failed, as the agent says.
        """
        overdue_s = _deadline_s(job) + GRACE_S
        try:
            async with asyncio.timeout(overdue_s):
                result = await self._runs.result(cell.attempts[-1].id)
        except TimeoutError:
            raise AttemptOverdue(
                f"The agent gave no result within {overdue_s:g} s.", device=cell.attempts[-1].device_id
            ) from None
        if result.HasField("error"):
            raise from_proto(result.error)
        for candidate in result.candidates:
            if candidate.cell_id == cell.id:
                return candidate
        raise ResultMissing(f"The agent's result has nothing of cell {cell.id}.", cell=cell.id)

    def end(self, cell: Cell) -> None:
        """The cell's last attempt is over, and what it gave is written down: its agent may forget it, or has to stop it where
        it never answered. The device is free."""
        if not cell.attempts:
            return
        attempt = cell.attempts[-1]
        if not self._runs.has_answer(attempt.id):
            self.abandon(cell, "nobody waits for it any more")
            return
        with suppress(DeviceOffline):
            session = self._registry.session_of(attempt.device_id)
            session.send(agent_pb2.ServerMessage(ack=agent_pb2.Ack(attempt_id=attempt.id)))
        self._placement.free(attempt.id)

    def abandon(self, cell: Cell, reason: str) -> None:
        """Stops the cell's last attempt where it may still run, and frees the device."""
        if not cell.attempts:
            return
        attempt = cell.attempts[-1]
        if self._runs.knows(attempt.id) and not self._runs.has_answer(attempt.id):
            with suppress(DeviceOffline):
                cancel = agent_pb2.CancelRun(attempt_id=attempt.id, reason=reason)
                self._registry.session_of(attempt.device_id).send(agent_pb2.ServerMessage(cancel_run=cancel))
            self._placement.free(attempt.id)


def _deadline_s(job: Job) -> float:
    return job.spec.timeout_s if job.spec.HasField("timeout_s") else DEADLINE_S


def _check_file(path: Path, method: str, facts: MethodFacts) -> None:
    check_inputs(method, facts, tensors.decode(path.read_bytes()))


def _check_device(facts: compile_pb2.MethodFacts, bundle: agent_pb2.RunnerBundle, device: Device) -> None:
    missing = sorted(set(facts.backends) - set(bundle.backends))
    if missing:
        raise DeviceLacks(
            f"The program needs the backend {', '.join(missing)}, which {device.name} ({device.arch}) does not have.",
            f"It has {', '.join(sorted(bundle.backends)) or 'none'}: compile for one of them.",
            missing=",".join(missing), device=device.name,
        )  # fmt: skip
    missing = sorted(set(facts.operators) - set(bundle.operators))
    if missing and bundle.operators:
        error = DeviceLacks(
            f"The program needs the kernel {', '.join(missing)}, which {device.name} ({device.arch}) does not have.",
            "Change the model, or offer a runner that has it with `etfarm bundle add`.",
            missing=",".join(missing), device=device.name,
        )  # fmt: skip
        error.reason = "OPERATOR_MISSING"
        raise error
