"""A cell's time on a device: what it needs is checked, it is placed, started, and its result fetched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.answers import facts_of
from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.result import MethodFacts
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import DeviceOffline
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runners import Runner, demand_runner, known_runner
from etfarm.server.devices.runs import Progressed, Runs
from etfarm.server.devices.schedule import Waiting, open_to, own_scope, scopes_of
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import Way
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.cells.plausibility import ImplausibleResult, Plan, artifacts_of, check_attempt, check_candidate
from etfarm.server.state.engine import retry_when_full
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Attempt, Cell, Job, Progress
from etfarm.wire import digest, selectors, tensors
from etfarm.wire.errors import DeviceError, EtfarmError, UserError
from etfarm.wire.status import from_proto

DEADLINE_S = 600.0
"""How long an attempt may take for each of its candidates where the job does not say."""

GRACE_S = 300.0
"""How long after its deadline an attempt's result may come: uploads over a bad link, reconnections."""

ProgressTold = Callable[[str, Progress], None]
"""Told (job id, progress)."""
LineTold = Callable[[str, str, str, str], None]
"""Told (job id, cell id, source, text)."""


class MethodMissing(UserError):
    """The program has no method of the name."""

    reason = "METHOD_MISSING"

    def __init__(self, what: str, method: str, known: Iterable[str]) -> None:
        super().__init__(what, f"It has: {', '.join(sorted(known))}. Choose with --method (methods=).", method=method)


class DeviceLacks(UserError):
    """The device's runner has no such backend or kernel."""

    reason = "BACKEND_MISSING"


class AttemptOverdue(DeviceError):
    """The agent is alive, and long after the attempt's deadline there is no result."""

    reason = "ATTEMPT_OVERDUE"


class ResultMissing(DeviceError):
    """The agent answered without a result for the cell."""

    reason = "RESULT_MISSING"


_RESULT_BYTES: Final = 16 << 20
_NUMERICS_BYTES: Final = 64 << 20
_OUTPUT_BYTES: Final = 256 << 20
"""What the estimate of a result counts: samples and trace, recorded values, and at most for one output."""


class Execution:
    """Runs cells on devices."""

    def __init__(
        self,
        registry: Registry,
        runs: Runs,
        placement: Placement,
        bundles: Bundles,
        store: Store,
        new_id: Callable[[], str],
        readers: Readers | None = None,
    ) -> None:
        self._readers = readers or Readers()
        self._registry = registry
        self._runs = runs
        self._placement = placement
        self._bundles = bundles
        self._store = store
        self._new_id = new_id
        self._sharing: dict[str, set[str]] = {}
        """By attempt, the cells that are not done with it."""

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
            raise MethodMissing(f"{cell.candidate_name} has no method {cell.method!r}.", cell.method, methods)
        if strangers := sorted(set(job.spec.inputs) - set(methods)):
            what = f"The inputs are for the method {strangers[0]!r}, which {cell.candidate_name} does not have."
            raise MethodMissing(what, strangers[0], methods)
        given = job.spec.inputs.get(cell.method)
        if given is not None:
            await self._store.require_whole([given.digest])
            path = self._store.path(given.digest)
            await self._readers.run(_check_file, path, cell.method, facts_of(methods[cell.method]))

    def inputs_of(self, job: Job, cell: Cell, compilation: compile_pb2.Compilation) -> common_pb2.Artifact | None:
        """What the program is run on: the job's inputs, else the model's own; None where the runner makes them."""
        return job.spec.inputs.get(cell.method) or compilation.example_inputs.get(cell.method)

    async def set_room_aside(self, ways: Sequence[Way], progress: ProgressTold) -> None:
        """Wait until the server's disk has room for what an attempt of all may give, and keep it until `give_room_back`."""

        def on_wait(why: str) -> None:
            for way in ways:
                progress(way.job.id, Progress(cell_id=way.cell.id, actor="SERVER", phase="WAIT_FOR_ROOM", message=why))

        await self._store.wait_for_room(ways[0].cell.id, sum(map(_result_bytes, ways)), on_wait)

    def give_room_back(self, ways: Sequence[Way]) -> None:
        """Keep no room for the results of an attempt any more; harmless where none was."""
        self._store.room.release_results(ways[0].cell.id)

    async def place(self, ways: Sequence[Way], progress: ProgressTold, line: LineTold) -> tuple[Device, Attempt]:
        """Waits for a device that can run the programs of all, and occupies it with a new attempt.

        Raises:
            DeviceLacks: no device that the selector matches can.
        """
        attempt_id = self._new_id()
        job, first = ways[0].job, ways[0].cell
        selector = selectors.parse(first.selector)

        def on_wait(why: str) -> None:
            for way in ways:
                progress(job.id, Progress(cell_id=way.cell.id, actor="SERVER", phase="WAIT_FOR_DEVICE", message=why))

        waiting = Waiting(
            cell_id=first.id,
            selector=selector,
            priority=job.spec.priority,
            order=(job.submitted_at.seconds * 10**9 + job.submitted_at.nanos, first.index),
            avoid=frozenset(attempt.device_id for way in ways for attempt in way.cell.attempts),
            unfit=self._unfit_for_all(selector, ways),
            project=job.project,
        )
        listener = self._listener(job, [way.cell.id for way in ways], progress, line)
        device = await self._placement.device(waiting, attempt_id, listener, on_wait)
        self._sharing[attempt_id] = {way.cell.id for way in ways}
        return device, Attempt(id=attempt_id, device_id=device.id)

    def lacking(self, ways: Sequence[Way]) -> dict[str, EtfarmError]:
        """Why no device that the selector matches can run a cell's program, for those cells, as far as runners are known."""
        found: dict[str, EtfarmError] = {}
        for way in ways:
            try:
                self.unfit(selectors.parse(way.cell.selector), _facts(way), way.job.project)
            except DeviceLacks as error:
                found[way.cell.id] = error
        return found

    def _unfit_for_all(self, selector: selectors.Selector, ways: Sequence[Way]) -> frozenset[str]:
        project = ways[0].job.project
        unfit = frozenset[str]().union(*(self.unfit(selector, _facts(way), project) for way in ways))
        matching = [device for device in open_to(project, self._registry.devices()) if selector.matches(device)]
        if matching and all(not unfit.isdisjoint(scopes_of(device)) for device in matching):
            raise DeviceLacks(
                "No device that matches can run all of the candidates, though each runs somewhere.",
                "Measure them without --interleave, or choose other devices or recipes.",
            )
        return unfit

    def unfit(self, selector: selectors.Selector, facts: compile_pb2.MethodFacts, project: str) -> frozenset[str]:
        """Architectures of the matching devices, and devices with a runner of their own, whose runner cannot run a method, as
        far as runners are known. Devices without any are among them where another one can run it. Devices that are restricted to
        other projects are none.

        Raises:
            DeviceLacks: no matching device's can.
        """
        lacking: dict[str, DeviceLacks] = {}
        able: set[str] = set()
        unknown: list[Device] = []
        for device in open_to(project, self._registry.devices()):
            if not selector.matches(device):
                continue
            runner = known_runner(self._bundles, device)
            if runner is None:
                unknown.append(device)
            elif runner.scope not in able and runner.scope not in lacking:
                try:
                    check_device(facts, runner, device)
                    able.add(runner.scope)
                except DeviceLacks as error:
                    lacking[runner.scope] = error
        if lacking and not able and not unknown:
            raise next(iter(lacking.values()))
        without = {own_scope(device.id) for device in unknown if able and not self._bundles.is_coming(device.arch)}
        return frozenset(lacking) | without

    def rejoin(self, job: Job, progress: ProgressTold, line: LineTold) -> None:
        """Takes up the job's attempts that an earlier server started; their agents are waited for."""
        for cell in job.cells:
            if cell.state != model.RUNNING:
                continue
            attempt = cell.attempts[-1]
            if self._runs.knows(attempt.id):
                continue  # the attempt of a cell before it
            sharing = [each.id for each in job.cells if each.state == model.RUNNING and each.attempts[-1].id == attempt.id]
            self._sharing[attempt.id] = set(sharing)
            listener = self._listener(job, sharing, progress, line)
            self._runs.begin(attempt.id, attempt.device_id, listener, sent=True, project=job.project)
            self._runs.device_went(attempt.device_id)

    def is_on_this_machine(self, device: Device) -> bool:
        """Whether the device's agent runs on the server's own machine."""
        return self._registry.is_on_this_machine(device.id)

    def device_of(self, cell: Cell) -> Device:
        """The device of the cell's last attempt."""
        return self._registry.get(cell.attempts[-1].device_id)

    def _listener(self, job: Job, cells: Sequence[str], progress: ProgressTold, line: LineTold) -> Progressed:
        def on_progress(said: agent_pb2.RunProgress) -> None:
            device = self._registry.get(said.device_id)
            cell_id = said.cell_id if said.cell_id in cells else cells[0]
            told = Progress(cell_id=cell_id, actor=device.name, phase=said.phase, message=said.message)
            for name in ("duration_ms", "done", "total"):
                if said.HasField(name):
                    setattr(told, name, getattr(said, name))
            progress(job.id, told)
            for text in said.log_lines:
                line(job.id, cell_id, "RUNNER", text)

        return on_progress

    @property
    def starting(self) -> str:
        """What the farm still does before anything can run, for people; empty when nothing."""
        return self._bundles.starting

    async def start(self, ways: Sequence[Way]) -> dict[str, EtfarmError]:
        """Sends the last attempt of ways that share it to its device.

        Returns:
            By cell, why the device's runner cannot run its program (DeviceLacks); these were not sent.

        Raises:
            BundleMissing: the farm has no runner for the device.
            DeviceOffline: the device went meanwhile.
        """
        job, device = ways[0].job, ways[0].device
        assert device is not None
        runner = await demand_runner(self._bundles, device)
        errors: dict[str, EtfarmError] = {}
        start = agent_pb2.StartRun(
            attempt_id=ways[0].cell.attempts[-1].id, device_id=device.id,
            measurement=job.spec.measurement if job.spec.HasField("measurement") else None,
        )  # fmt: skip
        for way in ways:
            cell, compilation = way.cell, way.compilation
            assert compilation is not None
            try:
                check_device(_facts(way), runner, device)
            except DeviceLacks as error:
                errors[cell.id] = error
                continue
            candidate = start.candidates.add(
                cell_id=cell.id, program=compilation.program, method=cell.method, bundle=runner.bundle,
                inputs=self.inputs_of(job, cell, compilation), threads=cell.threads if cell.HasField("threads") else None,
                numerics_program=way.numerics.program if way.numerics is not None else None,
            )  # fmt: skip
            if runner.bundle is not None:
                # The agent has them in the bundle itself.
                del candidate.bundle.operators[:]
        if start.candidates:
            start.deadline_s = _deadline_s(job, len(start.candidates))
            session = self._registry.session_of(device.id)
            self._runs.mark_sent(start.attempt_id)
            self.permit(ways, bundle=runner.bundle)
            session.send(agent_pb2.ServerMessage(start_run=start))
        return errors

    def permit(self, ways: Sequence[Way], *, bundle: agent_pb2.RunnerBundle | None = None) -> None:
        """Let the agent of the last attempt read what the programs of ways that share it need.

        Args:
            bundle: the runner that it is sent; None where it has it, or is known not to need one.
        """
        needed = [] if bundle is None else [bundle.artifact]
        for way in ways:
            assert way.compilation is not None
            inputs = self.inputs_of(way.job, way.cell, way.compilation)
            programs = [way.compilation.program, *([way.numerics.program] if way.numerics is not None else [])]
            needed += [artifact for program in programs for artifact in (program.pte, *program.data.values())]
            needed += [] if inputs is None else [inputs]
        self._runs.permit(ways[0].cell.attempts[-1].id, [artifact.digest for artifact in needed])

    async def results(self, ways: Sequence[Way]) -> dict[str, agent_pb2.CandidateResult | EtfarmError]:
        """Waits for what the last attempt gives for ways that share it; ResultMissing for those that it gives nothing for.

        Raises:
            AttemptLost: the device gave it up, or was not heard of again.
            AttemptOverdue: its agent lives and does not answer.
            EtfarmError: why the attempt as a whole failed, as the agent says.
        """
        attempt = ways[0].cell.attempts[-1]
        overdue_s = _deadline_s(ways[0].job, len(ways)) + GRACE_S
        try:
            async with asyncio.timeout(overdue_s):
                result = await self._runs.result(attempt.id)
        except TimeoutError:
            raise AttemptOverdue(f"The agent gave no result within {overdue_s:g} s.", device=attempt.device_id) from None
        if result.HasField("error"):
            raise from_proto(result.error)
        plan = self._plan(ways)
        check_attempt(result, plan)
        given = {candidate.cell_id: candidate for candidate in result.candidates}
        return {way.cell.id: await self._checked(given.get(way.cell.id), way, plan) for way in ways}

    def _plan(self, ways: Sequence[Way]) -> Plan:
        """What the last attempt of ways that share it was asked for."""
        job, attempt = ways[0].job, ways[0].cell.attempts[-1]
        elapsed_s = self._runs.elapsed_s(attempt.id)
        if elapsed_s is None:
            # An earlier server sent it, by whose clock the cell was written down.
            elapsed_s = max(0.0, time.time() - attempt.started_at.ToNanoseconds() / 1e9)
        return Plan(
            cells=frozenset({way.cell.id for way in ways} | self._sharing.get(attempt.id, set())),
            elapsed_s=elapsed_s,
            measurement=job.spec.measurement if job.spec.HasField("measurement") else None,
            planned_bytes=max(sum(_facts(way).planned_bytes) for way in ways),
        )

    async def _checked(
        self, candidate: agent_pb2.CandidateResult | None, way: Way, plan: Plan
    ) -> agent_pb2.CandidateResult | EtfarmError:
        """Return a candidate's result, or why it does not count. Its job's project holds the files of one that counts."""
        cell_id = way.cell.id
        if candidate is None:
            return ResultMissing(f"The agent's result has nothing of cell {cell_id}.", cell=cell_id)
        holder = self._runs.holder_of(way.cell.attempts[-1].id)
        project = way.job.project or DEFAULT_PROJECT
        own = [
            artifact.digest
            for artifact in artifacts_of(candidate)
            if digest.is_digest(artifact.digest)
            and (not holder or await self._store.is_held(artifact.digest, (holder, project)))
            and self._store.has(artifact.digest)
        ]
        try:
            foreign = next((artifact.digest for artifact in artifacts_of(candidate) if artifact.digest not in own), None)
            if foreign is not None and not candidate.HasField("error"):
                raise ImplausibleResult(f"it names the artifact {foreign[:12]!r}, which its agent did not upload")
            await self._readers.run(check_candidate, candidate, plan, self._store.path)
        except ImplausibleResult as error:
            return error
        # From now on reports refer to them, whatever a session that names them too does.
        await retry_when_full(lambda: self._store.take_results(project, own, way.job.owner))
        return candidate

    def end(self, cell: Cell) -> None:
        """The cell's last attempt is over, and what it gave is written down: once that is so for all that share it, its agent
        may forget it, or has to stop it where it never answered. The device is free then."""
        if not cell.attempts:
            return
        attempt = cell.attempts[-1]
        if not self._runs.has_answer(attempt.id):
            self.abandon(cell, "nobody waits for it any more")
            return
        if not self._is_last(attempt.id, cell):
            return
        with suppress(DeviceOffline):
            session = self._registry.session_of(attempt.device_id)
            session.send(agent_pb2.ServerMessage(ack=agent_pb2.Ack(attempt_id=attempt.id)))
        self._placement.free(attempt.id)

    def abandon(self, cell: Cell, reason: str) -> None:
        """Stops the cell's last attempt where it may still run and no other cell shares it, and frees the device."""
        if not cell.attempts:
            return
        attempt = cell.attempts[-1]
        if self._runs.knows(attempt.id) and not self._runs.has_answer(attempt.id) and self._is_last(attempt.id, cell):
            with suppress(DeviceOffline):
                cancel = agent_pb2.CancelRun(attempt_id=attempt.id, reason=reason)
                self._registry.session_of(attempt.device_id).send(agent_pb2.ServerMessage(cancel_run=cancel))
            self._placement.free(attempt.id)

    def _is_last(self, attempt_id: str, cell: Cell) -> bool:
        """Whether no other cell shares the attempt any more; `cell` does not from now on."""
        sharing = self._sharing.get(attempt_id, set())
        sharing.discard(cell.id)
        if not sharing:
            self._sharing.pop(attempt_id, None)
        return not sharing


def _result_bytes(way: Way) -> int:
    """Return what a cell's result may take on the server's disk: outputs, samples, trace and, with numerics, every value."""
    outputs = sum(_most_bytes(spec) for spec in _facts(way).outputs)
    return _RESULT_BYTES + 2 * outputs + (_NUMERICS_BYTES if way.job.spec.measurement.numerics else 0)


def _most_bytes(spec: compile_pb2.ValueSpec) -> int:
    # Dimensions without a finite maximum, and hostile ones, must not keep a job waiting for room that no disk has.
    size_bytes = 8
    for dim in spec.dims:
        size_bytes *= max(dim.max, 0)
        if not 0 < size_bytes < _OUTPUT_BYTES:
            break
    return min(size_bytes, _OUTPUT_BYTES)


def _facts(way: Way) -> compile_pb2.MethodFacts:
    assert way.compilation is not None
    return way.compilation.facts.methods[way.cell.method]


def _deadline_s(job: Job, candidates: int) -> float:
    """Of an attempt over so many candidates, each of which needs its time."""
    return job.spec.timeout_s if job.spec.HasField("timeout_s") else DEADLINE_S * max(1, candidates)


def _check_file(path: Path, method: str, facts: MethodFacts) -> None:
    check_inputs(method, facts, tensors.read_header(path))


def check_device(facts: compile_pb2.MethodFacts, runner: Runner, device: Device) -> None:
    """Refuses a method that a device's runner cannot run.

    Raises:
        DeviceLacks: a backend (BACKEND_MISSING) or a kernel (OPERATOR_MISSING) is not there.
    """
    missing = sorted(set(facts.backends) - set(runner.backends))
    if missing:
        raise DeviceLacks(
            f"The program needs the backend {', '.join(missing)}, which {device.name} ({device.arch}) does not have.",
            f"It has {', '.join(sorted(runner.backends)) or 'none'}: compile for one of them.",
            missing=",".join(missing), device=device.name,
        )  # fmt: skip
    missing = sorted(set(facts.operators) - set(runner.operators))
    if missing and runner.operators:
        error = DeviceLacks(
            f"The program needs the kernel {', '.join(missing)}, which {device.name} ({device.arch}) does not have.",
            "Change the model, or offer a runner that has it with `etfarm bundle add`.",
            missing=",".join(missing), device=device.name,
        )  # fmt: skip
        error.reason = "OPERATOR_MISSING"
        raise error
