"""Conversion of messages about devices into the library's values."""

from __future__ import annotations

from etfarm.client.models import (
    Cluster,
    Device,
    DeviceHealth,
    DeviceState,
    Drain,
    HealthEvent,
    HealthRun,
    HealthState,
    ReservationInfo,
    RetiredDevice,
    Telemetry,
)
from etfarm.client.transport.timestamps import from_timestamp
from etfarm.v1 import common_pb2, device_pb2
from etfarm.wire import status
from etfarm.wire.words import word_of


def _runner_kind(kind: common_pb2.RunnerKind.ValueType) -> str:
    return word_of(common_pb2.RunnerKind.DESCRIPTOR, kind) or ""


def device(message: device_pb2.Device) -> Device:
    """Return a Device."""
    state = device_pb2.DeviceState.Name(message.state).removeprefix("DEVICE_STATE_")
    clusters = tuple(
        Cluster(
            part=item.part,
            cpus=tuple(item.cpus),
            physical_cores=item.physical_cores,
            max_frequency_hz=item.max_frequency_hz if item.HasField("max_frequency_hz") else None,
            governor=item.governor,
            features=tuple(item.features),
        )
        for item in message.clusters
    )
    return Device(
        id=message.id,
        agent_id=message.agent_id,
        name=message.name,
        arch=message.arch,
        soc=message.soc,
        os=message.os,
        cores=message.cores,
        memory_bytes=message.memory_bytes,
        emulated=message.emulated,
        features=tuple(message.features),
        clusters=clusters,
        labels=dict(message.labels),
        backends=tuple(message.backends),
        state=DeviceState(state) if state in DeviceState.__members__ else DeviceState.OFFLINE,
        last_seen_at=from_timestamp(message.last_seen_time) if message.HasField("last_seen_time") else None,
        attempt_id=message.attempt_id,
        attempt_ids=tuple(message.attempt_ids),
        concurrent_runs=max(1, message.concurrent_runs),
        agent_version=message.agent_version,
        operator_count=message.operator_count if message.HasField("operator_count") else None,
        runner=_runner_kind(message.runner),
        is_runner_coming=message.is_runner_coming,
        own_runners=tuple(_runner_kind(runner.kind) for runner in message.own_runners),
        telemetry=_readings(message.telemetry),
        model=message.model,
        page_size_bytes=message.page_size_bytes if message.HasField("page_size_bytes") else None,
        thermal_zones=tuple(message.thermal_zones),
        has_battery=message.has_battery if message.HasField("has_battery") else None,
        problem=status.from_proto(message.problem) if message.HasField("problem") else None,
        projects=tuple(message.projects),
        drain=_drain(message.drain) if message.HasField("drain") else None,
        reservation=reservation(message.reservation) if message.HasField("reservation") else None,
        health=_health(message.health),
    )


def _health(message: device_pb2.DeviceHealth) -> DeviceHealth:
    return DeviceHealth(
        state=_health_state(message.state),
        reason=message.reason,
        since=from_timestamp(message.start_time) if message.HasField("start_time") else None,
        fault_score=message.fault_score,
        last_run_at=from_timestamp(message.last_run_time) if message.HasField("last_run_time") else None,
        next_run_at=from_timestamp(message.next_run_time) if message.HasField("next_run_time") else None,
    )


def _health_state(state: device_pb2.HealthState.ValueType) -> HealthState:
    name = word_of(device_pb2.HealthState.DESCRIPTOR, state) or ""
    known = name.upper()
    return HealthState(known) if known in HealthState.__members__ else HealthState.UNKNOWN


def health_event(message: device_pb2.HealthEvent) -> HealthEvent:
    """Return a HealthEvent."""
    run = message.run
    return HealthEvent(
        device_id=message.device_id,
        at=from_timestamp(message.time),
        kind=(word_of(device_pb2.HealthEventKind.DESCRIPTOR, message.kind) or "").upper(),
        reason=message.reason,
        message=message.message,
        attempt_id=message.attempt_id,
        state=_health_state(message.state),
        fault_score=message.fault_score,
        run=HealthRun(
            trigger=(word_of(device_pb2.HealthRunTrigger.DESCRIPTOR, run.trigger) or "").upper(),
            passed=run.passed,
            program=run.program,
            runner=run.runner,
            threads=run.threads,
            load_ns=run.load_ns if run.HasField("load_ns") else None,
            p50_ns=run.p50_ns if run.HasField("p50_ns") else None,
            doubts=tuple(run.doubts),
            baseline_ns=run.baseline_ns if run.HasField("baseline_ns") else None,
            duration_s=run.duration_s,
        )
        if message.HasField("run")
        else None,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
    )


def reservation(message: device_pb2.Reservation) -> ReservationInfo:
    """Return a Reservation."""
    return ReservationInfo(
        id=message.id,
        owner=message.owner,
        expires_at=from_timestamp(message.expire_time),
        device_ids=tuple(message.device_ids) or ((message.device_id,) if message.device_id else ()),
        project=message.project,
        selector=message.selector,
        reason=message.reason,
        created_at=from_timestamp(message.create_time) if message.HasField("create_time") else None,
        duration_s=message.duration_s,
    )


def telemetry(message: device_pb2.DeviceTelemetry) -> Telemetry:
    """Return a DeviceTelemetry."""
    return Telemetry(from_timestamp(message.time), _readings(message))


def _readings(message: device_pb2.DeviceTelemetry) -> dict[str, float | bool]:
    return {field.name: value for field, value in message.ListFields() if field.name != "time"}


def _drain(message: device_pb2.DeviceDrain) -> Drain:
    return Drain(message.reason, message.principal, from_timestamp(message.start_time))


def retired_device(message: device_pb2.RetireDeviceResponse) -> RetiredDevice:
    """Return a RetiredDevice."""
    return RetiredDevice(
        device(message.device), tuple(message.revoked_token_ids), tuple(message.other_device_ids),
        tuple(message.ended_attempt_ids),
    )  # fmt: skip
