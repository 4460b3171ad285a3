"""The second program of jobs with --numerics: made beside the first, found again after a restart, and no reason to fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.compile.cache import CompilationNotFound, Outcome
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs import model
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.wire import recipes
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import UserError
from tests.support.cells import FORWARD, STATES_TO_SUCCESS, Agent, World, compiled, error
from tests.support.jobs import queued_job

FP32 = recipes.parse("xnnpack_fp32")
TIMED, SEPARATE = "timed", "separate"


class Both:
    """A compiler of both programs, which answers by the candidate's recipe; what it kept is kept over restarts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.kept: dict[str, compile_pb2.Compilation] = {}
        self.error: UserError | None = None
        """Of the second program."""
        self.gate: asyncio.Event | None = None
        self.has_inputs = True

    async def compile(self, candidate: job_pb2.Candidate, *, listener: Listener, **how: Any) -> Outcome:
        recipe = recipes.from_json(candidate.recipe)
        key = SEPARATE if recipe.options.per_op else TIMED
        self.asked.append((key, how))
        listener.on_stage("TO_EXECUTORCH", 2.0)
        if key == SEPARATE and self.gate is not None:
            await self.gate.wait()
        created = compiled()
        created.key, created.program.digest = key, f"program of {key}"
        created.etrecord.CopyFrom(artifact_of(key.encode()))
        created.facts.methods["label"].CopyFrom(FORWARD)
        if self.has_inputs:
            created.example_inputs["forward"].CopyFrom(artifact_of(b"inputs"))
        if key == SEPARATE and self.error is not None:
            created = compile_pb2.Compilation(key=key)
            created.error.CopyFrom(
                common_pb2.Error(reason=self.error.reason, message=self.error.message, remedy=self.error.remedy)
            )
        self.kept[key] = created
        return Outcome(created)

    async def get(self, key: str) -> compile_pb2.Compilation:
        if key not in self.kept:
            raise CompilationNotFound("Nothing was compiled.", key=key)
        return self.kept[key]


@pytest.fixture
def both(world: World) -> Both:
    created = Both()
    world.conductor = world.conduct(created)
    return created


async def submit(world: World, recipe: recipes.Recipe = FP32, method: str = "forward") -> job_pb2.Job:
    job = queued_job(f"job-{world.ids()}", cell={"method": method, "device_index": 0})
    job.spec.measurement.numerics = True
    candidate = job.spec.candidates.add(name="net", recipe=recipe.json)
    candidate.model.methods["forward"].exported_program.CopyFrom(artifact_of(b"pt2"))
    return await world.begin(job)


async def running(world: World, **more: Any) -> tuple[Agent, job_pb2.Job, agent_pb2.StartRun]:
    """Submit such a job to a device of an agent; return the agent, the job and the run that it was sent."""
    agent, job = await world.agent(), await submit(world, **more)
    return agent, job, await agent.started()


async def recorded(world: World) -> agent_pb2.NumericsResult:
    """Return what a numerics pass gave, its files uploaded."""
    files = {name: await world.store.put(name.encode(), "agent") for name in ("etdump", "debug", "outputs")}
    return agent_pb2.NumericsResult(**files)


def codes(report: report_pb2.Report) -> list[str]:
    return [warning.code for warning in report.compile.warnings]


async def test_the_device_gets_both_programs_and_the_report_names_both(world: World, both: Both) -> None:
    agent, job, run = await running(world)
    (candidate,) = run.candidates
    assert (candidate.program.digest, candidate.numerics_program.digest) == ("program of timed", "program of separate")
    agent.answer(run, numerics=await recorded(world))
    states, (report,) = await world.end(job)
    assert states == STATES_TO_SUCCESS
    assert report.compile.compilation.program.digest == "program of timed"
    assert (report.numerics.program.digest, report.numerics.is_timed_program) == ("program of separate", False)
    assert (report.numerics_etdump, report.numerics_debug) == (artifact_of(b"etdump"), artifact_of(b"debug"))
    assert not report.numerics.HasField("threshold_db"), "it was not analyzed"
    assert codes(report) == []
    cell = (await world.journal.get(job.id, EVERYTHING)).cells[0]
    assert (cell.compilation_key, cell.numerics_compilation_key) == (TIMED, SEPARATE)
    assert [phase.phase for phase in cell.timeline if "COMPILE" in phase.phase] == ["COMPILE", "COMPILE_NUMERICS"]
    assert both.asked[1][1]["quantize_again"] is False, "other scales would be another model"


async def test_a_recipe_without_xnnpack_is_compiled_once_and_runs_twice(world: World, both: Both) -> None:
    agent, job, run = await running(world, recipe=recipes.parse("portable"))
    assert run.candidates[0].numerics_program == run.candidates[0].program
    agent.answer(run, numerics=await recorded(world))
    _, (report,) = await world.end(job)
    assert [key for key, _ in both.asked] == [TIMED]
    assert report.numerics.is_timed_program
    cell = (await world.journal.get(job.id, EVERYTHING)).cells[0]
    assert cell.numerics_compilation_key == ""
    assert "COMPILE_NUMERICS" not in [phase.phase for phase in cell.timeline]


async def test_a_second_program_that_does_not_compile_is_a_warning(world: World, both: Both) -> None:
    both.error = UserError("XNNPACK cannot.", "Do without.")
    agent, job, run = await running(world)
    assert not run.candidates[0].HasField("numerics_program")
    agent.answer(run)
    states, (report,) = await world.end(job)
    assert states == STATES_TO_SUCCESS
    (warning,) = report.compile.warnings
    assert warning.code == "NUMERICS_NOT_COMPILED"
    assert warning.message.endswith("XNNPACK cannot. Do without.")
    assert not report.HasField("numerics") and not report.HasField("error")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (agent_pb2.NumericsResult(error=error("USER", "PROGRAM_CRASHED")), "The numerics pass produced no result. No."),
        (None, "The device's agent did not report it: update the agent."),
    ],
)
async def test_a_pass_that_gave_nothing_is_a_warning(
    world: World, both: Both, values: agent_pb2.NumericsResult | None, says: str
) -> None:  # fmt: skip
    agent, job, run = await running(world)
    agent.answer(run, numerics=values)
    states, (report,) = await world.end(job)
    assert states == STATES_TO_SUCCESS
    assert codes(report) == ["NUMERICS_NOT_RUN"]
    assert says in report.compile.warnings[0].message
    assert report.numerics.program.digest == "program of separate"
    assert not report.HasField("numerics_etdump")


async def test_a_cell_that_failed_on_the_device_has_no_second_complaint(world: World, both: Both) -> None:
    agent, job, run = await running(world)
    agent.answer(run, error("USER"))
    states, (report,) = await world.end(job)
    assert states[-1] == "FAILED"
    assert codes(report) == []


@pytest.mark.parametrize(
    ("method", "has_inputs", "says"),
    [("label", True, "label is a constant method"), ("forward", False, "the inputs that a runner generates. Give --inputs.")],
)
async def test_what_has_nothing_to_be_compared_with_is_compiled_once_and_says_so(
    world: World, both: Both, method: str, has_inputs: bool, says: str
) -> None:
    both.has_inputs = has_inputs
    agent, job, run = await running(world, method=method)
    assert not run.candidates[0].HasField("numerics_program")
    agent.answer(run)
    _, (report,) = await world.end(job)
    assert codes(report) == ["NUMERICS_NOT_COMPILED"] and says in report.compile.warnings[0].message
    assert [key for key, _ in both.asked] == [TIMED]


@pytest.mark.parametrize("failed", [False, True])
async def test_a_new_server_finds_the_second_program_again(world: World, both: Both, failed: bool) -> None:
    both.error = UserError("XNNPACK cannot.") if failed else None
    job = await submit(world)
    await world.until(job, model.WAITING)
    again = await world.resumed(both)
    agent = await again.agent()
    run = await agent.started()
    assert run.candidates[0].HasField("numerics_program") is not failed
    agent.answer(run, numerics=None if failed else await recorded(world))
    states, (report,) = await again.end(job)
    assert states == STATES_TO_SUCCESS
    assert codes(report) == (["NUMERICS_NOT_COMPILED"] if failed else [])
    assert [key for key, _ in both.asked] == [TIMED, SEPARATE], "nothing is compiled again"


async def test_a_failure_that_was_not_kept_is_still_no_failure_of_the_cell(world: World, both: Both) -> None:
    both.error = UserError("The disk was full.")
    job = await submit(world)
    await world.until(job, model.WAITING)
    del both.kept[SEPARATE]
    again = await world.resumed(both)
    agent = await again.agent()
    agent.answer(await agent.started())
    states, (report,) = await again.end(job)
    assert states == STATES_TO_SUCCESS
    assert codes(report) == ["NUMERICS_NOT_COMPILED"]


async def test_cancelling_ends_the_second_compilation_too(world: World, both: Both) -> None:
    both.gate = asyncio.Event()
    job = await submit(world)
    with world.announcer.subscribe(job.id) as subscription:
        async with asyncio.timeout(60):
            while not any(key == SEPARATE for key, _ in both.asked):
                await subscription.take()
    await world.conductor.cancel(job)
    states, _ = await world.end(job)
    assert states == ["COMPILING", "CANCELLED"]
