"""The table of limits: nothing of the contract is unbounded, and what a large farm needs is admitted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from etfarm.server.rpc.door import limits
from etfarm.server.rpc.door.admission import Scan, TooManyFields, admitted, deserializer
from etfarm.server.rpc.door.limits import LIMITS, SIZES, LimitExceeded, check
from etfarm.server.rpc.services.agents import Salvaged
from etfarm.v1 import agent_pb2, artifact_pb2, common_pb2, device_pb2, job_pb2
from etfarm.wire.errors import Fault
from etfarm.wire.status import from_proto
from tests.support.contract import RPCS
from tests.support.refusals import refuses

SUBMIT = "/etfarm.v1.JobService/Submit"
MOST_CHARACTERS = 256 << 10
MOST_BYTES = 4 << 20
MOST_ENTRIES = 1_000_000


def messages() -> Iterator[Descriptor]:
    """Every type of message that a request of the contract may have in it."""
    waiting = [method.input_type for method in RPCS.values()]
    known: set[str] = set()
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name not in known:
            known.add(descriptor.full_name)
            yield descriptor
            waiting += [field.message_type for field in descriptor.fields if field.message_type is not None]


FIELDS = [field for descriptor in messages() for field in descriptor.fields if descriptor.file.package == "etfarm.v1"]
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _values(field: FieldDescriptor, count: int) -> Any:
    if field.message_type is not None:
        return [message_factory.GetMessageClass(field.message_type)() for _ in range(count)]
    return [_text(field, 1) if field.type in TEXTS else 1] * count


def _text(field: FieldDescriptor, length: int) -> str | bytes:
    return "a" * length if field.type == FieldDescriptor.TYPE_STRING else b"a" * length


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _message(field: FieldDescriptor) -> Message:
    created: Message = message_factory.GetMessageClass(field.containing_type)()
    return created


@pytest.mark.parametrize("field", [f for f in FIELDS if f.type in TEXTS and not f.is_repeated], ids=lambda f: f.full_name)
def test_every_text_of_every_request_is_bounded(field: FieldDescriptor) -> None:
    limit = limits.limit_of(field)
    assert limit.most <= (MOST_CHARACTERS if field.type == FieldDescriptor.TYPE_STRING else MOST_BYTES)
    if field.full_name == "etfarm.v1.Artifact.digest" or field.containing_type.GetOptions().map_entry:
        return  # below
    message = _message(field)
    setattr(message, field.name, _text(field, limit.most))
    check(message)
    setattr(message, field.name, _text(field, limit.most + 1))
    with pytest.raises(LimitExceeded) as refused:
        check(message)
    assert refused.value.metadata == {
        "field": field.full_name.removeprefix("etfarm.v1."), "limit": str(limit.most), "got": str(limit.most + 1),
    }  # fmt: skip


@pytest.mark.remedy("LIMIT_EXCEEDED")
@pytest.mark.parametrize("field", [f for f in FIELDS if f.is_repeated and not _is_map(f)], ids=lambda f: f.full_name)
def test_every_list_of_every_request_is_bounded(field: FieldDescriptor) -> None:
    most = limits.limit_of(field).most
    assert most <= MOST_ENTRIES
    message = _message(field)
    getattr(message, field.name).extend(_values(field, most + 1))
    with pytest.raises(LimitExceeded) as refused:
        check(message)
    assert int(refused.value.metadata["got"]) > int(refused.value.metadata["limit"])
    message = _message(field)
    getattr(message, field.name).extend(_values(field, 1))  # a part of them
    check(message)
    if field.type in TEXTS:
        message = _message(field)
        getattr(message, field.name).append(_text(field, limits.limit_of(field, item=True).most + 1))
        with pytest.raises(LimitExceeded):
            check(message)


@pytest.mark.parametrize("field", [f for f in FIELDS if _is_map(f)], ids=lambda f: f.full_name)
def test_every_map_of_every_request_is_bounded(field: FieldDescriptor) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]  # type: ignore[union-attr]

    def entered(name: str) -> Message:
        message = _message(field)
        entries = getattr(message, field.name)
        if value.message_type is not None:
            entries[name].SetInParent()
        else:
            entries[name] = _text(value, 1) if value.type in TEXTS else 1.0
        return message

    def name_of(described: FieldDescriptor) -> str:
        return described.full_name.removeprefix("etfarm.v1.")

    check(entered("a" * limits.limit_of(key).most))
    with pytest.raises(LimitExceeded, match=f"A key of `{name_of(field)}` must have at most") as refused:
        check(entered("a" * (limits.limit_of(key).most + 1)))
    assert refused.value.metadata["field"] == name_of(key)
    many = _message(field)
    for number in range(limits.limit_of(field).most + 1):
        many.MergeFrom(entered(str(number)))
    with pytest.raises(LimitExceeded, match=name_of(field)):
        check(many)
    if value.type in TEXTS:
        message = _message(field)
        getattr(message, field.name)["k"] = _text(value, limits.limit_of(value).most + 1)
        with pytest.raises(LimitExceeded, match=f"A value of `{name_of(field)}` must have at most"):
            check(message)


@pytest.mark.parametrize(
    "field", [f for f in FIELDS if f.type == FieldDescriptor.TYPE_DOUBLE and not f.is_repeated], ids=lambda f: f.full_name
)
def test_every_number_of_every_request_is_finite(field: FieldDescriptor) -> None:
    if field.containing_type.GetOptions().map_entry:
        return
    for value in (math.inf, -math.inf, math.nan):
        message = _message(field)
        setattr(message, field.name, value)
        with pytest.raises(LimitExceeded, match="finite"):
            check(message)


def test_the_tables_name_fields_and_requests_that_there_are() -> None:
    known = {field.full_name.removeprefix("etfarm.v1.") for field in FIELDS}
    assert {name.removesuffix("[]") for name in LIMITS} <= known
    assert set(SIZES) <= {method.input_type.full_name for method in RPCS.values()}


def test_what_a_large_farm_needs_is_admitted() -> None:
    phones = [device_pb2.Device(id=f"{n:032}", labels={f"k{k}": "v" * 100 for k in range(64)}) for n in range(300)]
    check(agent_pb2.AgentMessage(hello=agent_pb2.Hello(devices=phones)))
    submit = job_pb2.SubmitJobRequest(request_id="r")
    for number in range(10):
        method = submit.spec.candidates.add(name=f"net-{number}").model.methods["forward"]
        method.calibration.extend([common_pb2.Artifact(digest="a" * 64, size_bytes=1)] * 10_000)
    assert submit.ByteSize() < SIZES["etfarm.v1.SubmitJobRequest"].most_bytes
    check(submit)
    check(job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(devices=[job_pb2.DeviceChoice(selector="id=a")] * 1_000)))
    result = agent_pb2.AgentMessage()
    result.run_result.candidates.add().traced_ns.extend([10**9] * 1_000_000)
    assert result.ByteSize() < SIZES["etfarm.v1.AgentMessage"].most_bytes
    check(result)
    check(artifact_pb2.FindMissingArtifactsRequest(digests=["a" * 64] * 10_000))


def test_a_malformed_digest_and_an_unknown_value_of_an_enum_are_refused() -> None:
    with pytest.raises(LimitExceeded) as refused:
        check(artifact_pb2.UploadArtifactRequest(header=artifact_pb2.UploadHeader(artifact=common_pb2.Artifact(digest="A" * 64))))
    assert refused.value.reason == "DIGEST_MALFORMED"
    with pytest.raises(LimitExceeded, match=r"Error\.fault"):
        check(common_pb2.Error(fault=99))  # type: ignore[arg-type]


async def admit(method: str, data: bytes, kind: type[Message]) -> Any:
    return await admitted(deserializer(method, kind.FromString)(data))


@pytest.mark.parametrize(
    "data",
    [
        b"\x12" + b"\x80\x80\x80\x02" + b"\x1a\x00" * (2 << 20),  # empty candidates
        b"\x10\x01" * (4 << 20),  # a field that is not in the contract
        b"\x12\xff\xff\xff\x03" + b"\x2a\x00" * ((4 << 20) - 1),  # empty names of methods
        b"\x12\xff\xff\xff\x03" + b"\x30\x01" * ((4 << 20) - 1),  # thread counts, each by itself
        b"a" * (9 << 20),
    ],
    ids=["messages", "unknown", "texts", "numbers", "bytes"],
)
async def test_bytes_that_would_become_a_hundred_times_as_many_are_refused_undecoded(data: bytes) -> None:
    decoded: list[bytes] = []

    def decode(data: bytes) -> Message:
        decoded.append(data)
        return job_pb2.SubmitJobRequest.FromString(data)

    with pytest.raises(LimitExceeded):
        await admitted(deserializer(SUBMIT, decode)(data))
    assert not decoded


async def test_packed_numbers_are_counted_before_they_are_decoded() -> None:
    message = agent_pb2.AgentMessage()
    message.run_result.candidates.add().traced_ns.extend([1] * 11_000_000)
    with pytest.raises(TooManyFields):
        Scan(message.SerializeToString(), message.DESCRIPTOR, 300_000).run(1 << 40)


@pytest.mark.remedy("MALFORMED_REQUEST")
async def test_bytes_that_are_no_message_are_refused_as_such() -> None:
    for data in (b"\xff\xff\xff", b"\xff" * 100_000, b"\x12\xff\xff\xff\xff\x0f" + b"a" * 100_000):
        with refuses("MALFORMED_REQUEST"):
            await admit(SUBMIT, data, job_pb2.SubmitJobRequest)
    assert await admit(SUBMIT, job_pb2.SubmitJobRequest(request_id="r").SerializeToString(), job_pb2.SubmitJobRequest)


async def test_others_get_their_turn_while_a_large_request_is_looked_at() -> None:
    submit = job_pb2.SubmitJobRequest(request_id="r")
    method = submit.spec.candidates.add(name="net").model.methods["forward"]
    method.calibration.extend([common_pb2.Artifact(digest="a" * 64, size_bytes=1)] * 10_000)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    assert await admit(SUBMIT, submit.SerializeToString(), job_pb2.SubmitJobRequest) == submit
    running.cancel()
    assert turns > 10


async def sent(*sent_messages: Message) -> AsyncIterator[Message]:
    for message in sent_messages:
        yield message


async def salvaged(*sent_messages: Message) -> list[Any]:
    return [message async for message in Salvaged(await admitted(sent(*sent_messages)))]


async def test_over_long_texts_of_an_agent_are_cut_and_the_fault_stays_the_programs() -> None:
    result = agent_pb2.RunResult(attempt_id="a", device_id="d")
    error = common_pb2.Error(fault=common_pb2.FAULT_USER, reason="PROGRAM_CRASHED", message="x" * (1 << 20))
    result.candidates.add(cell_id="c").error.CopyFrom(error)
    progress = agent_pb2.RunProgress(attempt_id="a", log_lines=["y" * (1 << 20)] * 3 + ["z"] * 1_500)
    first, second = await salvaged(
        agent_pb2.AgentMessage(run_result=result), agent_pb2.AgentMessage(run_progress=progress)
    )  # fmt: skip
    (candidate,) = first.run_result.candidates
    assert (candidate.error.reason, candidate.error.fault) == ("PROGRAM_CRASHED", common_pb2.FAULT_USER)
    assert len(candidate.error.message) == LIMITS["Error.message"].most
    assert len(second.run_progress.log_lines) == 1_000
    assert second.run_progress.log_lines[3] == "z"


async def test_a_result_that_no_message_may_carry_is_its_devices_failure_and_other_messages_are_dropped() -> None:
    result = agent_pb2.RunResult(attempt_id="a", device_id="d")
    result.candidates.add().traced_ns.extend([1] * 1_000_001)
    beat = agent_pb2.Heartbeat(telemetry={"d": device_pb2.DeviceTelemetry(load_1m=math.nan)})
    gone = agent_pb2.AgentMessage(device_gone=agent_pb2.DeviceGone(device_id="d"))
    failed, last = await salvaged(
        agent_pb2.AgentMessage(run_result=result), agent_pb2.AgentMessage(heartbeat=beat), gone
    )  # fmt: skip
    assert (failed.run_result.attempt_id, failed.run_result.device_id) == ("a", "d")
    error = from_proto(failed.run_result.error)
    assert (error.reason, error.fault) == ("RESULT_TOO_LARGE", Fault.DEVICE)
    assert last == gone


async def test_a_hello_that_is_too_large_is_refused() -> None:
    hello = agent_pb2.Hello(devices=[device_pb2.Device(id=str(number)) for number in range(1_001)])
    with pytest.raises(LimitExceeded, match=r"Hello\.devices"):
        await salvaged(agent_pb2.AgentMessage(hello=hello))
