"""Which cells of a job run again, and the job that they become."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.retry import cells_to_retry, spec_of_retry
from etfarm.server.rpc.door import caller
from etfarm.server.state import schema
from etfarm.v1.common_pb2 import CellState, Principal, Role
from etfarm.v1.job_pb2 import Attempt, DeviceChoice, Job, JobSpec, JobState, Measurement
from tests.support.refusals import refuses
from tests.support.submissions import Service, World, world

__all__ = ["world"]

FAILED, DONE, CANCELLED = model.FAILED, model.SUCCEEDED, model.CANCELLED


async def ended(service: Service, spec: JobSpec, *states: CellState.ValueType) -> Job:
    """Submit a job whose cells end in these states."""
    job = await service.submit(spec, f"r{len(service.started)}")
    for cell, state in zip(job.cells, states, strict=True):
        for step in (model.COMPILING, model.SUCCEEDED) if state == DONE else (state,):
            cell.state, cell.version = step, cell.version + 1
            await service.journal.change(cell)
    return await service.journal.get(job.id, EVERYTHING)


async def spec_of(world: World, **more: object) -> JobSpec:
    candidates = [await world.model("one"), await world.model("other")]
    devices = [DeviceChoice(selector="id=pi")]
    return JobSpec(name="nightly", labels={"k": "v"}, candidates=candidates, devices=devices, threads=[1, 2], **more)  # type: ignore[arg-type]


async def test_the_failed_cells_become_a_job_with_the_label_of_the_former_one(world: World) -> None:
    service = Service(world)
    job = await ended(service, await spec_of(world), FAILED, DONE, CANCELLED, FAILED)
    assert job.state == JobState.JOB_STATE_FAILED
    again = await service.retry(job)
    assert (again.name, dict(again.labels), again.owner) == ("", {"k": "v", "retry_of": job.id}, job.owner)
    assert [(cell.index, cell.candidate_name, cell.threads, cell.selector) for cell in again.cells] == [
        (0, "one", 1, "id=pi"), (1, "other", 2, "id=pi")
    ]  # fmt: skip
    assert {cell.state for cell in again.cells} == {model.QUEUED}
    assert not {cell.id for cell in again.cells} & {cell.id for cell in job.cells}
    assert service.started[-1] == again.id != job.id
    same = await service.retry(job)
    assert same.id == again.id and service.started.count(again.id) == 1, "a request that is sent again"


async def test_an_id_of_a_request_is_refused_for_another_one_whatever_is_wrong_with_that(world: World) -> None:
    service = Service(world)
    spec, other = await spec_of(world), JobSpec(name="without a candidate")
    job = await service.submit(spec)
    assert (await service.submit(spec)).id == job.id
    renamed = JobSpec()
    renamed.MergeFrom(spec)
    renamed.name = "another"
    for changed in (renamed, other):
        with refuses("REQUEST_ID_USED", match=job.id):
            await service.submit(changed)
    with refuses("REQUEST_ID_USED", match="Send another id"):
        await service.retry(job, "r")
    assert service.started == [job.id]
    # The id belongs to its owner, and to the project.
    bob, method = Principal(name="bob", role=Role.ROLE_USER), "/etfarm.v1.JobService/Submit"
    caller.authorize(caller.with_projects(bob, ["default"], "default"), method)
    assert (await service.submit(renamed)).name == "another"


async def test_a_job_of_an_earlier_release_is_returned_whatever_the_spec(world: World) -> None:
    service = Service(world)
    job = await service.submit(await spec_of(world))
    await world.database.write(lambda connection: connection.execute(update(schema.jobs).values(request_digest=None)))
    again = await service.submit(JobSpec(name="other"))
    assert again.id == job.id


async def test_interleaved_cells_run_again_together(world: World) -> None:
    service = Service(world)
    spec = await spec_of(world, measurement=Measurement(interleave=True))
    job = await ended(service, spec, DONE, DONE, FAILED, DONE)
    assert [(cell.candidate_name, cell.threads) for cell in cells_to_retry(job)] == [("one", 1), ("other", 1)]


async def test_results_of_the_former_cell_are_left_out(world: World) -> None:
    job = await ended(Service(world), await spec_of(world), FAILED, DONE, DONE, DONE)
    job.cells[0].attempts.append(Attempt(id="a"))
    job.cells[0].error.reason = "PROGRAM_CRASHED"
    (cell,) = cells_to_retry(job)
    assert (cell.attempts, cell.HasField("error"), cell.id, cell.version) == ([], False, "", 0)
    job.spec.deadline_time.seconds = 1
    again = spec_of_retry(job)
    assert again.candidates == job.spec.candidates and not again.HasField("deadline_time")


@pytest.mark.remedy("NOTHING_TO_RETRY")
async def test_a_job_without_failed_cells_or_with_live_ones_is_refused(world: World) -> None:
    service = Service(world)
    done = await ended(service, await spec_of(world), DONE, CANCELLED, DONE, DONE)
    live = await service.submit(await spec_of(world), "live")
    for job, reason in ((done, "NOTHING_TO_RETRY"), (live, "JOB_LIVE")):
        with refuses(reason):
            await service.retry(job, f"again {job.id}")
    assert service.started == [done.id, live.id]
    assert len((await service.submit(await spec_of(world), "again")).cells) == len(done.cells)


async def test_a_retry_of_one_of_several_devices_that_was_forgotten_is_refused(world: World) -> None:
    service = Service(world)
    spec = JobSpec(candidates=[await world.model("one")], devices=[DeviceChoice(selector="", all=True)])
    job = await ended(service, spec, *[FAILED] * len(world.devices))
    again = await service.retry(job, "first")
    assert len(again.cells) == len(world.devices)
    world.devices.pop()
    with refuses("NO_SUCH_DEVICE"):
        await service.retry(job)


async def test_members_of_a_jobs_project_retry_it_there_as_their_own(world: World) -> None:
    service = Service(world)
    job = await ended(service, await spec_of(world), FAILED, DONE, DONE, DONE)
    bob, method = Principal(name="bob", role=Role.ROLE_USER), "/etfarm.v1.JobService/Retry"
    caller.authorize(caller.with_projects(bob, ["vision"], "vision"), method)
    with refuses("JOB_NOT_FOUND"):
        await service.retry(job, "b1")
    caller.authorize(caller.with_projects(bob, ["default", "vision"], "vision"), method)
    again = await service.retry(job, "b2")
    assert (again.owner, again.project) == ("bob", job.project)
