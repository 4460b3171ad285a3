"""Messages as the library's values: each attribute of each class, and the ones that are more than a copied field."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from random import Random
from types import NoneType
from typing import Any, Final

import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.client import models
from etfarm.client.transport import decode
from etfarm.client.transport.decode import decoded
from etfarm.v1 import agent_pb2, artifact_pb2, common_pb2, compile_pb2, device_pb2, farm_pb2, job_pb2, project_pb2, webhook_pb2
from etfarm.wire.errors import EtfarmError
from tests.support.messages import filled

CLASSES: Final[dict[type[Any], type[Message]]] = {
    models.Agent: agent_pb2.Agent,
    models.Artifact: artifact_pb2.StoredArtifact,
    models.Bundle: agent_pb2.RunnerBundle,
    models.Device: device_pb2.Device,
    models.HealthEvent: device_pb2.HealthEvent,
    models.JobInfo: job_pb2.Job,
    models.LogLine: job_pb2.LogLine,
    models.Project: project_pb2.Project,
    models.QueuedRun: job_pb2.QueuedRun,
    models.RecipeInfo: compile_pb2.RecipeInfo,
    models.RemovedAgent: agent_pb2.RemoveAgentResponse,
    models.ReservationInfo: device_pb2.Reservation,
    models.RetiredDevice: device_pb2.RetireDeviceResponse,
    models.ServerInfo: farm_pb2.ServerInfo,
    models.ServerStatus: farm_pb2.ServerStatus,
    models.Telemetry: device_pb2.DeviceTelemetry,
    models.UpgradeProgress: agent_pb2.UpgradeAgentProgress,
    models.Webhook: webhook_pb2.Webhook,
    models.WebhookDelivery: webhook_pb2.WebhookDelivery,
}
SECOND: Final = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


def require_types(value: Any, hint: Any, where: str, *, is_full: bool) -> None:
    """Check that a value has its declared type, and that it is there if the message was full."""
    if NoneType in typing.get_args(hint):
        if value is None:
            assert not is_full or where.endswith(".sequence"), where
            return
        (hint,) = (part for part in typing.get_args(hint) if part is not NoneType)
    origin = typing.get_origin(hint) or hint
    assert isinstance(value, float | int if origin is float else origin), (where, value)
    if isinstance(value, str | tuple | dict):
        assert value or not is_full, where
    if isinstance(value, datetime):
        assert value.tzinfo is UTC, where
    for index, item in enumerate(value if isinstance(value, tuple) else ()):
        require_types(item, typing.get_args(hint)[0], f"{where}[{index}]", is_full=is_full)
    if is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        for attribute in fields(value):
            name = attribute.name
            require_types(getattr(value, name), hints[name], f"{where}.{name}", is_full=is_full)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_every_attribute_has_its_type_and_comes_from_the_message(kind: type[Any], share: float) -> None:
    for seed in range(8):
        message = filled(CLASSES[kind](), Random(seed), share)
        require_types(decoded(kind, message), kind, kind.__name__, is_full=share == 1)


@pytest.mark.parametrize("name", ["job", "cell", "progress", "log"])
def test_every_attribute_of_an_event_comes_from_the_message(name: str) -> None:
    message = job_pb2.JobEvent(sequence=1, time=Timestamp(seconds=1), job_state=job_pb2.JOB_STATE_RUNNING)
    filled(getattr(message, name), Random(1), 1)
    value = decode.event(message)
    assert value is not None and (value.at == SECOND or name == "log")
    require_types(value, type(value), name, is_full=True)


def test_attributes_with_other_names_than_their_fields() -> None:
    attempts = [job_pb2.Attempt(device_id=device, start_time=Timestamp(seconds=second)) for second, device in enumerate("ab")]
    cell = decoded(models.Cell, job_pb2.Cell(candidate_name="net", recipe_name="", attempts=attempts))
    assert (cell.model, cell.recipe, cell.device, cell.attempts, cell.started_at) == ("net", None, "b", 2, SECOND)
    assert not cell.on_device and decoded(models.Cell, job_pb2.Cell(device_index=0)).on_device
    job = decoded(models.JobInfo, job_pb2.Job(create_time=Timestamp(seconds=1)))
    assert (job.submitted_at, job.finished_at) == (SECOND, None)
    assert decoded(models.DeviceHealth, device_pb2.DeviceHealth(start_time=Timestamp(seconds=1))).since == SECOND
    run = decoded(models.QueuedRun, job_pb2.QueuedRun(wait_start_time=Timestamp(seconds=1), reservation_id="r"))
    assert (run.waiting_since, run.starts_at, run.reservation) == (SECOND, None, "r")


def test_messages_of_older_servers() -> None:
    assert decoded(models.Device, device_pb2.Device()).concurrent_runs == 1
    assert decoded(models.ReservationInfo, device_pb2.Reservation(device_id="d")).device_ids == ("d",)
    server = decoded(models.ServerInfo, farm_pb2.ServerInfo())
    assert (server.protocol_version, server.disk_free_bytes, server.is_disk_full) == (0, None, False)
    full = decoded(models.ServerInfo, farm_pb2.ServerInfo(disk=farm_pb2.DiskSpace(free_bytes=0, full=True)))
    assert (full.disk_free_bytes, full.is_disk_full) == (0, True)


@pytest.mark.parametrize("number", [0, 99])
def test_states_of_newer_servers(number: int) -> None:
    state: Any = number
    assert decoded(models.JobInfo, job_pb2.Job(state=state)).state is decode.job_state(state) is models.JobState.QUEUED
    assert decoded(models.Cell, job_pb2.Cell(state=state)).state == "UNSPECIFIED"
    assert decoded(models.Device, device_pb2.Device(state=state)).state is models.DeviceState.OFFLINE
    assert decoded(models.DeviceHealth, device_pb2.DeviceHealth(state=state)).state is models.HealthState.UNKNOWN
    assert decoded(models.Cell, job_pb2.Cell(verdict=state)).verdict is None


def test_readings_errors_and_words() -> None:
    telemetry = device_pb2.DeviceTelemetry(time=Timestamp(seconds=1), temperature_c=40.5)
    assert decoded(models.Telemetry, telemetry) == models.Telemetry(SECOND, {"temperature_c": 40.5})
    problem = common_pb2.Error(fault=common_pb2.FAULT_DEVICE, reason="NO_SPACE", message="It is full.")
    runners = [device_pb2.DeviceRunner(kind=common_pb2.RUNNER_KIND_PYTHON)]
    device = decoded(models.Device, device_pb2.Device(telemetry=telemetry, problem=problem, own_runners=runners))
    assert device.telemetry == {"temperature_c": 40.5} and device.own_runners == ("python",) and device.runner == ""
    assert isinstance(device.problem, EtfarmError) and device.problem.reason == "NO_SPACE"
    assert decoded(models.Progress, job_pb2.Progress(actor=common_pb2.ACTOR_SERVER), at=SECOND).actor == "SERVER"
    assert decoded(models.Progress, job_pb2.Progress(device_name="pi5", actor=common_pb2.ACTOR_DEVICE), at=SECOND).actor == "pi5"
