"""The library: what Submit is sent, what users are given, and what is tried again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from etfarm.client.aio import AsyncFarm
from etfarm.client.client import Farm
from etfarm.client.errors import SeveralReports, exit_code
from etfarm.client.jobs.file_names import data_file_name, method_file
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import CellChanged, JobChanged, JobResult, LogLine, Progress
from etfarm.client.submit.input_names import UnknownInput
from etfarm.client.submit.inputs import read_named
from etfarm.client.submit.preparation import prepare
from etfarm.client.submit.prepared import PreparedExport, PreparedMethod, PreparedModel
from etfarm.client.submit.recipes import read_recipe
from etfarm.client.submit.submission import Submission
from etfarm.client.transport import decode, retry, transfers
from etfarm.client.transport.retry import Patience
from etfarm.v1 import artifact_pb2, common_pb2, job_pb2, report_pb2
from etfarm.wire import digest, recipes, report, tensors
from etfarm.wire.errors import EtfarmError, Fault, error_of
from etfarm.wire.status import to_status
from tests.support.fake_servers import serving
from tests.support.golden import Golden
from tests.support.programs import program
from tests.support.refusals import refuses

TWO = PreparedModel.of("two", {"forward": PreparedMethod(b"pt2", (b"sample",), ("x", "y"), 12.0)})
INT8 = "xnnpack_pt2e_int8_static_per_channel"


def _submission(models: list[PreparedModel], *names: str) -> Submission:
    created = Submission(job_pb2.JobSpec())
    created.add_candidates(models, [read_recipe(name) for name in names])
    return created


def _with_inputs(values: Any, models: list[PreparedModel], *methods: str) -> Submission:
    created = Submission(job_pb2.JobSpec())
    created.add_inputs(read_named(values), models, list(methods))
    return created


def test_each_model_with_each_recipe_is_a_candidate_and_bytes_are_sent_once() -> None:
    other = PreparedModel.of("other", {"forward": PreparedMethod(b"pt2")})
    created = _submission([TWO, other], INT8, "portable")
    named = [(candidate.name, recipes.from_json(candidate.recipe).name) for candidate in created.spec.candidates]
    assert named == [("two", INT8), ("two", "portable"), ("other", INT8), ("other", "portable")]
    assert set(created.blobs) == {digest.of_bytes(b"pt2"), digest.of_bytes(b"sample")}


def test_models_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    def candidates(*models: PreparedModel) -> list[str]:
        return [candidate.name for candidate in _submission(list(models), "portable").spec.candidates]

    files = [tmp_path / name / "net.pte" for name in ("v1/build", "v2/build", "v2/other")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(Path(program("add").path).read_bytes())
    one, two, three = (prepare(file) for file in files)
    assert candidates(one, TWO, TWO) == ["net", "two #0", "two #1"]
    assert candidates(one, three) == ["build/net", "other/net"]
    assert candidates(one, TWO, two, three) == ["v1/build/net", "two", "v2/build/net", "v2/other/net"]
    assert candidates(one, one) == ["net #0", "net #1"], "one file, to see how far equal ones differ"
    assert candidates(one, replace(TWO, name="net")) == ["net #0", "net #1"]


def test_a_recipe_file_is_called_by_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "int8_ptd.toml"
    file.write_text('recipe = "portable"\n[executorch]\nexternal_constants = true\n')
    candidates = _submission([TWO], str(file), "portable").spec.candidates
    assert [candidate.recipe_label for candidate in candidates] == ["int8_ptd", ""]


def test_the_time_of_the_export_goes_along() -> None:
    (candidate,) = _submission([TWO], "portable").spec.candidates
    (stage,) = candidate.stages_done
    assert (stage.stage, stage.duration_ms, stage.where) == ("TORCH_EXPORT", 12.0, common_pb2.ACTOR_CLIENT)


def test_a_program_is_one_candidate_whatever_the_recipes(tmp_path: Path) -> None:
    pte = tmp_path / "x.pte"
    pte.write_bytes(b"program")
    (candidate,) = _submission([PreparedModel("x", program=pte)], "portable", "xnnpack_fp32").spec.candidates
    assert candidate.recipe == ""
    assert candidate.program.digest == digest.of_program(digest.of_bytes(b"program"), {})


def _inputs(created: Submission, method: str = "forward") -> list[tensors.Value]:
    data = created.blobs[created.spec.inputs[method].digest][1]
    assert isinstance(data, bytes)
    return tensors.decode(data)


@pytest.mark.parametrize(
    "values",
    [{"y": np.zeros(2), "x": np.ones(2)}, {"1": np.zeros(2), "0": np.ones(2)}, [np.ones(2), np.zeros(2)], Path("in.npz")],
    ids=["names", "places", "list", "file"],
)
def test_inputs_are_ordered_as_the_method_takes_them(values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", y=np.zeros(2), x=np.ones(2))
    first, second = _inputs(_with_inputs(values, [TWO]))
    assert (first.name, second.name) == ("x", "y") and isinstance(first, tensors.Tensor)
    assert tensors.to_array(first).tolist() == [1, 1]


def test_an_unknown_input_is_refused() -> None:
    with pytest.raises(UnknownInput):
        _with_inputs({"z": np.ones(2)}, [TWO])


NOTHING = [{}, [], "empty.npz"]
"""No inputs, which is not the same as None."""


@pytest.fixture
def nothing(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param != "empty.npz":
        return request.param
    np.savez(tmp_path / request.param)
    return tmp_path / request.param


@pytest.mark.parametrize("nothing", NOTHING, indirect=True)
@pytest.mark.parametrize("chosen", [[], ["forward"]])
def test_a_method_that_takes_inputs_is_not_given_others_than_none(golden: Golden, nothing: Any, chosen: list[str]) -> None:
    with golden.refuses("INPUT_MISSING") as caught:
        _with_inputs(nothing, [TWO], *chosen)
    assert exit_code(caught.value) == 2


@pytest.mark.parametrize("nothing", NOTHING, indirect=True)
def test_no_inputs_are_those_of_all_methods_that_run(golden: Golden, nothing: Any) -> None:
    taken = {"encode": ("image",), "reset": ()}
    model = PreparedModel.of("m", {name: PreparedMethod(b"pt2", (), names) for name, names in taken.items()})
    with golden.refuses("INPUT_MISSING"):
        _with_inputs(nothing, [model])
    created = _with_inputs(nothing, [model], "reset")
    assert list(created.spec.inputs) == ["reset"] and _inputs(created, "reset") == []


@pytest.mark.parametrize("nothing", NOTHING, indirect=True)
def test_what_a_ready_program_takes_is_the_farms_to_say(nothing: Any, tmp_path: Path) -> None:
    created = _with_inputs(nothing, [PreparedModel("x", program=tmp_path / "x.pte")])
    assert list(created.spec.inputs) == ["forward"] and _inputs(created) == []


def test_a_program_takes_places_in_their_order(tmp_path: Path) -> None:
    program = PreparedModel("x", program=tmp_path / "x.pte")
    turned = {str(place): np.full(1, place) for place in reversed(range(11))}
    values = _inputs(_with_inputs(turned | {"arr_11": np.full(1, 11)}, [program], "encode"), "encode")
    assert [tensors.to_array(value).item() for value in values if isinstance(value, tensors.Tensor)] == list(range(12))


@pytest.mark.parametrize("keys", [("b", "a"), ("forward/0", "forward/y"), ("0", "2"), ("0", "arr_0")])
def test_a_program_takes_no_names_and_no_gaps(golden: Golden, tmp_path: Path, keys: tuple[str, ...]) -> None:
    program = PreparedModel("x", program=tmp_path / "x.pte")
    with pytest.raises(EtfarmError) as caught:
        _with_inputs({key: np.ones(1) for key in keys}, [program])
    golden.check(caught.value)
    assert exit_code(caught.value) == 2


@pytest.mark.parametrize(
    ("model", "options"),
    [("demo:resnet8", {"example_inputs": (1,)}), (3, {}), ({"a": "x.pt2", "b": 3}, {}), ({}, {})],
    ids=["inputs of its own", "another object", "methods of two kinds", "no methods"],
)
def test_what_is_no_model_is_refused_with_the_forms_of_one(golden: Golden, model: Any, options: dict[str, Any]) -> None:
    with golden.refuses("BAD_MODEL_ARGUMENT"):
        prepare(model, **options)


@pytest.mark.remedy("INPUTS_DIFFER")
def test_one_file_cannot_serve_models_that_order_it_otherwise() -> None:
    turned = PreparedModel.of("turned", {"forward": PreparedMethod(b"", input_names=("y", "x"))})
    with refuses("INPUTS_DIFFER"):
        _with_inputs({"x": np.ones(1), "y": np.ones(1)}, [TWO, turned])
    for alone in (TWO, turned):
        _with_inputs({"x": np.ones(1), "y": np.ones(1)}, [alone])


def test_a_recipe_file_is_the_recipe_that_it_names(golden: Golden, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "xnnpack_fp32"\n')
    assert read_recipe(str(path)).digest == recipes.parse("xnnpack_fp32").digest
    with golden.refuses("BAD_RECIPE_TEXT"):
        read_recipe(str(tmp_path / "none.toml"))
    path.write_text('recipe = "xnnpack_fp32"\nstrikt = true\n')
    with golden.refuses("BAD_RECIPE_FIELD"):
        read_recipe(str(path))


def test_samples_go_along_only_where_something_reads_them() -> None:
    created = _submission([TWO], "xnnpack_fp32", "xnnpack_pt2e_int8_dynamic_per_channel", INT8, "acme.fast")
    counts = [len(candidate.model.methods["forward"].calibration) for candidate in created.spec.candidates]
    assert counts == [0, 0, 1, 1]  # the client does not know what a plug-in of the server reads
    assert digest.of_bytes(b"sample") not in _submission([TWO], "portable").blobs


def test_every_method_and_constant_goes_along_with_its_times() -> None:
    methods = {
        "encode": PreparedMethod(b"e", export_ms=5.0, transformed=True, transform_ms=1.5),
        "decode": PreparedMethod(b"d", export_ms=7.0, quantized=True),
    }
    export = PreparedExport(methods, {"bos": b"constant"})
    (candidate,) = _submission([PreparedModel("m", {"": export}, eager=True)], "portable").spec.candidates
    assert {name: method.exported_program.digest for name, method in candidate.model.methods.items()} == {
        "encode": digest.of_bytes(b"e"),
        "decode": digest.of_bytes(b"d"),
    }
    assert candidate.model.constant_methods["bos"].digest == digest.of_bytes(b"constant")
    reported = [(stage.stage, stage.where, stage.duration_ms, dict(stage.methods)) for stage in candidate.stages_done]
    assert reported == [
        ("SOURCE_TRANSFORM", common_pb2.ACTOR_CLIENT, 1.5, {"encode": 1.5}),
        ("QUANTIZE", common_pb2.ACTOR_CLIENT, 0.0, {}),
        ("TORCH_EXPORT", common_pb2.ACTOR_CLIENT, 12.0, {"encode": 5.0, "decode": 7.0}),
    ]
    assert not candidate.stages_done[1].HasField("duration_ms")


def test_the_times_of_methods_are_summed_without_digits_of_rounding() -> None:
    methods = {name: PreparedMethod(b"m", export_ms=time) for name, time in (("encode", 0.1), ("decode", 0.2))}
    (stage,) = PreparedExport(methods).stages_done()
    assert stage.duration_ms == 0.3


def test_a_programs_data_files_are_part_of_its_digest(tmp_path: Path) -> None:
    pte, ptd = tmp_path / "x.pte", tmp_path / "weights.ptd"
    pte.write_bytes(b"program")
    ptd.write_bytes(b"\0" * 8 + b"FH01")
    created = Submission(job_pb2.JobSpec())
    created.add_candidates([prepare(PreparedModel("x", program=pte), data=[ptd])], [])
    (candidate,) = created.spec.candidates
    weights = digest.of_file(ptd)
    assert candidate.program.data["weights"].digest == weights
    assert candidate.program.digest == digest.of_program(digest.of_bytes(b"program"), {"weights": weights})


@pytest.mark.parametrize(("name", "content"), [("none.ptd", None), ("x.ptd", b"PK")])
def test_what_is_no_data_file_is_refused(golden: Golden, tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with golden.refuses("BAD_DATA_FILE"):
        prepare(PreparedModel("x", program=tmp_path / "x.pte"), data=[tmp_path / name])
    with golden.refuses("BAD_DATA_FILE"):
        prepare(TWO, data=[tmp_path / name])


def test_a_recipe_that_rewrites_modules_is_refused_for_what_is_exported_already(golden: Golden) -> None:
    four_bit = "xnnpack_torchao_int8da_int4w_per_channel"
    with golden.refuses("RECIPE_NEEDS_EAGER_MODULE") as caught:
        prepare(TWO, recipes=["xnnpack_fp32", four_bit])
    assert (caught.value.reason, exit_code(caught.value)) == ("RECIPE_NEEDS_EAGER_MODULE", 2)
    done = PreparedModel.of("done", {"forward": PreparedMethod(b"", transformed=True)})
    assert prepare(done, recipes=[four_bit]) == done


def _result(*states: str, errors: bool = True) -> JobResult:
    error = common_pb2.Error(fault=common_pb2.FAULT_USER, reason="PROGRAM_CRASHED", message="It fell.", stage="TIMED")
    reports = [
        report_pb2.Report(
            id=str(index),
            state=common_pb2.CellState.Value(f"CELL_STATE_{state}"),
            model=report_pb2.ReportModel(name=f"m{index}"),
            error=error if state == "FAILED" else None,
            latency=report_pb2.Latency(p50_ns=5.0) if state == "SUCCEEDED" else None,
        )
        for index, state in enumerate(states)
    ]
    job = job_pb2.Job(id="j", state=job_pb2.JOB_STATE_FAILED if "FAILED" in states else job_pb2.JOB_STATE_SUCCEEDED)
    return JobResult.from_dict(report.document(job, reports, None))


def test_a_report_is_read_by_attributes_and_by_keys() -> None:
    result = _result("SUCCEEDED").report
    assert result.latency is not None
    assert result.latency.p50_ns == result["latency"]["p50_ns"] == 5.0
    assert result.memory is None
    assert result.json()["state"] == "SUCCEEDED"
    with pytest.raises(AttributeError, match="p51_ns"):
        result.latency.p51_ns  # type: ignore[attr-defined]  # noqa: B018


def test_a_report_is_a_mapping_of_plain_json() -> None:
    result = _result("SUCCEEDED").report
    assert dict(result) == result.json() and result["memory"] is None
    assert result["latency"] == dict(result.latency or {})
    assert "latency" in result and len(result) == len(result.json())


def test_a_failed_cell_raises_only_on_report() -> None:
    result = _result("FAILED")
    assert result.reports[0].state == "FAILED"
    with pytest.raises(EtfarmError, match="It fell") as caught:
        _ = result.report
    assert (caught.value.reason, caught.value.fault, caught.value.stage) == ("PROGRAM_CRASHED", Fault.USER, "TIMED")


@pytest.mark.remedy("SEVERAL_REPORTS", "JOB_FAILED")
def test_several_cells_have_no_single_report(golden: Golden) -> None:
    with pytest.raises(SeveralReports):
        _ = _result("SUCCEEDED", "SUCCEEDED").report
    with golden.refuses("JOB_FAILED"):
        _ = _result("SUCCEEDED", "FAILED").report
    assert len(_result("SUCCEEDED", "SUCCEEDED").reports) == 2
    assert [report.state for report in _result("SUCCEEDED", "FAILED").reports] == ["SUCCEEDED", "FAILED"]


def test_events_are_plain_values() -> None:
    cell = job_pb2.Cell(id="c", state=common_pb2.CELL_STATE_RUNNING, candidate_name="m")
    messages = [
        job_pb2.JobEvent(sequence=1, job=job_pb2.Job(id="j", state=job_pb2.JOB_STATE_QUEUED), job_state=job_pb2.JOB_STATE_QUEUED),
        job_pb2.JobEvent(sequence=2, cell=cell, job_state=job_pb2.JOB_STATE_RUNNING),
        job_pb2.JobEvent(progress=job_pb2.Progress(cell_id="c", phase="TIMED")),
        job_pb2.JobEvent(log=job_pb2.LogLine(number=1, source=common_pb2.LOG_SOURCE_RUNNER, text="hello")),
    ]
    events = [decode.event(message) for message in messages]
    assert [type(event) for event in events] == [JobChanged, CellChanged, Progress, LogLine]
    assert [event.sequence for event in events if event] == [1, 2, None, None]
    assert decode.event(job_pb2.JobEvent()) is None
    assert [str(event) for event in events] == ["job j: queued", "m: running", "cell c: measuring", "runner: hello"]


AWAY = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="away")


def _refusal(fault: Fault, reason: str, message: str) -> grpc.aio.AioRpcError:
    status = to_status(error_of(fault, reason, message))
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata))


async def test_a_call_is_made_again_while_the_server_is_away() -> None:
    answers = [AWAY, AWAY, "here"]

    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with patience_with_a_server() as patience:
        assert await retry.repeat(call, patience.backoff()) == "here"


@asynccontextmanager
async def patience_with_a_server(wait_s: float | None = None) -> AsyncIterator[Patience]:
    """The patience of calls to a server at `s`, which answers every question and has none of the farm's services."""
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        patience = Patience.of(channel, "s", wait_s)
        yield patience
        patience.presence.close()


BUSY_SERVER = """
import asyncio, sys
import grpc

async def answer(request, context):
    sys.stdin.read()  # the event loop is busy until stdin ends
    return request

async def main():
    limits = [("grpc.server.max_pending_requests", 2), ("grpc.server.max_pending_requests_hard_limit", 2)]
    server = grpc.aio.server(options=limits)
    server.add_registered_method_handlers("busy.Service", {"Call": grpc.unary_unary_rpc_method_handler(answer)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""


async def test_calls_that_a_busy_server_has_no_room_for_are_made_again() -> None:
    """gRPC cancels random ones while more calls of a method wait than it may hold."""
    codes: list[grpc.StatusCode] = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY_SERVER, **pipes)
    assert server.stdin is not None and server.stdout is not None
    busy = server.stdin
    try:
        port = int(await server.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.unary_unary("/busy.Service/Call")

            async def call(number: int) -> bytes:
                try:
                    return cast(bytes, await method(bytes([number])))
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())
                    busy.close()
                    raise

            patience = Patience.of(channel, "s")
            calls = [retry.repeat(partial(call, number), patience.backoff()) for number in range(64)]
            assert await asyncio.gather(*calls) == [bytes([number]) for number in range(64)]
    finally:
        server.kill()
        await server.wait()
    assert set(codes) == {grpc.StatusCode.CANCELLED}


async def test_patience_ends() -> None:
    async def call() -> str:
        raise AWAY

    async with patience_with_a_server(wait_s=0.3) as patience:
        with refuses("SERVER_UNREACHABLE"):
            await retry.repeat(call, patience.backoff())


async def test_a_refusal_is_not_tried_again(golden: Golden) -> None:
    tries = []

    async def call() -> str:
        tries.append(1)
        raise _refusal(Fault.USER, "JOB_NOT_FOUND", "There is no job x.")

    async with patience_with_a_server() as patience:
        with golden.refuses("JOB_NOT_FOUND"):
            await retry.repeat(call, patience.backoff())
    assert tries == [1]


class _BrokenWatch:
    """Stubs whose Watch breaks after each event, and gives an old one again."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.asked: list[int] = []
        self.jobs = self

    def lasting(self, remedy: Any) -> _BrokenWatch:
        return self

    def Watch(self, request: job_pb2.WatchJobRequest) -> Any:
        self.asked.append(request.after_sequence)

        async def stream() -> Any:
            for sequence in range(max(1, request.after_sequence), 4):
                yield job_pb2.JobEvent(sequence=sequence, job=job_pb2.Job(id="j"), job_state=job_pb2.JOB_STATE_RUNNING)
                if sequence == request.after_sequence + 1 and sequence < 3:
                    raise AWAY

        return stream()


async def test_a_watcher_goes_on_after_the_last_event_it_saw() -> None:
    async with patience_with_a_server() as patience:
        stubs = _BrokenWatch(patience)
        job = AsyncJob(cast(Any, stubs), job_pb2.Job(id="j", state=job_pb2.JOB_STATE_QUEUED))
        assert [event.sequence async for event in job.watch()] == [1, 2, 3]
    assert stubs.asked == [0, 1, 2]


async def test_a_farm_outside_of_its_block_says_so() -> None:
    with refuses("NOT_CONNECTED"):
        await AsyncFarm(UNREACHABLE).devices()
    with refuses("NOT_CONNECTED"):
        Farm(UNREACHABLE).devices()


UNREACHABLE = "127.0.0.1:1"


def test_the_synchronous_farm_raises_what_the_other_does() -> None:
    with refuses("SERVER_UNREACHABLE"), Farm(UNREACHABLE, server_wait_s=0):
        pass


def test_importing_the_library_loads_neither_grpc_nor_torch() -> None:
    code = "import sys, etfarm.client; print({'grpc', 'torch', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_a_farm_loads_what_submits_and_compares_only_when_it_does() -> None:
    code = "import sys; from etfarm.client import AsyncFarm; AsyncFarm('127.0.0.1:1'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "etfarm.client.transport.stubs" in loaded
    unused = ("export", "submit.preparation", "submit.npz", "jobs", "sessions", "datasets")
    assert not loaded & {f"etfarm.client.{name}" for name in unused}
    assert not loaded & {"etfarm.wire.comparison", "etfarm.wire.recipes", "rich", "numpy"}


class _Store:
    """An artifact store in memory that notes how many uploads there are at one time."""

    def __init__(self, known: set[str], patience: Patience) -> None:
        self.artifacts, self.patience = self, patience
        self.known = known
        self.asked: list[int] = []
        self.live = self.most = 0

    async def FindMissing(self, request: artifact_pb2.FindMissingArtifactsRequest) -> artifact_pb2.FindMissingArtifactsResponse:
        self.asked.append(len(request.digests))
        return artifact_pb2.FindMissingArtifactsResponse(missing=[one for one in request.digests if one not in self.known])

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest) -> artifact_pb2.UploadStatus:
        return artifact_pb2.UploadStatus(digest=request.digest, complete=request.digest in self.known)

    async def Upload(self, requests: Any) -> artifact_pb2.UploadStatus:
        self.live += 1
        self.most = max(self.most, self.live)
        digest = ""
        async for request in requests:
            digest = digest or request.header.artifact.digest
            await asyncio.sleep(0)
        self.live -= 1
        self.known.add(digest)
        return artifact_pb2.UploadStatus(digest=digest, complete=True)


async def test_thousands_of_samples_are_asked_for_in_batches_and_sent_a_few_at_a_time() -> None:
    created = Submission(job_pb2.JobSpec())
    for number in range(6000):
        created.add(number.to_bytes(4, "big"))
    moved: list[tuple[int, int]] = []
    async with patience_with_a_server() as patience:
        store = _Store(set(list(created.blobs)[:5900]), patience)
        sent = await transfers.upload_missing(
            cast(Any, store), created.blobs, on_progress=lambda done, total: moved.append((done, total))
        )
    assert store.asked == [5000, 1000]
    assert 1 < store.most <= transfers.PARALLEL_SMALL
    assert sent == 400 and moved[-1] == (400, 400) and moved == sorted(moved)
    assert store.known == set(created.blobs)


async def test_an_upload_that_is_refused_ends_the_others(golden: Golden, tmp_path: Path) -> None:
    class Full(_Store):
        async def Upload(self, requests: Any) -> Any:
            raise _refusal(Fault.FARM, "STORE_FULL", "The store is full.")

    created = Submission(job_pb2.JobSpec())
    for number in range(40):
        created.add(number.to_bytes(4, "big"))
    async with patience_with_a_server() as patience:
        with golden.refuses("STORE_FULL"):
            await transfers.upload_missing(cast(Any, Full(set(), patience)), created.blobs)


@pytest.mark.parametrize(
    ("name", "file"),
    [("weights", "weights.ptd"), ("weights.ptd", "weights.ptd"), ("../../etc/x", "_.._etc_x.ptd"), ("", "_.ptd")],
)
def test_a_data_file_stays_in_its_folder_whatever_the_program_calls_it(name: str, file: str) -> None:
    assert data_file_name(name) == file


def test_files_of_several_methods_are_called_by_them() -> None:
    assert method_file(Path("out/x.pt2"), "decode") == Path("out/x.decode.pt2")


def test_every_public_name_is_there() -> None:
    import etfarm.client

    for name in etfarm.client.__all__:
        assert getattr(etfarm.client, name).__name__ == name
    with pytest.raises(AttributeError):
        etfarm.client.nothing  # noqa: B018
