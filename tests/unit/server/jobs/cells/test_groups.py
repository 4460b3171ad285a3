"""Cells that share attempts: they wait for each other, fail alone, are placed again together, and survive a restart."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.compile.cache import Outcome
from etfarm.server.jobs import model
from etfarm.server.jobs.cells import groups
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from etfarm.v1.artifact_pb2 import Chunk
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import EtfarmError, UserError
from tests.support.cells import STATES_TO_SUCCESS as LIVE
from tests.support.cells import WAIT_S, Agent, World, compiled, error
from tests.support.jobs import queued_job


class Compiles:
    """A compiler whose candidates wait for their own gates, and fail where they have an error."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}

    async def compile(self, candidate: job_pb2.Candidate, **_: object) -> Outcome:
        if candidate.name in self.gates:
            await self.gates[candidate.name].wait()
        if candidate.name in self.errors:
            raise self.errors[candidate.name]
        return Outcome(compiled())

    async def get(self, key: str) -> object:
        return compiled()


@pytest.fixture
def farm(world: World) -> World:
    created = Compiles()
    world.compiler = created  # type: ignore[assignment]
    world.conductor = world.conduct(created)
    return world


def compiler(farm: World) -> Compiles:
    assert isinstance(farm.compiler, Compiles)
    return farm.compiler


async def submit(farm: World, candidates: str = "ab") -> job_pb2.Job:
    job = queued_job(f"job-{farm.ids()}", len(candidates), cell={"method": "forward", "device_index": 0})
    job.spec.measurement.interleave = True
    for cell, name in zip(job.cells, candidates, strict=True):
        job.spec.candidates.add(name=name).program.pte.CopyFrom(artifact_of(b"pte"))
        cell.id, cell.candidate_index, cell.candidate_name = f"{job.id}-{name}", cell.index, name
    return await farm.begin(job)


def samples_of(name: str) -> bytes:
    """Return the samples file of one iteration, another one for each candidate."""
    return array("q", [ord(name)]).tobytes()


def answer(agent: Agent, run: agent_pb2.StartRun, **errors: common_pb2.Error) -> None:
    """The agent's result: blocks and samples of each candidate, or its error by the candidate's name."""
    results = []
    for candidate in run.candidates:
        name = candidate.cell_id.rpartition("-")[2]
        result = agent_pb2.CandidateResult(cell_id=candidate.cell_id, error=errors.get(name), threads=ord(name))
        if name not in errors:
            result.samples.CopyFrom(agent.uploaded(samples_of(name)))
            result.iterations, result.duration_ns, result.stop_reason = 1, 1000, common_pb2.STOP_REASON_MAX_TIME
            result.blocks.add(samples=1)
        results.append(result)
    agent.world.runs.deliver(agent_pb2.RunResult(attempt_id=run.attempt_id, device_id=run.device_id, candidates=results))


async def states(farm: World, job: job_pb2.Job) -> dict[str, list[str]]:
    """Return the states of each candidate's cell, once the job is over."""
    result: dict[str, list[str]] = {}
    async with asyncio.timeout(WAIT_S):
        async for event in farm.journal.watch(job.id, 0):
            if event.HasField("cell"):
                name = common_pb2.CellState.Name(event.cell.state).removeprefix("CELL_STATE_")
                result.setdefault(event.cell.id.rpartition("-")[2], []).append(name)
    return result


async def reports(farm: World, job: job_pb2.Job) -> list[report_pb2.Report]:
    return list(await farm.journal.reports.of_job(job.id))


async def test_a_group_waits_for_all_of_it_and_is_one_attempt(farm: World) -> None:
    gate = compiler(farm).gates["b"] = asyncio.Event()
    bases: list[Any] = []
    analyze = farm.analyst.analyze

    async def analyzed(*arguments: Any, base: Any = None, **more: Any) -> report_pb2.Report:
        bases.append((arguments[4].cell_id, base and base.cell_id))
        return await analyze(*arguments, **more)

    farm.analyst.analyze = analyzed  # type: ignore[method-assign]
    agent = await farm.agent()
    job = await submit(farm)
    await farm.until(job, model.WAITING)
    assert agent.session._outgoing.empty(), "b is still being compiled"
    phases: dict[str, str] = {}
    with farm.announcer.subscribe(job.id) as received:
        async with asyncio.timeout(WAIT_S):
            while "WAIT_FOR_OTHERS" not in phases:
                phases |= {event.progress.phase: event.progress.message for event in await received.take()}
    assert phases["WAIT_FOR_OTHERS"] == "b, which it is interleaved with, is not compiled yet"
    gate.set()
    run = await agent.started()
    assert [candidate.cell_id for candidate in run.candidates] == [cell.id for cell in job.cells]
    assert run.measurement.interleave and run.deadline_s == 2 * 600, "each candidate needs its time"
    answer(agent, run)
    await agent.expect_message("ack", run.attempt_id)
    assert set(await farm.journal.results_of(run.attempt_id)) == {cell.id for cell in job.cells}, "written before"
    assert await states(farm, job) == {"a": LIVE, "b": LIVE}
    assert {report.attempt for report in await reports(farm, job)} == {run.attempt_id}
    a, b = (cell.id for cell in job.cells)
    assert sorted(bases) == [(a, None), (b, a)], "the first is what the others are compared with"
    assert farm.runs.busy() == {} and agent.session._outgoing.empty()
    assert not len(farm.stages.groups)


async def test_progress_is_reported_for_its_own_cell(farm: World) -> None:
    agent = await farm.agent()
    job = await submit(farm)
    run = await agent.started()
    with farm.announcer.subscribe(job.id) as received:
        reported = agent_pb2.RunProgress(attempt_id=run.attempt_id, device_id="pi", cell_id=job.cells[1].id, phase="TIMED")
        farm.runs.progressed(reported)
        async with asyncio.timeout(WAIT_S):
            (event,) = await received.take()
    assert (event.progress.cell_id, event.progress.phase) == (job.cells[1].id, "TIMED")


@pytest.mark.parametrize("others", ["ac", "a"])
async def test_a_candidate_that_does_not_compile_leaves_its_group_and_the_others_continue(farm: World, others: str) -> None:
    compiler(farm).errors["b"] = UserError("Bad graph.")
    agent = await farm.agent()
    job = await submit(farm, "b" + others)
    run = await agent.started()
    assert [candidate.cell_id[-1] for candidate in run.candidates] == list(others)
    answer(agent, run)
    assert await states(farm, job) == {"b": ["COMPILING", "FAILED"]} | dict.fromkeys(others, LIVE)


async def test_what_a_result_refers_to_stays_when_a_session_that_named_it_ends(farm: World) -> None:
    async def sent() -> AsyncIterator[Chunk]:
        yield Chunk(data=samples_of("a"))

    store, samples = farm.store, artifact_of(samples_of("a"))
    await store.receive(samples, sent(), "default", "agent")
    agent = await farm.agent()
    job = await submit(farm, "a")
    answer(agent, await agent.started())
    await states(farm, job)
    await store.discard([samples.digest])
    assert await store.has_for_now(samples.digest)


async def test_a_users_fault_in_one_fails_it_alone(farm: World) -> None:
    agent = await farm.agent()
    job = await submit(farm, "abc")
    run = await agent.started()
    answer(agent, run, a=error("USER", "PROGRAM_CRASHED"))
    await agent.expect_message("ack", run.attempt_id)
    assert await states(farm, job) == {"a": [*LIVE[:3], "FAILED"], "b": LIVE, "c": LIVE}
    first, *others = await reports(farm, job)
    assert first.error.reason == "PROGRAM_CRASHED" and not any(report.HasField("error") for report in others)
    results = await farm.journal.results_of(run.attempt_id)
    bases = [groups.base_of(cell.id, results) for cell in job.cells]
    assert bases[:2] == [None, None], "what crashed is compared with nothing, and nothing with it"
    assert bases[2] is not None and bases[2].cell_id == job.cells[1].id


async def test_a_device_fault_places_all_cells_again_except_those_at_fault(farm: World) -> None:
    pi, xl = await farm.agent("pi"), await farm.agent("xl")
    job = await submit(farm, "abc")
    first = await pi.started()
    answer(pi, first, a=error("USER", "PROGRAM_CRASHED"), b=error("DEVICE"))
    second = await xl.started()
    assert [candidate.cell_id[-1] for candidate in second.candidates] == ["b", "c"]
    answer(xl, second)
    result = await states(farm, job)
    assert result["b"] == result["c"] == [*LIVE[:3], *LIVE[1:]]
    assert result["a"][-1] == "FAILED"
    cells = (await farm.journal.get(job.id, EVERYTHING)).cells
    assert [[attempt.device_id for attempt in cell.attempts] for cell in cells] == [["pi"], ["pi", "xl"], ["pi", "xl"]]
    assert farm.runs.busy() == {}


async def test_an_attempt_that_is_lost_is_lost_for_all_and_given_up_in_the_end(farm: World) -> None:
    agent = await farm.agent()
    job = await submit(farm)
    for _ in range(3):
        run = await agent.started_after_acks()
        farm.runs.deliver(agent_pb2.RunResult(attempt_id=run.attempt_id, device_id="pi", error=error("DEVICE", "GONE")))
    result = await states(farm, job)
    assert result["a"] == result["b"] == ["COMPILING", *["WAITING_FOR_DEVICE", "RUNNING"] * 3, "FAILED"]
    assert [report.error.reason for report in await reports(farm, job)] == ["GONE", "GONE"]


@pytest.mark.parametrize("state", ["COMPILING", "WAITING_FOR_DEVICE", "RUNNING"])
async def test_cancelling_ends_all_cells_and_notifies_the_device_once(farm: World, state: str) -> None:
    if state == "COMPILING":
        compiler(farm).gates["b"] = asyncio.Event()
    agent = await farm.agent() if state == "RUNNING" else None
    job = await submit(farm)
    run = await agent.started() if agent is not None else None
    await farm.until(job, model.RUNNING if state == "RUNNING" else model.WAITING)
    async with asyncio.timeout(WAIT_S):
        await farm.conductor.cancel(await farm.journal.get(job.id, EVERYTHING))
    assert {each[-1] for each in (await states(farm, job)).values()} == {"CANCELLED"}
    assert farm.runs.busy() == {} and farm.conductor.live == 0
    if agent is not None and run is not None:
        await agent.expect_message("cancel_run", run.attempt_id)
        assert agent.session._outgoing.empty()


async def test_cancelling_while_a_shared_step_is_written_ends_all(farm: World) -> None:
    write, writing, gate = farm.journal.change_together, asyncio.Event(), asyncio.Event()

    async def slow(changes: Any) -> None:
        writing.set()
        await gate.wait()
        await write(changes)

    farm.journal.change_together = slow  # type: ignore[method-assign]
    await farm.agent()
    job = await submit(farm)
    await farm.cancel_between(job, writing, gate)
    result = await states(farm, job)
    assert result["a"] == result["b"] == [*LIVE[:3], "CANCELLED"]
    assert farm.runs.busy() == {}


async def test_a_device_that_can_run_one_of_them_only_gets_the_others(farm: World) -> None:
    agent = await farm.agent()
    job = await submit(farm, "ab")
    find_unsupported = farm.requirements.find_unsupported

    def unsupported(runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        return {runs[0].cell.id: UserError("No such backend.")} if len(runs) > 1 else find_unsupported(runs)

    farm.requirements.find_unsupported = unsupported  # type: ignore[method-assign]
    run = await agent.started()
    assert [candidate.cell_id[-1] for candidate in run.candidates] == ["b"]
    answer(agent, run)
    assert await states(farm, job) == {"a": ["COMPILING", "WAITING_FOR_DEVICE", "FAILED"], "b": LIVE}


@pytest.mark.parametrize("state", ["COMPILING", "WAITING_FOR_DEVICE", "RUNNING", "ANALYZING"])
async def test_a_new_server_goes_on_with_a_group_where_the_old_one_was(farm: World, state: str) -> None:
    gate = asyncio.Event()
    if state == "COMPILING":
        compiler(farm).gates["b"] = gate
    farm.analyst.gate = asyncio.Event()
    agent = await farm.agent() if state in ("RUNNING", "ANALYZING") else None
    job = await submit(farm)
    run = await agent.started() if agent is not None else None
    if agent is not None and run is not None and state == "ANALYZING":
        answer(agent, run)
    await farm.until(job, model.WAITING if state == "COMPILING" else common_pb2.CellState.Value(f"CELL_STATE_{state}"))
    again = await farm.resumed(Compiles())
    if state in ("COMPILING", "WAITING_FOR_DEVICE"):
        back = await again.agent()
        run = await back.started()
        assert len(run.candidates) == 2
        answer(back, run)
    elif state == "RUNNING":
        assert run is not None and again.runs.knows(run.attempt_id)
        back = await Agent(again, "pi").connect(run.attempt_id)
        answer(back, run)
        await back.expect_message("ack", run.attempt_id)
    result = await states(again, job)
    assert result == {"a": LIVE, "b": LIVE}
    assert len({report.attempt for report in await reports(again, job)}) == 1
