"""A server without its port and its children: cells on a real database, with the agent's end in the test's hands."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.cache import Outcome
from etfarm.server.compile.single_flight import Listener
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.health.standing import HealthPolicy
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.jobs.cells.analysis import CellAnalysis
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.cells.dispatch import Dispatch
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.cells.requirements import Requirements
from etfarm.server.jobs.cells.results import Results
from etfarm.server.jobs.cells.stages import CellStages
from etfarm.server.jobs.conductor import Conductor
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.takeups import Hands, Takeups
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.state.engine import Database
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire.chunks import artifact_of
from tests.support.databases import new_database, opened
from tests.support.jobs import AT, queued_job, submit

WAIT_S = 60.0
FORWARD = compile_pb2.MethodFacts(operators=["aten::add.out"], backends=["XnnpackBackend"], planned_bytes=[64])

BUNDLE = agent_pb2.RunnerBundle(arch="x86_64", backends=["XnnpackBackend"], operators=["aten::add.out"])


def compiled() -> compile_pb2.Compilation:
    created = compile_pb2.Compilation(key="key", facts=compile_pb2.ProgramFacts(methods={"forward": FORWARD}))
    created.program.pte.CopyFrom(artifact_of(b"pte"))
    created.program.data["weights"].CopyFrom(artifact_of(b"weights"))
    created.program.digest = "of the manifest"
    return created


class Compiles:
    """A compiler that answers at once, or when `gate` opens, or with `error`."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.outcome = Outcome(compiled())
        self.calls = 0
        self.stopped = 0

    async def compile(self, candidate: object, *, listener: Listener, **_: object) -> Outcome:
        self.calls += 1
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
        result = report_pb2.Report()
        result.latency.p50_ns = 5.0
        return result


class Agent:
    """The agent's end of a connection, played by the test."""

    def __init__(self, world: World, name: str = "pi", **device: Any) -> None:
        self.world = world
        self.session = AgentSession(f"agent-{name}", "host", lambda: 0.0)
        self.device = Device(id=name, name=name, arch="x86_64", **device)
        self._messages = self.session.outgoing()

    async def connect(self, *active: str) -> Agent:
        hello = agent_pb2.Hello(agent_id=self.session.agent_id, devices=[self.device], active_attempts=active)
        await self.world.registry.connect(self.session, hello)
        return self

    async def leave(self) -> None:
        await self.world.registry.disconnect(self.session)

    async def next_message(self) -> agent_pb2.ServerMessage:
        async with asyncio.timeout(WAIT_S):
            return await anext(self._messages)

    async def started(self) -> agent_pb2.StartRun:
        message = await self.next_message()
        assert message.WhichOneof("message") == "start_run", message
        return message.start_run

    async def started_after_acks(self) -> agent_pb2.StartRun:
        """Return the next run that the server sends, whatever it acknowledges before."""
        while (message := await self.next_message()).WhichOneof("message") != "start_run":
            pass
        return message.start_run

    async def finish(self, error: common_pb2.Error | None = None, **more: Any) -> agent_pb2.StartRun:
        """Settle the next run; return it."""
        run = await self.started()
        await self.settle(run, error, **more)
        return run

    async def settle(self, run: agent_pb2.StartRun, error: common_pb2.Error | None = None, **more: Any) -> None:
        """Answer a run, which the server acknowledges."""
        assert self.answer(run, error, **more)
        await self.expect_message("ack", run.attempt_id)

    async def expect_message(self, kind: str, attempt: str) -> None:
        message = await self.next_message()
        assert message.WhichOneof("message") == kind, message
        assert getattr(message, kind).attempt_id == attempt

    def uploaded(self, data: bytes) -> common_pb2.Artifact:
        """Return the artifact of bytes that the agent has uploaded."""
        artifact = artifact_of(data)
        place = self.world.store.place(artifact.digest)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(data)
        return artifact

    def answer(self, run: agent_pb2.StartRun, error: common_pb2.Error | None = None, **more: Any) -> bool:
        result = agent_pb2.CandidateResult(cell_id=run.candidates[0].cell_id, error=error, **more)
        if run.HasField("measurement") and error is None:
            result.samples.CopyFrom(self.uploaded(array("q", [900]).tobytes()))
            result.iterations, result.duration_ns, result.stop_reason = 1, 1000, common_pb2.STOP_REASON_MAX_TIME
        return self.world.runs.deliver(
            agent_pb2.RunResult(attempt_id=run.attempt_id, device_id=run.device_id, candidates=[result])
        )


class World:
    """A server without its port and its children. `restarted` gives another one on the same database."""

    def __init__(self, database: Database, folder: Path, ids: Callable[[], str], *bundles_in_use: agent_pb2.RunnerBundle) -> None:
        self.database, self.folder, self.ids = database, folder, ids
        self.at = AT
        self.store = store = Store(folder, database)
        self.announcer = Announcer()
        self.journal = Journal(database, self.announcer, self.now)
        self.log = JobLog(database, self.announcer, self.now)
        self.bundles = bundles = Bundles(store, database, folder, own_arch="x86_64")
        for bundle in bundles_in_use:
            bundles.use(bundle)
        bundles.settled.set()
        self.runs = Runs(3600)
        self.health = HealthBook(database, self.now, HealthPolicy())
        self.registry = Registry(database, bundles, self.runs, self.now, fill_health=self.health.apply)
        self.compiler, self.analyst = Compiles(), Analyzes()
        self.hands = Hands(Takeups(database), folder)
        self.conductor = self.conduct(self.compiler)
        self.successor: World | None = None

    def conduct(self, compiler: Any) -> Conductor:
        """Return a conductor of the world's jobs, with a compiler."""
        registry, runs, readers = self.registry, self.runs, Readers()
        placement = Placement(registry, runs)
        self.requirements = Requirements(placement.devices_for, self.bundles, self.store, readers)
        self.attempts = attempts = DeviceAttempts(registry, runs, placement, self.bundles, self.ids)
        dispatch = Dispatch(attempts, self.requirements)
        analysis = CellAnalysis(self.analyst, self.log, Thresholds())  # type: ignore[arg-type]
        self.stages = CellStages(
            self.journal, self.log, self.announcer, compiler, self.requirements, dispatch,
            Results(runs, dispatch, self.store, readers), analysis, MeasurementLock(),
            self.hands,
            now=self.now, clock=lambda: 0.0, new_id=self.ids, on_device_fault=self.health.record_fault,
        )  # fmt: skip
        return Conductor(self.journal, self.announcer, self.stages)

    def now(self) -> datetime:
        return self.at

    async def restarted(self, compiler: Any = None) -> World:
        """Another server on the same database, with a compiler, which has not taken up jobs yet."""
        await self.conductor.stop()
        self.successor = again = World(self.database, self.folder, self.ids, *self.bundles.list())
        await again.registry.load()
        if compiler is not None:
            again.compiler = compiler
            again.conductor = again.conduct(compiler)
        return again

    async def resumed(self, compiler: Any = None) -> World:
        """Another server on the same database, which goes on with its jobs."""
        again = await self.restarted(compiler)
        await again.conductor.resume()
        return again

    async def stop(self) -> None:
        """Stop the server, and those that followed it."""
        await self.conductor.stop()
        if self.successor is not None:
            await self.successor.stop()

    async def agent(self, name: str = "pi", **device: Any) -> Agent:
        return await Agent(self, name, **device).connect()

    async def submit(
        self,
        cells: int = 1,
        *,
        on_device: bool = True,
        threads: int | None = None,
        measurement: job_pb2.Measurement | None = None,
    ) -> job_pb2.Job:
        cell = {"method": "forward", "device_index": 0 if on_device else None, "threads": threads}
        spec = job_pb2.JobSpec(measurement=measurement)
        spec.candidates.add(name="net").program.pte.CopyFrom(artifact_of(b"pte"))
        return await self.begin(queued_job(f"job-{self.ids()}", cells, cell=cell, spec=spec))

    async def begin(self, job: job_pb2.Job) -> job_pb2.Job:
        """Write a job, and lead it."""
        written = await submit(self.journal, job)
        self.conductor.start(written)
        return written

    async def running(self, **more: Any) -> tuple[Agent, job_pb2.Job, agent_pb2.StartRun]:
        """Submit a job to a device of an agent; return the agent, the job and the run that it was sent."""
        agent, job = await self.agent(), await self.submit(**more)
        return agent, job, await agent.started()

    async def cancel_between(self, job: job_pb2.Job, begun: asyncio.Event, goes_on: asyncio.Event) -> None:
        """Cancel a job when something has begun, which goes on once the cancellation has arrived."""
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
            cancelling = asyncio.create_task(self.conductor.cancel(job))
            for _ in range(5):
                await asyncio.sleep(0)  # the cancellation arrives
            goes_on.set()
            await cancelling

    async def until(self, job: job_pb2.Job, state: int) -> None:
        """Wait until a cell of the job is in the state."""
        async with asyncio.timeout(WAIT_S):
            async for event in self.journal.watch(job.id, 0):
                if event.cell.state == state:
                    return
        raise AssertionError("the job ended before")

    async def end(self, job: job_pb2.Job) -> tuple[list[str], list[report_pb2.Report]]:
        """Return the names of the states that the job's only cell went through, and its reports."""
        async with asyncio.timeout(WAIT_S):
            events = [event async for event in self.journal.watch(job.id, 0)]
        states = [common_pb2.CellState.Name(e.cell.state).removeprefix("CELL_STATE_") for e in events if e.HasField("cell")]
        return states, list(await self.journal.reports.of_job(job.id))


@asynccontextmanager
async def opened_world(folder: Path, *bundles: agent_pb2.RunnerBundle) -> AsyncIterator[World]:
    """A world whose devices have runners from these bundles."""
    async with opened(new_database(folder / "farm.sqlite")) as database:
        numbers = itertools.count()
        created = World(database, folder, lambda: f"id{next(numbers):04}", *bundles)
        yield created
        await created.stop()
        await created.log.flush()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened_world(tmp_path, BUNDLE) as created:
        yield created


@pytest.fixture
async def bare_world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened_world(tmp_path) as created:
        yield created


def error(fault: str, reason: str = "X") -> common_pb2.Error:
    return common_pb2.Error(fault=common_pb2.Fault.Value(f"FAULT_{fault}"), reason=reason, message="No.")


STATES_TO_SUCCESS = ["COMPILING", "WAITING_FOR_DEVICE", "RUNNING", "ANALYZING", "SUCCEEDED"]
