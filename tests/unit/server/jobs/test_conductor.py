"""A cell's way: each step written down, device faults placed again, cancelling, draining and restarting at any point."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.artifacts.room import Room
from etfarm.server.compile.cache import FOUND_EARLIER, CompilationNotFound, Outcome
from etfarm.server.compile.errors import StageFailed
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.attempts import MAX_ATTEMPTS
from etfarm.server.jobs.cells.results import GRACE_S
from etfarm.server.state.engine import DatabaseFull
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2
from etfarm.v1.device_pb2 import DeviceRunner
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import UserError
from tests.support.cells import BUNDLE, STATES_TO_SUCCESS, WAIT_S, Agent, World, compiled, error
from tests.support.waiting import becomes


async def test_a_cell_goes_its_way_and_its_agent_may_forget_it_once_the_result_is_written(world: World) -> None:
    agent, job, run = await world.running()
    assert (run.device_id, run.deadline_s, run.candidates[0].method) == ("pi", 600.0, "forward")
    assert run.candidates[0].program == compiled().program, "its data files too"
    assert world.conductor.live == 1
    await agent.settle(run, threads=4)
    states, (report,) = await world.end(job)
    assert states == STATES_TO_SUCCESS
    assert report.state == common_pb2.CELL_STATE_SUCCEEDED
    assert (report.attempt, report.threads, report.latency.p50_ns) == (run.attempt_id, 4, 5.0)
    assert world.runs.busy() == {}
    assert (await world.journal.results_of(run.attempt_id))[job.cells[0].id].threads == 4


async def test_a_cell_that_does_not_compile_fails_with_the_reason_and_a_report(world: World) -> None:
    world.compiler.error = UserError("Bad graph.", "Change it.", stage="TORCH_EXPORT")
    job = await world.submit()
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "FAILED"]
    assert (report.error.reason, report.error.stage, report.error.remedy) == ("INVALID_ARGUMENT", "TORCH_EXPORT", "Change it.")
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert cell.error == report.error
    assert cell.report_id == report.id


async def test_a_compilation_waits_until_the_disk_has_space(world: World, tmp_path: Path) -> None:
    free = 10
    world.store.room = Room(tmp_path, 10, 100, free=lambda _: free)
    job = await world.submit(on_device=False)
    async with asyncio.timeout(WAIT_S):
        async for event in world.journal.watch(job.id, 0):
            if event.progress.phase == "WAIT_FOR_ROOM":
                break
    assert event.progress.message == "the server's disk is full: 10 bytes are free"
    assert world.compiler.calls == 0
    free = 1000
    states, (report,) = await world.end(job)
    assert (states, world.compiler.calls) == (["COMPILING", "SUCCEEDED"], 1)
    assert report.HasField("compile") and not report.HasField("attempt")


@pytest.mark.remedy("TOO_MANY_THREADS")
async def test_a_cell_with_more_threads_than_its_devices_have_cpus_fails_and_another_waits_for_one_that_has_them(
    world: World,
) -> None:
    await world.agent("small", cores=2)
    job = await world.submit(threads=4)
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "WAITING_FOR_DEVICE", "FAILED"]
    assert report.error.reason == "TOO_MANY_THREADS"
    assert report.error.message == "4 threads are more than the 2 cpus of small."
    large = await world.agent("large", cores=4)
    job = await world.submit(threads=4)
    run = await large.started()
    assert (run.device_id, run.candidates[0].threads) == ("large", 4)
    large.answer(run)
    await world.end(job)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("remedy", ["Change.", StageFailed.UNKNOWN])
async def test_a_compilation_that_failed_leaves_its_stages_in_the_report_and_says_where_its_log_is(
    world: World, cached: bool, remedy: str
) -> None:
    failed = compile_pb2.Compilation(
        key="key", stages=[compile_pb2.Stage(stage="TORCH_EXPORT", duration_ms=5, where=common_pb2.ACTOR_SERVER)]
    )
    failed.error.MergeFrom(common_pb2.Error(fault=common_pb2.FAULT_USER, reason="STAGE_FAILED", message="No.", remedy=remedy))
    world.compiler.outcome = Outcome(failed, cached=cached)
    job = await world.submit(on_device=False)
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "FAILED"]
    has_log_elsewhere = cached and remedy == StageFailed.UNKNOWN
    assert (report.error.reason, FOUND_EARLIER in report.error.remedy) == ("STAGE_FAILED", has_log_elsewhere)
    assert (report.compile.cached, [stage.stage for stage in report.compile.compilation.stages]) == (cached, ["TORCH_EXPORT"])
    assert not report.compile.compilation.HasField("program")
    assert [phase.phase for phase in report.timeline] == ["COMPILE"]
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert (cell.compilation_key, cell.compile_cached) == ("key", cached)
    assert not cell.HasField("program")


async def test_a_stage_of_an_earlier_compilation_is_reported_as_cached(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    job = await world.submit(on_device=False)
    async with asyncio.timeout(WAIT_S):
        text = await anext(event.progress async for event in world.journal.watch(job.id, 0) if event.HasField("progress"))
    assert (text.phase, text.duration_ms, text.message) == ("QUANTIZE", 2.0, "from an earlier compilation")
    world.compiler.gate.set()
    await world.end(job)


async def test_a_bug_fails_the_cell_by_the_farms_fault(world: World) -> None:
    world.compiler.error = ZeroDivisionError("oops")
    states, (report,) = await world.end(await world.submit())
    assert states[-1] == "FAILED"
    assert (report.error.fault, "oops" in report.error.message) == (common_pb2.FAULT_FARM, True)


@pytest.mark.remedy("ATTEMPT_LOST")
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
    third = await pi.started_after_acks()
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


@pytest.mark.remedy("ATTEMPT_OVERDUE")
async def test_an_agent_without_a_result_long_after_the_deadline_gives_one_once_it_is_restarted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    clock = loop.time
    agent, job, run = await world.running()
    with monkeypatch.context() as later:
        later.setattr(loop, "time", lambda: clock() + run.deadline_s + GRACE_S)
        while run.attempt_id in world.runs.busy().values():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    await agent.leave()
    agent = await world.agent()
    agent.answer(await agent.started_after_acks())
    states, _ = await world.end(job)
    assert states[-1] == "SUCCEEDED"
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    overdue, last = cell.attempts[0].error, cell.attempts[-1].error
    assert (overdue.reason, last.reason) == ("ATTEMPT_OVERDUE", "") and overdue.remedy.startswith("Restart the agent")


@pytest.mark.remedy("RESULT_MISSING")
async def test_a_cell_without_a_result_is_placed_again(world: World) -> None:
    agent, job, start = await world.running()
    world.runs.deliver(agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id))
    agent.answer(await agent.started_after_acks())
    states, _ = await world.end(job)
    assert states[-1] == "SUCCEEDED"
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert [attempt.error.reason for attempt in cell.attempts] == ["RESULT_MISSING", ""]


async def test_after_two_device_faults_more_the_cell_fails_with_the_last_one(world: World) -> None:
    agent = await world.agent()
    job = await world.submit()
    for number in range(MAX_ATTEMPTS):
        agent.answer(await agent.started_after_acks(), error("DEVICE", f"FAULT_{number}"))
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", *["WAITING_FOR_DEVICE", "RUNNING"] * 3, "FAILED"]
    assert report.error.reason == "FAULT_2"
    assert world.runs.busy() == {}


async def test_devices_that_leave_before_an_attempt_is_sent_use_up_no_attempts(world: World) -> None:
    job = await world.submit()
    for _ in range(MAX_ATTEMPTS + 1):
        agent = await world.agent()
        await becomes(world.runs.busy, pause_s=0)
        await agent.leave()  # while the attempt is written to the journal
        await becomes(lambda: not world.runs.busy(), pause_s=0)
    agent = await world.agent()
    agent.answer(await agent.started_after_acks())
    states, _ = await world.end(job)
    assert states[-1] == "SUCCEEDED"
    (cell,) = (await world.journal.get(job.id, EVERYTHING)).cells
    assert [attempt.error.reason for attempt in cell.attempts] == [*["DEVICE_OFFLINE"] * (MAX_ATTEMPTS + 1), ""]


@pytest.mark.remedy("BACKEND_MISSING")
async def test_a_program_that_the_device_cannot_run_is_refused_without_being_sent(world: World) -> None:
    agent = await world.agent()
    world.bundles.use(agent_pb2.RunnerBundle(arch="x86_64", backends=["Other"]))
    states, (report,) = await world.end(await world.submit())
    assert states[-1] == "FAILED"
    assert (report.error.reason, report.error.metadata["missing"]) == ("BACKEND_MISSING", "XnnpackBackend")
    assert world.registry.get("pi").attempt_id == ""
    assert agent.session._outgoing.empty(), "nothing was said to the agent"
    world.bundles.use(BUNDLE)
    job = await world.submit()
    agent.answer(await agent.started())
    assert (await world.end(job))[0][-1] == "SUCCEEDED", "a device that has the backend runs it"


PYTHON = DeviceRunner(kind=common_pb2.RUNNER_KIND_PYTHON, backends=["XnnpackBackend"], operators=["aten::add.out"])


async def test_without_a_bundle_a_device_with_a_runner_of_its_own_is_preferred(bare_world: World) -> None:
    world = bare_world
    bare = await world.agent("a")
    agent = await world.agent(own_runners=[PYTHON])
    await world.submit()
    run = await agent.started()
    assert (run.device_id, run.candidates[0].HasField("bundle")) == ("pi", False)
    assert bare.session._outgoing.empty()


@pytest.mark.parametrize(
    ("runner", "reason", "sent"),
    [
        (DeviceRunner(kind=common_pb2.RUNNER_KIND_PYTHON, backends=["Other"]), "BACKEND_MISSING", []),
        (DeviceRunner(kind=99, backends=["XnnpackBackend"]), "BUNDLE_MISSING", ["cancel_run"]),
    ],
    ids=["a runner without the backend", "a runner of an unknown kind"],
)
async def test_without_a_bundle_a_device_whose_own_runner_does_not_do_is_refused(
    bare_world: World, runner: DeviceRunner, reason: str, sent: list[str]
) -> None:
    agent = await bare_world.agent(own_runners=[runner])
    states, (report,) = await bare_world.end(await bare_world.submit())
    assert (states[-1], report.error.reason) == ("FAILED", reason)
    assert [agent.session._outgoing.get_nowait().WhichOneof("message") for _ in range(agent.session._outgoing.qsize())] == sent


async def test_a_bundle_that_is_being_built_is_waited_for_though_the_device_has_a_runner(bare_world: World) -> None:
    world = bare_world
    world.bundles.settled.clear()
    agent = await world.agent(own_runners=[PYTHON])
    job = await world.submit()
    await world.until(job, model.RUNNING)
    assert agent.session._outgoing.empty()
    world.bundles.use(BUNDLE)
    world.bundles.settled.set()
    assert (await agent.started()).candidates[0].HasField("bundle")


@pytest.mark.parametrize("state", ["COMPILING", "WAITING_FOR_DEVICE", "RUNNING", "ANALYZING"])
async def test_cancelling_ends_the_cell_wherever_it_is(world: World, state: str) -> None:
    world.compiler.gate = asyncio.Event() if state == "COMPILING" else None
    world.analyst.gate = asyncio.Event()
    agent = await world.agent() if state in ("RUNNING", "ANALYZING") else None
    job = await world.submit()
    run = await agent.started() if agent is not None else None
    if agent is not None and run is not None and state == "ANALYZING":
        agent.answer(run)
    await world.until(job, common_pb2.CellState.Value(f"CELL_STATE_{state}"))
    async with asyncio.timeout(WAIT_S):
        await world.conductor.cancel(await world.journal.get(job.id, EVERYTHING))
    states, (report,) = await world.end(job)
    assert states[-2:] == [state, "CANCELLED"]
    assert (report.state, report.error.reason) == (common_pb2.CELL_STATE_CANCELLED, "CANCELLED")
    assert (world.runs.busy(), world.conductor.live, world.compiler.stopped) == ({}, 0, state == "COMPILING")
    if agent is not None and run is not None:
        await agent.expect_message("ack" if state == "ANALYZING" else "cancel_run", run.attempt_id)


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
    await world.cancel_between(job, writing, gate)
    states, (report,) = await world.end(job)
    assert states == ["COMPILING", "SUCCEEDED"]
    assert report.state == common_pb2.CELL_STATE_SUCCEEDED


async def test_cancelling_what_is_over_changes_nothing(world: World) -> None:
    job = await world.submit(on_device=False)
    await world.end(job)
    before = await world.journal.get(job.id, EVERYTHING)
    await world.conductor.cancel(before)
    assert await world.journal.get(job.id, EVERYTHING) == before


async def test_live_jobs_of_a_scope_are_counted_and_not_their_cells(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    jobs = [await world.submit(3), await world.submit(2)]
    assert world.conductor.live == world.conductor.count_live(Scope(frozenset({"default"}))) == 2
    assert world.conductor.count_live(Scope(frozenset({"vision"}))) == 0
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
    again = await world.resumed()
    if state != "ANALYZING":
        agent = await again.agent()
        agent.answer(await agent.started(), threads=3)
    states, (report,) = await again.end(job)
    assert states == STATES_TO_SUCCESS
    assert (report.state, report.threads) == (common_pb2.CELL_STATE_SUCCEEDED, 3)
    assert again.compiler.calls == (state == "COMPILING")


async def test_a_new_server_waits_for_what_runs_before_any_agent_can_come_back(world: World) -> None:
    _, job, run = await world.running()
    again = await world.resumed()
    assert again.runs.knows(run.attempt_id), "else the server would stop the agent's run"
    back = await Agent(again, "pi").connect(run.attempt_id)
    assert again.registry.get("pi").attempt_id == run.attempt_id
    await back.settle(run, threads=3)
    states, (report,) = await again.end(job)
    assert states == STATES_TO_SUCCESS
    assert (report.attempt, report.threads) == (run.attempt_id, 3)


async def test_a_new_server_places_again_what_the_agent_no_longer_runs(world: World) -> None:
    _, job, run = await world.running()
    again = await world.resumed()
    back = await Agent(again, "pi").connect()
    second = await back.started_after_acks()
    assert second.attempt_id != run.attempt_id
    back.answer(second)
    assert (await again.end(job))[0] == [*STATES_TO_SUCCESS[:3], *STATES_TO_SUCCESS[1:]]


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


async def test_a_program_that_is_lost_while_its_cell_waits_is_compiled_again(world: World) -> None:
    await world.store.put(b"pte", "ann")
    job = await world.submit()
    await world.until(job, model.WAITING)
    world.store.place(artifact_of(b"pte").digest).unlink()
    original = world.compiler.compile

    async def compile_again(*arguments: Any, **named: Any) -> Outcome:
        await world.store.put(b"pte", "ann")
        return await original(*arguments, **named)

    world.compiler.compile = compile_again  # type: ignore[method-assign]
    agent = await world.agent()
    run = await agent.started()
    assert world.compiler.calls == 2 and run.candidates[0].program == compiled().program
    assert agent.answer(run)
    states, (report,) = await world.end(job)
    assert (states, report.state) == (STATES_TO_SUCCESS, common_pb2.CELL_STATE_SUCCEEDED)


async def test_a_loss_that_no_compilation_replaces_is_the_farms_fault(world: World) -> None:
    await world.store.put(b"pte", "ann")
    job = await world.submit()
    await world.until(job, model.WAITING)
    world.store.place(artifact_of(b"pte").digest).unlink()
    await world.agent()
    states, (report,) = await world.end(job)
    assert states[-1] == "FAILED"
    assert (report.error.reason, report.error.fault) == ("ARTIFACT_DAMAGED", common_pb2.FAULT_FARM)
    assert world.compiler.calls == 2 and world.runs.busy() == {}


@pytest.mark.parametrize("state", ["WAITING", "RUNNING"])
async def test_a_new_server_compiles_again_what_the_database_has_lost(world: World, state: str) -> None:
    agent = await world.agent() if state == "RUNNING" else None
    job = await world.submit()
    run = await agent.started() if agent is not None else None
    await world.until(job, model.RUNNING if agent is not None else model.WAITING)
    again = await world.restarted()
    original = again.compiler.get

    async def get(key: str) -> compile_pb2.Compilation:
        if not again.compiler.calls:
            raise CompilationNotFound("Nothing was compiled under the key.", key=key)
        return await original(key)

    again.compiler.get = get  # type: ignore[method-assign]
    await again.conductor.resume()
    later = Agent(again, "pi")
    await later.connect(*([run.attempt_id] if run is not None else []))
    run = run or await later.started()
    assert later.answer(run)
    _, (report,) = await again.end(job)
    assert (report.state, again.compiler.calls) == (common_pb2.CELL_STATE_SUCCEEDED, 1)


async def states_of(world: World, *jobs: job_pb2.Job) -> list[str]:
    cells = [cell for job in jobs for cell in (await world.journal.get(job.id, EVERYTHING)).cells]
    return [common_pb2.CellState.Name(cell.state).removeprefix("CELL_STATE_") for cell in cells]


async def test_a_server_that_drains_ends_a_running_cell_with_its_report_and_leaves_a_waiting_one(world: World) -> None:
    agent = await world.agent()
    running, waiting = await world.submit(), await world.submit()
    run = await agent.started()
    await world.until(waiting, model.WAITING)
    draining = asyncio.create_task(world.conductor.drain())
    await asyncio.sleep(0)
    late = await world.submit()
    assert not draining.done()
    agent.answer(run)
    async with asyncio.timeout(WAIT_S):
        await draining
    assert await states_of(world, running, waiting, late) == ["SUCCEEDED", "WAITING_FOR_DEVICE", "QUEUED"]
    await agent.leave()
    world = await world.restarted()
    agent = await world.agent()
    await world.conductor.resume()
    for _ in range(2):
        agent.answer(await agent.started())
        await agent.next_message()
    for job in (waiting, late):
        await world.end(job)
        assert await states_of(world, job) == ["SUCCEEDED"]


async def test_a_server_that_drains_ends_a_compilation_whose_cell_does_not_take_a_device(world: World) -> None:
    await world.agent()
    world.compiler.gate = asyncio.Event()
    job = await world.submit()
    await world.until(job, model.COMPILING)
    draining = asyncio.create_task(world.conductor.drain())
    await asyncio.sleep(0)
    world.compiler.gate.set()
    async with asyncio.timeout(WAIT_S):
        await draining
    assert await states_of(world, job) == ["WAITING_FOR_DEVICE"]
    assert (world.compiler.stopped, world.runs.busy()) == (0, {})
