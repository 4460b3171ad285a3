"""A cell's way: each step written down, device faults placed again, cancelling and restarting at any point."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.cache import FOUND_EARLIER, Outcome
from etfarm.server.compile.single_flight import Listener
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.analysis import CellAnalysis
from etfarm.server.jobs.cells.attempts import MAX_ATTEMPTS
from etfarm.server.jobs.cells.dispatch import Dispatch
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.cells.requirements import Requirements
from etfarm.server.jobs.cells.results import Results
from etfarm.server.jobs.cells.stages import CellStages
from etfarm.server.jobs.conductor import Conductor
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.state.engine import Database, DatabaseFull
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device, DeviceRunner
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import UserError

WAIT_S = 60.0
AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
FORWARD = compile_pb2.MethodFacts(operators=["aten::add.out"], backends=["XnnpackBackend"], planned_bytes=[64])


def compiled() -> compile_pb2.Compilation:
    made = compile_pb2.Compilation(key="key", facts=compile_pb2.ProgramFacts(methods={"forward": FORWARD}))
    made.program.pte.CopyFrom(artifact_of(b"pte"))
    made.program.data["weights"].CopyFrom(artifact_of(b"weights"))
    made.program.digest = "of the manifest"
    return made


class Compiles:
    """A compiler that answers at once, or when `gate` opens, or with `error`."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.outcome = Outcome(compiled())
        self.stop_after = ""
        self.calls = 0
        self.stopped = 0

    async def compile(self, candidate: object, *, listener: Listener, stop_after: str, **_: object) -> Outcome:
        self.calls += 1
        self.stop_after = stop_after
        listener.on_stage("QUANTIZE", 2.0, cached=True)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.stopped += 1
                raise
        if self.error is not None:
            raise self.error
        return self.outcome

    async def get(self, key: str) -> compile_pb2.Compilation:
        assert key == "key"
        return compiled()


class Analyzes:
    """An analyst that finds a latency."""

    def __init__(self) -> None:
        self.seen: list[agent_pb2.CandidateResult] = []
        self.gate: asyncio.Event | None = None

    async def analyze(self, *arguments: Any, **_: Any) -> report_pb2.Report:
        self.seen.append(arguments[4])
        if self.gate is not None:
            await self.gate.wait()
        found = report_pb2.Report()
        found.latency.p50_ns = 5.0
        return found


class Agent:
    """The agent's end of a connection, played by the test."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.session = AgentSession(f"agent-{name}", "host", lambda: 0.0)
        self.device = Device(id=name, name=name, arch="x86_64")
        self._messages = self.session.outgoing()

    async def connect(self, *active: str) -> Agent:
        hello = agent_pb2.Hello(agent_id=self.session.agent_id, devices=[self.device], active_attempts=active)
        await self.world.registry.connect(self.session, hello)
        return self

    async def leave(self) -> None:
        await self.world.registry.disconnect(self.session)

    async def heard(self) -> agent_pb2.ServerMessage:
        async with asyncio.timeout(WAIT_S):
            return await anext(self._messages)

    async def started(self) -> agent_pb2.StartRun:
        message = await self.heard()
        assert message.WhichOneof("message") == "start_run", message
        return message.start_run

    async def is_told(self, kind: str, attempt: str) -> None:
        message = await self.heard()
        assert message.WhichOneof("message") == kind, message
        assert getattr(message, kind).attempt_id == attempt

    def uploaded(self, data: bytes) -> common_pb2.Artifact:
        """The artifact of bytes that the agent has uploaded."""
        artifact = artifact_of(data)
        place = self.world.store.place(artifact.digest)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(data)
        return artifact

    def answer(self, run: agent_pb2.StartRun, error: common_pb2.Error | None = None, **more: Any) -> bool:
        result = agent_pb2.CandidateResult(cell_id=run.candidates[0].cell_id, error=error, **more)
        if run.HasField("measurement") and error is None:
            result.samples.CopyFrom(self.uploaded(array("q", [900]).tobytes()))
            result.iterations, result.duration_ns, result.stop_reason = 1, 1000, "MAX_TIME"
        return self.world.runs.deliver(
            agent_pb2.RunResult(attempt_id=run.attempt_id, device_id=run.device_id, candidates=[result])
        )


class World:
    """A server without its port and its children. `restarted` gives another one on the same database."""

    def __init__(self, database: Database, folder: Path, ids: Callable[[], str]) -> None:
        self.database, self.folder, self.ids = database, folder, ids
        self.store = store = Store(folder, database)
        self.announcer = Announcer()
        self.journal = Journal(database, self.announcer, self.now)
        self.log = JobLog(database, self.announcer, self.now)
        self.bundles = bundles = Bundles(store, database, folder)
        bundles._use(agent_pb2.RunnerBundle(arch="x86_64", backends=["XnnpackBackend"], operators=["aten::add.out"]))
        bundles.settled.set()
        self.runs = Runs(3600)
        self.registry = Registry(database, bundles, self.runs, self.now)
        self.compiler, self.analyst = Compiles(), Analyzes()
        self.conductor = self.conduct(self.compiler)

    def conduct(self, compiler: Any) -> Conductor:
        """A conductor of the world's jobs, with a compiler."""
        registry, runs, readers = self.registry, self.runs, Readers()
        self.requirements = Requirements(registry, self.bundles, self.store, readers)
        dispatch = Dispatch(registry, runs, Placement(registry, runs), self.bundles, self.requirements, self.ids)
        analysis = CellAnalysis(self.analyst, self.log, Thresholds())  # type: ignore[arg-type]
        self.stages = CellStages(
            self.journal, self.log, self.announcer, compiler, self.requirements, dispatch,
            Results(runs, dispatch, self.store, readers), analysis, MeasurementLock(),
            now=self.now, clock=lambda: 0.0, new_id=self.ids,
        )  # fmt: skip
        return Conductor(self.journal, self.announcer, self.stages)

    def now(self) -> datetime:
        return AT

    async def restarted(self) -> World:
        await self.conductor.stop()
        again = World(self.database, self.folder, self.ids)
        await again.registry.load()
        return again

    async def agent(self, name: str = "pi") -> Agent:
        return await Agent(self, name).connect()

    async def submit(self, cells: int = 1, *, on_device: bool = True, stop_after: str = "") -> job_pb2.Job:
        job = job_pb2.Job(id=f"job-{self.ids()}", owner="ann")
        job.spec.stop_after = stop_after
        job.create_time.FromDatetime(AT)
        job.spec.candidates.add(name="net").program.pte.CopyFrom(artifact_of(b"pte"))
        for index in range(cells):
            job.cells.add(
                id=f"{job.id}-{index}", job_id=job.id, index=index, state=model.QUEUED, version=1, method="forward",
                device_index=0 if on_device else None,
            )  # fmt: skip
        written, _ = await self.journal.submit(job, job.id)
        self.conductor.start(written)
        return written

    async def until(self, job: job_pb2.Job, state: int) -> None:
        """Waits until a cell of the job is in the state."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.journal.watch(job.id, 0):
                if event.cell.state == state:
                    return
        raise AssertionError("the job ended before")

    async def end(self, job: job_pb2.Job) -> tuple[list[str], list[report_pb2.Report]]:
        """The names of the states that the job's only cell went through, and its reports."""
        async with asyncio.timeout(WAIT_S):
            events = [event async for event in self.journal.watch(job.id, 0)]
        states = [common_pb2.CellState.Name(e.cell.state).removeprefix("CELL_STATE_") for e in events if e.HasField("cell")]
        return states, list(await self.journal.reports.of_job(job.id))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    database = Database(tmp_path / "farm.sqlite")
    await database.open()
    numbers = itertools.count()
    made = World(database, tmp_path, lambda: f"id{next(numbers):04}")
    yield made
    await made.conductor.stop()
    await made.log.flush()
    database.close()


def error(fault: str, reason: str = "X") -> common_pb2.Error:
    return common_pb2.Error(fault=common_pb2.Fault.Value(f"FAULT_{fault}"), reason=reason, message="No.")


WAY = ["COMPILING", "WAITING_FOR_DEVICE", "RUNNING", "ANALYZING", "SUCCEEDED"]


async def test_a_cell_goes_its_way_and_its_agent_may_forget_it_once_the_result_is_written(world: World) -> None:
    agent = await world.agent()
    job = await world.submit()
    run = await agent.started()
    assert (run.device_id, run.deadline_s, run.candidates[0].method) == ("pi", 600.0, "forward")
    assert run.candidates[0].program == compiled().program, "its data files too"
    assert world.conductor.live == 1
    assert agent.answer(run, threads=4)
    await agent.is_told("ack", run.attempt_id)
    states, (report,) = await world.end(job)
    assert states == WAY
    assert (report.state, report.attempt, report.threads, report.latency.p50_ns) == ("SUCCEEDED", run.attempt_id, 4, 5.0)
    assert world.runs.busy() == {}
    assert (await world.journal.results_of(run.attempt_id))[job.cells[0].id].threads == 4


async def test_a_compile_only_cell_ends_with_its_compilation(world: World) -> None:
    states, (report,) = await world.end(await world.submit(on_device=False))
    assert states == ["COMPILING", "SUCCEEDED"]
    assert report.HasField("compile") and not report.HasField("attempt")


async def test_a_cell_that_does_not_compile_fails_with_the_reason_and_a_report(world: World) -> None:
    world.compiler.error = UserError("Bad graph.", "Change it.", stage="TORCH_EXPORT")
    job = await world.submit()
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "FAILED"]
    assert (report.error.reason, report.error.stage, report.error.remedy) == ("INVALID_ARGUMENT", "TORCH_EXPORT", "Change it.")
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert cell.error == report.error
    assert cell.report_id == report.id


@pytest.mark.parametrize("cached", [False, True])
async def test_a_compilation_that_failed_leaves_its_stages_in_the_report_and_says_when_it_was_known(
    world: World, cached: bool
) -> None:
    failed = compile_pb2.Compilation(key="key", stages=[compile_pb2.Stage(stage="TORCH_EXPORT", duration_ms=5, where="SERVER")])
    failed.error.MergeFrom(common_pb2.Error(fault=common_pb2.FAULT_USER, reason="STAGE_FAILED", message="No.", remedy="Change."))
    world.compiler.outcome = Outcome(failed, cached=cached)
    job = await world.submit(on_device=False)
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "FAILED"]
    assert (report.error.reason, FOUND_EARLIER in report.error.remedy) == ("STAGE_FAILED", cached)
    assert (report.compile.cached, [stage.stage for stage in report.compile.stages]) == (cached, ["TORCH_EXPORT"])
    assert not report.compile.HasField("program")
    assert [phase.phase for phase in report.timeline] == ["COMPILE"]
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert (cell.compilation_key, cell.compile_cached) == ("key", cached)
    assert not cell.HasField("program")


async def test_a_compilation_that_stops_ends_without_a_program(world: World) -> None:
    world.compiler.outcome = Outcome(compile_pb2.Compilation(key="key", stopped_after="TORCH_EXPORT"))
    job = await world.submit(on_device=False, stop_after="TORCH_EXPORT")
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "SUCCEEDED"]
    assert world.compiler.stop_after == report.compile.stopped_after == "TORCH_EXPORT"


async def test_a_stage_of_an_earlier_compilation_is_told_as_such(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    job = await world.submit(on_device=False)
    async with asyncio.timeout(WAIT_S):
        said = await anext(event.progress async for event in world.journal.watch(job.id, 0) if event.HasField("progress"))
    assert (said.phase, said.duration_ms, said.message) == ("QUANTIZE", 2.0, "from an earlier compilation")
    world.compiler.gate.set()
    await world.end(job)


async def test_a_bug_fails_the_cell_by_the_farms_fault(world: World) -> None:
    world.compiler.error = ZeroDivisionError("oops")
    states, (report,) = await world.end(await world.submit())
    assert states[-1] == "FAILED"
    assert (report.error.fault, "oops" in report.error.message) == (common_pb2.FAULT_FARM, True)


async def test_a_users_fault_on_the_device_is_not_tried_again(world: World) -> None:
    agent = await world.agent()
    job = await world.submit()
    run = await agent.started()
    agent.answer(run, error("USER", "PROGRAM_CRASHED"))
    await agent.is_told("ack", run.attempt_id)
    states, (report,) = await world.end(job)
    assert states == [*WAY[:3], "FAILED"]
    assert report.error.reason == "PROGRAM_CRASHED"


async def test_a_device_fault_places_the_cell_again_elsewhere_and_nothing_of_the_first_attempt_stays(world: World) -> None:
    pi, xl = await world.agent("pi"), await world.agent("xl")
    job = await world.submit()
    first = await pi.started()
    pi.answer(first, error("DEVICE"), threads=7, outputs=artifact_of(b"wrong"))
    second = await xl.started()
    assert second.attempt_id != first.attempt_id
    assert not pi.answer(first), "the late answer of an attempt that is over"
    await xl.leave()
    xl.session.end()
    world.registry.gone(xl.session, "xl")
    await (await Agent(world, "xl").connect()).leave()  # it comes back without the run
    third = await _next_start(pi)
    pi.answer(third, threads=2)
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", *["WAITING_FOR_DEVICE", "RUNNING"] * 3, "ANALYZING", "SUCCEEDED"]
    assert (report.attempt, report.threads) == (third.attempt_id, 2)
    assert not report.HasField("outputs")
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert not cell.HasField("outputs")
    assert [attempt.device_id for attempt in cell.attempts] == ["pi", "xl", "pi"]
    assert [attempt.error.reason for attempt in cell.attempts] == ["X", "ATTEMPT_LOST", ""]
    assert not (await world.journal.results_of(second.attempt_id))[job.cells[0].id].threads, "a lost attempt has no result"


async def _next_start(agent: Agent) -> agent_pb2.StartRun:
    while (message := await agent.heard()).WhichOneof("message") != "start_run":
        pass
    return message.start_run


async def test_after_two_device_faults_more_the_cell_fails_with_the_last_one(world: World) -> None:
    agent = await world.agent()
    job = await world.submit()
    for number in range(MAX_ATTEMPTS):
        agent.answer(await _next_start(agent), error("DEVICE", f"FAULT_{number}"))
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", *["WAITING_FOR_DEVICE", "RUNNING"] * 3, "FAILED"]
    assert report.error.reason == "FAULT_2"
    assert world.runs.busy() == {}


async def test_a_program_that_the_device_cannot_run_is_refused_without_being_sent(world: World) -> None:
    agent = await world.agent()
    world.registry._bundles._use(agent_pb2.RunnerBundle(arch="x86_64", backends=["Other"]))
    states, (report,) = await world.end(await world.submit())
    assert states[-1] == "FAILED"
    assert (report.error.reason, report.error.metadata["missing"]) == ("BACKEND_MISSING", "XnnpackBackend")
    assert world.registry.get("pi").attempt_id == ""
    assert agent.session._outgoing.empty(), "nothing was said to the agent"


PYTHON = DeviceRunner(kind="python", backends=["XnnpackBackend"], operators=["aten::add.out"])


async def test_without_a_bundle_a_run_is_sent_for_the_devices_own_runner(world: World) -> None:
    world.bundles._by_arch.clear()
    agent = Agent(world, "pi")
    agent.device.own_runners.append(PYTHON)
    await agent.connect()
    job = await world.submit()
    run = await agent.started()
    assert not run.candidates[0].HasField("bundle")
    agent.answer(run)
    states, _ = await world.end(job)
    assert states[-1] == "SUCCEEDED"


async def test_without_a_bundle_a_program_that_the_own_runner_lacks_a_backend_for_is_refused(world: World) -> None:
    world.bundles._by_arch.clear()
    agent = Agent(world, "pi")
    agent.device.own_runners.add(kind="python", backends=["Other"])
    await agent.connect()
    states, (report,) = await world.end(await world.submit())
    assert (states[-1], report.error.reason) == ("FAILED", "BACKEND_MISSING")
    assert agent.session._outgoing.empty(), "nothing was said to the agent"


async def test_without_a_bundle_a_device_with_a_runner_of_its_own_is_preferred(world: World) -> None:
    world.bundles._by_arch.clear()
    bare = await world.agent("a")
    agent = Agent(world, "pi")
    agent.device.own_runners.append(PYTHON)
    await agent.connect()
    await world.submit()
    assert (await agent.started()).device_id == "pi"
    assert bare.session._outgoing.empty()


async def test_without_a_bundle_a_device_without_a_runner_of_its_own_is_refused(world: World) -> None:
    world.bundles._by_arch.clear()
    agent = Agent(world, "pi")
    agent.device.own_runners.add(kind="of a later version", backends=["XnnpackBackend"])
    await agent.connect()
    states, (report,) = await world.end(await world.submit())
    assert (states[-1], report.error.reason) == ("FAILED", "BUNDLE_MISSING")


async def test_a_bundle_that_is_being_built_is_waited_for_though_the_device_has_a_runner(world: World) -> None:
    bundle = world.bundles._by_arch.pop("x86_64")
    world.bundles._own_arch = "x86_64"
    world.bundles.settled.clear()
    agent = Agent(world, "pi")
    agent.device.own_runners.append(PYTHON)
    await agent.connect()
    job = await world.submit()
    await world.until(job, model.RUNNING)
    assert agent.session._outgoing.empty()
    world.bundles._use(bundle)
    world.bundles.settled.set()
    assert (await agent.started()).candidates[0].HasField("bundle")


@pytest.mark.parametrize("state", ["COMPILING", "WAITING_FOR_DEVICE", "RUNNING", "ANALYZING"])
async def test_cancelling_ends_the_cell_wherever_it_is(world: World, state: str) -> None:
    gate = asyncio.Event()
    if state == "COMPILING":
        world.compiler.gate = gate
    if state == "ANALYZING":
        world.analyst.gate = gate
    agent = await world.agent() if state in ("RUNNING", "ANALYZING") else None
    job = await world.submit()
    await world.until(job, common_pb2.CellState.Value(f"CELL_STATE_{state}") if state != "ANALYZING" else model.RUNNING)
    run = await agent.started() if agent is not None else None
    if state == "ANALYZING":
        assert agent is not None and run is not None
        agent.answer(run)
        await world.until(job, model.ANALYZING)
    async with asyncio.timeout(WAIT_S):
        await world.conductor.cancel(await world.journal.get(job.id, EVERYTHING))
    states, (report,) = await world.end(job)
    assert states[-2:] == [state, "CANCELLED"]
    assert (report.state, report.error.reason) == ("CANCELLED", "CANCELLED")
    assert world.runs.busy() == {}
    assert world.conductor.live == 0
    assert world.compiler.stopped == (state == "COMPILING")
    if agent is not None and run is not None:
        await agent.is_told("ack" if state == "ANALYZING" else "cancel_run", run.attempt_id)


async def test_cancelling_in_the_moment_of_starting_ends_the_cell_too(world: World) -> None:
    job = await world.submit(3)
    async with asyncio.timeout(WAIT_S):
        await world.conductor.cancel(job)
    assert {cell.state for cell in (await world.journal.get(job.id, EVERYTHING)).cells} == {model.CANCELLED}
    assert len(await world.journal.reports.of_job(job.id)) == 3


async def test_cancelling_while_the_last_change_is_being_written_leaves_it_as_it_was_decided(world: World) -> None:
    write, writing, gate = world.journal.change, asyncio.Event(), asyncio.Event()

    async def slow(after: job_pb2.Cell, **more: Any) -> job_pb2.Cell:
        if after.state in model.TERMINAL:
            writing.set()
            await gate.wait()
        return await write(after, **more)

    world.journal.change = slow  # type: ignore[method-assign]
    job = await world.submit(on_device=False)
    async with asyncio.timeout(WAIT_S):
        await writing.wait()
        cancelling = asyncio.create_task(world.conductor.cancel(job))
        for _ in range(5):
            await asyncio.sleep(0)  # the cancellation arrives
        gate.set()
        await cancelling
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "SUCCEEDED"]
    assert report.state == "SUCCEEDED"


async def test_cancelling_what_is_over_changes_nothing(world: World) -> None:
    job = await world.submit(on_device=False)
    await world.end(job)
    before = await world.journal.get(job.id, EVERYTHING)
    await world.conductor.cancel(before)
    assert await world.journal.get(job.id, EVERYTHING) == before


async def test_live_jobs_are_counted_and_not_their_cells(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    jobs = [await world.submit(3), await world.submit(2)]
    assert world.conductor.live == 2
    for job in jobs:
        await world.conductor.cancel(job)
    assert world.conductor.live == 0


@pytest.mark.parametrize("state", ["COMPILING", "WAITING_FOR_DEVICE", "ANALYZING"])
async def test_a_new_server_goes_on_where_the_old_one_was(world: World, state: str) -> None:
    if state == "COMPILING":
        world.compiler.gate = asyncio.Event()
    world.analyst.gate = asyncio.Event()
    job = await world.submit()
    if state == "ANALYZING":
        agent = await world.agent()
        agent.answer(await agent.started(), threads=3)
    await world.until(job, common_pb2.CellState.Value(f"CELL_STATE_{state}"))
    again = await world.restarted()
    await again.conductor.resume()
    if state != "ANALYZING":
        agent = await again.agent()
        agent.answer(await agent.started(), threads=3)
    states, (report,) = await again.end(job)
    assert states == WAY
    assert (report.state, report.threads) == ("SUCCEEDED", 3)
    assert again.compiler.calls == (state == "COMPILING")
    await again.conductor.stop()


async def test_a_new_server_waits_for_what_runs_before_any_agent_can_come_back(world: World) -> None:
    agent = await world.agent()
    job = await world.submit()
    run = await agent.started()
    again = await world.restarted()
    await again.conductor.resume()
    assert again.runs.knows(run.attempt_id), "else the agent would be told to stop what it runs"
    back = await Agent(again, "pi").connect(run.attempt_id)
    assert again.registry.get("pi").attempt_id == run.attempt_id
    back.answer(run, threads=3)
    await back.is_told("ack", run.attempt_id)
    states, (report,) = await again.end(job)
    assert states == WAY
    assert (report.attempt, report.threads) == (run.attempt_id, 3)
    await again.conductor.stop()


async def test_a_new_server_places_again_what_the_agent_no_longer_runs(world: World) -> None:
    agent = await world.agent()
    job = await world.submit()
    run = await agent.started()
    again = await world.restarted()
    await again.conductor.resume()
    back = await Agent(again, "pi").connect()
    second = await _next_start(back)
    assert second.attempt_id != run.attempt_id
    back.answer(second)
    assert (await again.end(job))[0] == [*WAY[:3], *WAY[1:]]
    await again.conductor.stop()


async def test_an_end_that_cannot_be_written_is_written_when_it_can(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etfarm.server.jobs.cells.stages.RETRY_S", 0.0)
    write, failures = world.journal.change, [DatabaseFull("The disk is full."), DatabaseFull("The disk is full.")]

    async def full(after: job_pb2.Cell, **more: Any) -> job_pb2.Cell:
        if after.state in model.TERMINAL and failures:
            raise failures.pop()
        return await write(after, **more)

    world.journal.change = full  # type: ignore[method-assign]
    states, _ = await world.end(await world.submit(on_device=False))
    assert states == ["COMPILING", "SUCCEEDED"]
    assert not failures


async def test_live_jobs_are_counted_in_a_scope(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    job = await world.submit(3)
    assert world.conductor.count_live(Scope(frozenset({"default"}))) == 1
    assert world.conductor.count_live(Scope(frozenset({"vision"}))) == 0
    await world.conductor.cancel(job)
