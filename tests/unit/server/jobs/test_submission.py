"""What a job must be to be accepted, and the cells that it gets."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from datetime import UTC
from typing import Any

import pytest
from sqlalchemy import Connection

from etfarm.server.access.tokens import Credential
from etfarm.server.jobs import model
from etfarm.server.jobs.cells import groups
from etfarm.server.jobs.submission import MAX_CELLS, BadJob
from etfarm.server.rpc.door import caller
from etfarm.v1.common_pb2 import ROLE_USER, Principal
from etfarm.v1.device_pb2 import Cluster, Device, DeviceState
from etfarm.v1.job_pb2 import Candidate, DeviceChoice, Job, JobSpec, JobState, Measurement, SubmitJobRequest
from etfarm.wire.chunks import artifact_of
from etfarm.wire.cores import CoresUnknown, TooManyThreads
from etfarm.wire.errors import UserError
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.submissions import AT, FP32, PI, Service, World, world

__all__ = ["world"]


async def test_a_job_has_a_queued_cell_for_its_only_combination(world: World) -> None:
    spec = JobSpec(name="n", labels={"k": "v"}, candidates=[await world.model()], devices=[DeviceChoice(selector="id=pi")])
    job = await world.make(spec)
    assert (job.id, job.name, dict(job.labels), job.owner, job.state) == (
        "id0",
        "n",
        {"k": "v"},
        "ann",
        JobState.JOB_STATE_QUEUED,
    )
    assert job.create_time.ToDatetime(UTC) == AT
    assert job.spec == spec
    (cell,) = job.cells
    assert (cell.id, cell.job_id, cell.index, cell.state, cell.version) == ("id1", "id0", 0, model.QUEUED, 1)
    assert (cell.candidate_index, cell.device_index, cell.selector, cell.method) == (0, 0, "id=pi", "forward")
    assert (cell.candidate_name, cell.recipe_name) == ("net", "xnnpack_fp32")
    assert not cell.HasField("threads")


async def test_the_matrix_is_candidate_then_device_then_method_then_threads(world: World) -> None:
    spec = JobSpec(
        candidates=[await world.model("a"), await world.model("b")],
        devices=[DeviceChoice(selector="id=pi"), DeviceChoice(selector="arch=aarch64", all=True)],
        methods=["forward", "other"], threads=[1, 4],
    )  # fmt: skip
    for candidate in spec.candidates:
        candidate.model.methods["other"].CopyFrom(candidate.model.methods["forward"])
    job = await world.make(spec)
    expected = list(itertools.product(["a", "b"], [(0, "id=pi"), (1, "id=off"), (1, "id=pi")], ["forward", "other"], [1, 4]))
    assert [(c.candidate_name, (c.device_index, c.selector), c.method, c.threads) for c in job.cells] == expected
    assert [cell.index for cell in job.cells] == list(range(len(expected)))
    assert len({cell.id for cell in job.cells}) == len(expected)


async def test_a_job_without_devices_has_one_cell_for_each_candidate(world: World) -> None:
    several = await world.model("several", encode=b"e", decode=b"d")
    job = await world.make(JobSpec(candidates=[await world.model(), several], threads=[1, 4]))
    assert [(cell.candidate_name, cell.method) for cell in job.cells] == [("net", "forward"), ("several", "decode")]
    for cell in job.cells:
        assert not cell.HasField("device_index") and not cell.HasField("threads")
        assert cell.selector == ""


@pytest.mark.parametrize(
    ("methods", "asked", "run"),
    [
        (["forward", "encode"], [], ["forward"]),
        (["encode", "decode"], [], ["decode", "encode"]),
        (["encode", "decode"], ["encode"], ["encode"]),
        (["encode", "decode"], ["eos"], ["eos"]),
    ],
)
async def test_a_device_runs_the_methods_that_are_named_else_forward_else_all_but_constants(
    world: World, methods: list[str], asked: list[str], run: list[str]
) -> None:
    candidate = await world.model("net", **{name: name.encode() for name in methods})
    candidate.model.constant_methods["eos"].CopyFrom(await world.stored(b"constant"))
    job = await world.make(JobSpec(candidates=[candidate], devices=[DeviceChoice()], methods=asked))
    assert [cell.method for cell in job.cells] == run


@pytest.mark.parametrize("where", ["methods", "inputs"])
async def test_a_method_that_the_model_does_not_have_is_refused_with_those_it_has(
    golden: Golden, world: World, where: str
) -> None:
    spec = JobSpec(candidates=[await world.model("net", encode=b"e")], devices=[DeviceChoice()])
    if where == "methods":
        spec.methods.append("decode")
    else:
        spec.inputs["decode"].CopyFrom(await world.stored(b"inputs"))
    with golden.refuses("METHOD_MISSING"):
        await world.make(spec)


async def test_methods_of_a_ready_program_are_not_known_yet(world: World) -> None:
    candidate = await world.ready()
    (cell,) = (await world.make(JobSpec(candidates=[candidate], methods=["anything"], devices=[DeviceChoice()]))).cells
    assert cell.method == "anything"


@pytest.mark.parametrize(
    "options", [{"repeat": 1}, {"repeat": 50, "max_samples": 200_000}, {"iterations": 1_000_001, "max_samples": 2_000_000}]
)
async def test_as_much_may_be_measured_as_a_pass_keeps(world: World, options: dict[str, Any]) -> None:
    measurement = Measurement(**options)
    job = await world.make(JobSpec(candidates=[await world.model()], measurement=measurement, devices=[DeviceChoice()]))
    assert job.spec.measurement == measurement


async def test_a_job_is_refused_if_no_device_that_matches_has_a_runner(world: World) -> None:
    world.without_runner = {"aarch64"}
    refused = JobSpec(candidates=[await world.model()], devices=[DeviceChoice(selector="arch=aarch64")])
    with refuses("BUNDLE_MISSING"):
        await world.make(refused)
    await world.make(JobSpec(candidates=[await world.model()], devices=[DeviceChoice(selector="")]))


async def test_all_takes_emulated_and_offline_devices_and_emulated_ones_last(world: World) -> None:
    job = await world.make(JobSpec(candidates=[await world.model()], devices=[DeviceChoice(all=True)]))
    assert [cell.selector for cell in job.cells] == ["id=off", "id=pi", "id=emu"]


Change = Callable[[JobSpec], object]


def measuring(**options: Any) -> Change:
    return lambda spec: spec.measurement.MergeFrom(Measurement(**options))


REFUSED: dict[str, tuple[str, Change]] = {
    "no_candidate": ("NO_CANDIDATE", lambda s: s.ClearField("candidates")),
    "unknown_recipe": ("UNKNOWN_RECIPE", lambda s: setattr(s.candidates[0], "recipe", '{"recipe":"xnnpack_fp64"}')),
    "recipe_no_json": ("BAD_RECIPE_TEXT", lambda s: setattr(s.candidates[0], "recipe", "{")),
    "recipe_not_canonical": ("BAD_JOB", lambda s: setattr(s.candidates[0], "recipe", json.dumps(json.loads(FP32), indent=1))),
    "empty_candidate": ("NO_CANDIDATE", lambda s: s.candidates.add(name="empty", recipe=FP32)),
    "unknown_selector_key": ("UNKNOWN_SELECTOR_KEY", lambda s: s.devices.add(selector="core>=4")),
    "no_such_device": ("NO_SUCH_DEVICE", lambda s: s.devices.add(selector="arch=riscv")),
    "measurement_without_device": ("BAD_JOB", lambda s: s.ClearField("devices")),
    "threads_0": ("BAD_JOB", lambda s: s.threads.append(0)),
    "label_of_two_lines": ("BAD_JOB", lambda s: setattr(s.candidates[0], "recipe_label", "a\nb")),
    "long_label": ("BAD_JOB", lambda s: setattr(s.candidates[0], "recipe_label", "a" * 101)),
    "timeout_0": ("BAD_JOB", lambda s: setattr(s, "timeout_s", 0)),
    "priority_101": ("BAD_JOB", lambda s: setattr(s, "priority", 101)),
    "priority_lowest": ("BAD_JOB", lambda s: setattr(s, "priority", -(2**31))),
    "max_wait_0": ("BAD_JOB", lambda s: setattr(s, "max_wait_s", 0)),
    "max_wait_nan": ("BAD_JOB", lambda s: setattr(s, "max_wait_s", float("nan"))),
    "deadline_now": ("DEADLINE_PASSED", lambda s: s.deadline_time.FromDatetime(AT)),
    "deadline_long_ago": ("DEADLINE_PASSED", lambda s: setattr(s.deadline_time, "seconds", -(2**62))),
    "nanos_negative": ("BAD_JOB", lambda s: setattr(s.deadline_time, "nanos", -1)),
    "nanos_a_second": ("BAD_JOB", lambda s: setattr(s.deadline_time, "nanos", 1_000_000_000)),
    "deadline_too_late": ("BAD_JOB", lambda s: setattr(s.deadline_time, "seconds", 2**62)),
    "timeout_nan": ("BAD_JOB", lambda s: setattr(s, "timeout_s", float("nan"))),
    "interleave_one": ("BAD_JOB", measuring(interleave=True)),
    "iterations_0": ("BAD_JOB", measuring(iterations=0)),
    "warmup_negative": ("BAD_JOB", measuring(warmup=-1)),
    "max_time_infinite": ("BAD_JOB", measuring(max_time_s=float("inf"))),
    "min_time_nan": ("BAD_JOB", measuring(min_time_s=float("nan"))),
    "iterations_many": ("BAD_JOB", measuring(iterations=1_000_001)),
    "traces_0": ("BAD_JOB", measuring(trace_iterations=0)),
    "traces_many": ("BAD_JOB", measuring(trace_iterations=1_001)),
    "repeat_0": ("BAD_JOB", measuring(repeat=0)),
    "repeat_51": ("BAD_JOB", measuring(repeat=51)),
    "repeat_negative": ("BAD_JOB", measuring(repeat=-1)),
    "repeat_iterations_many": ("BAD_JOB", measuring(repeat=5, iterations=200_001)),
    "repeat_samples_many": ("BAD_JOB", measuring(repeat=5, max_samples=2_000_001)),
    "repeat_interleaved": ("BAD_JOB", lambda s: (s.candidates.append(s.candidates[0]), measuring(repeat=2, interleave=True)(s))),
}


@pytest.mark.remedy("NO_CANDIDATE", "BAD_JOB")
@pytest.mark.parametrize("name", REFUSED)
async def test_refused(golden: Golden, world: World, name: str) -> None:
    reason, change = REFUSED[name]
    spec = JobSpec(candidates=[await world.model()], devices=[DeviceChoice()], measurement=Measurement(warmup=0))
    await world.make(spec)
    change(spec)
    with golden.refuses(reason) as refused:
        await world.make(spec)
    assert refused.value.remedy or reason == "BAD_RECIPE_TEXT"
    assert world.screened == [world.store.path(artifact_of(b"net").digest)]
    assert (await world.make(JobSpec(candidates=[await world.model()], devices=[DeviceChoice()]))).cells


@pytest.mark.remedy("TOO_MANY_CELLS")
@pytest.mark.parametrize("more", [0, 1])
async def test_a_job_has_a_most_of_cells(golden: Golden, world: World, more: int) -> None:
    spec = JobSpec(candidates=[await world.model()], devices=[DeviceChoice()], threads=range(1, MAX_CELLS + 1 + more))
    if not more:
        assert len((await world.make(spec)).cells) == MAX_CELLS
        return
    with golden.refuses("TOO_MANY_CELLS"):
        await world.make(spec)


@pytest.mark.parametrize("validate_only", [False, True])
async def test_a_client_of_before_0_3_is_refused_with_the_version_to_install(
    golden: Golden, world: World, *, validate_only: bool
) -> None:
    request = SubmitJobRequest(spec=JobSpec(candidates=[await world.model()]), validate_only=validate_only)
    with golden.refuses("CLIENT_TOO_OLD"):
        await Service(world).rpcs.Submit(request, None)


async def test_a_request_that_is_sent_again_gives_the_job_of_then_whatever_the_farm_has_now(world: World) -> None:
    serving, spec = Service(world), JobSpec(candidates=[await world.model()], devices=[DeviceChoice()])
    first = await serving.submit(spec)
    world.devices.clear()
    assert await serving.submit(spec) == first
    assert serving.started == [first.id]


@pytest.mark.parametrize("names_project", [False, True])
async def test_a_request_that_is_sent_again_gives_the_job_of_then_though_the_callers_projects_have_changed(
    world: World, names_project: bool
) -> None:
    serving, spec = Service(world), JobSpec(candidates=[await world.model()], devices=[DeviceChoice()])
    first = await serving.submit(spec)
    ann = Principal(name=caller.caller().name, role=ROLE_USER)

    async def again(projects: tuple[str, ...], project: str) -> Job:
        # The context of a call lasts for the test's task.
        credential = Credential(b"", "", caller.with_projects(ann, projects, project))
        caller.enter(credential, credential.principal, "/etfarm.v1.JobService/Submit", names_project=names_project)
        return await serving.submit(spec)

    if names_project:
        with refuses("REQUEST_ID_USED"):
            await again(("audio", "default"), "audio")
        return
    assert (await again(("audio", "default"), "audio")).id == first.id
    assert (await again(("audio", "default"), "")).id == first.id, "the caller would have to choose one now"
    with refuses("REQUEST_ID_USED"):
        await again(("audio",), "audio")
    spec.labels["k"] = "another"
    with refuses("REQUEST_ID_USED"):
        await again(("audio", "default"), "audio")
    assert serving.started == [first.id]


async def test_a_request_without_an_id_is_refused(world: World) -> None:
    with pytest.raises(BadJob, match="request_id"):
        await Service(world).submit(JobSpec(candidates=[await world.model()]), "")


async def test_a_caller_that_goes_away_while_its_job_is_written_down_leaves_a_job_that_runs(world: World) -> None:
    serving, gate, writing = Service(world), threading.Event(), asyncio.Event()
    spec = JobSpec(candidates=[await world.model()])
    loop, write = asyncio.get_running_loop(), world.database.write

    async def slow(do: Callable[[Connection], object], *, durable: bool = False) -> object:
        def then_wait(connection: Connection) -> object:
            done = do(connection)
            loop.call_soon_threadsafe(writing.set)
            gate.wait(60)
            return done

        return await write(then_wait, durable=durable)

    world.database.write = slow  # type: ignore[method-assign,assignment]
    leaving = asyncio.create_task(serving.submit(spec))
    async with asyncio.timeout(60):
        await writing.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gate.set()
        await asyncio.gather(*serving.rpcs._accepting, return_exceptions=True)
    job = await serving.submit(spec)
    assert serving.started == [job.id]


async def test_candidates_are_interleaved_where_each_has_one_to_be_compared_with(golden: Golden, world: World) -> None:
    def spec(*candidates: Candidate, **more: Any) -> JobSpec:
        return JobSpec(
            candidates=candidates, devices=[DeviceChoice(selector="id=pi")], measurement=Measurement(interleave=True), **more
        )

    one, other = await world.model("one"), await world.model("other", encode=b"encode")
    job = await world.make(spec(one, one, threads=[1, 4]))
    assert [[cell.index for cell in cells] for cells in groups.together(job, job.cells)] == [[0, 2], [1, 3]]
    job.spec.measurement.interleave = False
    assert [[cell.index for cell in cells] for cells in groups.together(job, job.cells)] == [[0], [1], [2], [3]]
    with golden.refuses("BAD_JOB") as refused:
        await world.make(spec(one, other))
    assert "--method" in refused.value.remedy
    with golden.refuses("BAD_JOB"):
        await world.make(spec(*[one] * (groups.MAX_TOGETHER + 1)))


async def test_ready_programs_are_interleaved_whatever_their_methods_are_called(world: World) -> None:
    programs = [await world.ready(name, name.encode()) for name in ("a", "b")]
    spec = JobSpec(candidates=programs, devices=[DeviceChoice(selector="id=pi")], measurement=Measurement(interleave=True))
    job = await world.make(spec)
    job.cells[1].method = "run"  # as its inspection tells later
    assert len(groups.together(job, job.cells)) == 1


async def test_a_ready_program_is_interleaved_with_models(world: World) -> None:
    program = await world.ready("old")
    model, other = await world.model("new"), await world.model("other", encode=b"encode")
    more: dict[str, Any] = {"devices": [DeviceChoice(selector="id=pi")], "measurement": Measurement(interleave=True)}
    job = await world.make(JobSpec(candidates=[program, model, model], threads=[1, 2], **more))
    job.cells[0].method = job.cells[1].method = "run"  # as its inspection tells later
    assert [[cell.index for cell in cells] for cells in groups.together(job, job.cells)] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(BadJob, match="runs the method"):  # models of different methods have no common one
        await world.make(JobSpec(candidates=[program, model, other], **more))


async def test_a_check_needs_no_sources_and_gives_the_job_as_it_would_be(world: World) -> None:
    spec = JobSpec(
        candidates=[Candidate(name="net", recipe=FP32), Candidate(name="ready")],
        devices=[DeviceChoice(selector="arch=aarch64", all=True)], threads=[1, 2],
    )  # fmt: skip
    job = await world.make(spec, validate_only=True)
    assert [(cell.candidate_name, cell.recipe_name) for cell in job.cells] == [("net", "xnnpack_fp32")] * 4 + [("ready", "")] * 4
    assert world.asked == ["xnnpack_fp32"]
    assert world.screened == []
    with refuses("NO_CANDIDATE"):
        await world.make(spec)


async def test_a_check_refuses_what_needs_no_source_to_be_known(world: World) -> None:
    async def reason(spec: JobSpec) -> str:
        with pytest.raises(UserError) as refused:
            await world.make(spec, validate_only=True)
        return refused.value.reason

    net = Candidate(name="net", recipe=FP32)
    assert await reason(JobSpec(candidates=[net], devices=[DeviceChoice(selector="arch=mips")])) == "NO_SUCH_DEVICE"
    assert await reason(JobSpec(candidates=[net], devices=[DeviceChoice(selector="a=b")])) == "UNKNOWN_SELECTOR_KEY"
    assert await reason(JobSpec(candidates=[net], threads=[0])) == "BAD_JOB"
    assert await reason(JobSpec(candidates=[Candidate(name="net", recipe='{"recipe":"no"}')])) == "UNKNOWN_RECIPE"
    assert await reason(JobSpec(candidates=[Candidate(name="ready")], stop_after="QUANTIZE")) == "BAD_JOB"


async def test_cores_that_no_matching_device_has_are_refused(world: World) -> None:
    world.devices = [Device(id=f"pi{count}", name="pi", clusters=[Cluster(cpus=range(count))]) for count in (2, 4)]
    spec = JobSpec(candidates=[await world.model()], devices=[DeviceChoice()], measurement=Measurement(cores="2-3"))
    assert len((await world.make(spec)).cells) == 1
    spec.devices[0].selector = "id=pi2"
    with pytest.raises(CoresUnknown):
        await world.make(spec)


def board(name: str, *cpus: int) -> Device:
    """Return a device with a cluster of cpus."""
    return Device(id=name, name=name, state=DeviceState.DEVICE_STATE_IDLE, cores=len(cpus), clusters=[Cluster(cpus=cpus)])


async def with_threads(world: World, threads: int, selector: str, cores: str = "", *, all_: bool = False) -> JobSpec:
    """Return a job with a number of threads on some devices."""
    choice = DeviceChoice(selector=selector, all=all_)
    return JobSpec(candidates=[await world.model()], devices=[choice], threads=[1, threads], measurement=Measurement(cores=cores))


@pytest.mark.parametrize(
    ("threads", "selector", "cores"),
    [(3, "name=two", ""), (9, "id!=pi", ""), (2, "name=two", "1"), (3, "id!=pi", "0,1"), (2000, "name=four", "")],
)
async def test_more_threads_than_any_matching_device_has_cpus_are_refused(
    golden: Golden, world: World, threads: int, selector: str, cores: str
) -> None:
    world.devices = [board("two", 0, 1), board("four", 0, 1, 2, 3), PI]
    with golden.refuses("TOO_MANY_THREADS") as refused:
        await world.make(await with_threads(world, threads, selector, cores))
    assert refused.value.metadata["threads"] == str(threads)


@pytest.mark.parametrize(
    ("threads", "selector", "cores"), [(2, "name=two", ""), (4, "id!=pi", ""), (2, "", "0-1"), (64, "id=pi", "")]
)
async def test_threads_that_one_matching_device_has_cpus_for_are_accepted(
    world: World, threads: int, selector: str, cores: str
) -> None:
    world.devices = [board("two", 0, 1), board("four", 0, 1, 2, 3), PI]  # the cpus of the last one are not known
    assert len((await world.make(await with_threads(world, threads, selector, cores))).cells) == 2


async def test_all_devices_are_accepted_if_one_has_enough_cpus(world: World) -> None:
    world.devices = [board("two", 0, 1), board("four", 0, 1, 2, 3)]
    assert len((await world.make(await with_threads(world, 4, "", all_=True))).cells) == 4
    with pytest.raises(TooManyThreads):
        await world.make(await with_threads(world, 5, "", all_=True))


async def test_the_most_threads_of_several_counts_are_what_a_device_needs_cpus_for(world: World) -> None:
    world.devices = [board("two", 0, 1)]
    spec = await with_threads(world, 3, "name=two")
    spec.threads.extend([5, 4])
    with pytest.raises(TooManyThreads) as refused:
        await world.make(spec)
    assert (refused.value.metadata["threads"], refused.value.metadata["cpus"]) == ("5", "2")
