"""Conversion of the contract's messages to the library's values; the only place that uses both."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.client.models import (
    Agent,
    Artifact,
    Bundle,
    Cell,
    CellChanged,
    CellState,
    Cluster,
    Device,
    DeviceState,
    Drain,
    Event,
    JobChanged,
    JobInfo,
    JobState,
    LogLine,
    Progress,
    Project,
    RecipeInfo,
    ServerInfo,
)
from etfarm.v1 import agent_pb2, artifact_pb2, common_pb2, compile_pb2, device_pb2, farm_pb2, job_pb2, project_pb2, report_pb2
from etfarm.wire import status
from etfarm.wire.words import word_of


def job(message: job_pb2.Job) -> JobInfo:
    """Return a Job, with its cells if the message has them."""
    return JobInfo(
        id=message.id,
        name=message.name,
        labels=dict(message.labels),
        owner=message.owner,
        state=job_state(message.state),
        submitted_at=_instant(message.create_time),
        finished_at=_instant(message.end_time) if message.HasField("end_time") else None,
        cells=tuple(cell(item) for item in message.cells),
        tags=tuple(message.tags),
        project=message.project,
    )


def job_state(value: job_pb2.JobState.ValueType) -> JobState:
    """Return a JobState; QUEUED if it is unspecified."""
    name = job_pb2.JobState.Name(value).removeprefix("JOB_STATE_")
    return JobState(name) if name in JobState.__members__ else JobState.QUEUED


def cell(message: job_pb2.Cell) -> Cell:
    """Return a Cell."""
    return Cell(
        id=message.id,
        index=message.index,
        model=message.candidate_name,
        recipe=message.recipe_name or None,
        method=message.method,
        threads=message.threads if message.HasField("threads") else None,
        device=message.attempts[-1].device_id if message.attempts else None,
        attempts=len(message.attempts),
        state=CellState(common_pb2.CellState.Name(message.state).removeprefix("CELL_STATE_")),
        waiting_for=message.waiting_for,
        error=status.from_proto(message.error) if message.HasField("error") else None,
        on_device=message.HasField("device_index"),
        p50_ns=message.p50_ns if message.HasField("p50_ns") else None,
        p50_ci95_ns=tuple(message.p50_ci95_ns),
        verdict=word_of(report_pb2.VerdictStatus.DESCRIPTOR, message.verdict),
    )


def event(message: job_pb2.JobEvent) -> Event | None:
    """Return a JobEvent; None for a kind that this version does not know."""
    sequence = message.sequence if message.HasField("sequence") else None
    at = _instant(message.time)
    match message.WhichOneof("event"):
        case "job":
            return JobChanged(sequence, at, job(message.job), job_state(message.job_state))
        case "cell":
            return CellChanged(sequence, at, cell(message.cell), job_state(message.job_state))
        case "progress":
            progress = message.progress
            return Progress(
                at=at,
                cell_id=progress.cell_id,
                actor=progress.device_name or word_of(common_pb2.Actor.DESCRIPTOR, progress.actor) or "",
                phase=progress.phase,
                duration_ms=progress.duration_ms if progress.HasField("duration_ms") else None,
                done=progress.done if progress.HasField("done") else None,
                total=progress.total if progress.HasField("total") else None,
                message=progress.message,
                p50_ns=progress.p50_ns if progress.HasField("p50_ns") else None,
            )
        case "log":
            return log_line(message.log)
    return None


def log_line(message: job_pb2.LogLine) -> LogLine:
    """Return a LogLine."""
    source = word_of(common_pb2.LogSource.DESCRIPTOR, message.source) or ""
    return LogLine(_instant(message.time), message.number, message.cell_id, source, message.text)


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
        last_seen_at=_instant(message.last_seen_time) if message.HasField("last_seen_time") else None,
        attempt_id=message.attempt_id,
        operator_count=message.operator_count if message.HasField("operator_count") else None,
        runner=_runner_kind(message.runner),
        own_runners=tuple(_runner_kind(runner.kind) for runner in message.own_runners),
        telemetry={field.name: value for field, value in message.telemetry.ListFields() if field.name != "time"},
        model=message.model,
        page_size_bytes=message.page_size_bytes if message.HasField("page_size_bytes") else None,
        thermal_zones=tuple(message.thermal_zones),
        has_battery=message.has_battery if message.HasField("has_battery") else None,
        problem=status.from_proto(message.problem) if message.HasField("problem") else None,
        projects=tuple(message.projects),
        drain=_drain(message.drain) if message.HasField("drain") else None,
    )


def _drain(message: device_pb2.DeviceDrain) -> Drain:
    return Drain(message.reason, message.principal, _instant(message.start_time))


def project(message: project_pb2.Project) -> Project:
    """Return a Project."""
    return Project(
        name=message.name,
        created_by=message.created_by,
        members=tuple(message.members),
        storage_limit_bytes=message.storage_limit_bytes if message.HasField("storage_limit_bytes") else None,
        storage_bytes=message.storage_bytes,
        live_jobs=message.live_jobs,
    )


def recipe(message: compile_pb2.RecipeInfo) -> RecipeInfo:
    """Return a RecipeInfo."""
    return RecipeInfo(
        name=message.name,
        summary=message.summary,
        backend=message.backend,
        quantization=word_of(common_pb2.Quantization.DESCRIPTOR, message.quantization) or "",
        available=message.available,
        missing=message.missing,
        arguments=tuple(message.arguments),
    )


def artifact(message: artifact_pb2.StoredArtifact) -> Artifact:
    """Return an Artifact."""
    stored = message.artifact
    at = message.create_time.ToDatetime(tzinfo=UTC)
    return Artifact(stored.digest, stored.size_bytes, message.project, message.owner, at)


def bundle(message: agent_pb2.RunnerBundle) -> Bundle:
    """Return a RunnerBundle."""
    return Bundle(
        digest=message.artifact.digest,
        size_bytes=message.artifact.size_bytes,
        arch=message.arch,
        executorch=message.executorch_version,
        source_digest=message.source_digest,
        backends=tuple(message.backends),
        operators=tuple(message.operators),
    )


def agent(message: agent_pb2.Agent) -> Agent:
    """Return an Agent."""
    return Agent(
        agent_id=message.agent_id,
        principal=message.principal,
        connected=message.connected,
        device_ids=tuple(message.device_ids),
        refused_principal=message.refused_principal,
    )


def server_info(message: farm_pb2.ServerInfo) -> ServerInfo:
    """Return a ServerInfo."""
    return ServerInfo(
        version=message.version,
        principal=message.principal.name,
        role=common_pb2.Role.Name(message.principal.role).removeprefix("ROLE_"),
        workers_ready=message.workers_ready,
        devices_online=message.devices_online,
        devices_known=message.devices_known,
        live_jobs=message.live_jobs,
        starting=message.starting,
        bundle_error=status.from_proto(message.bundle_error) if message.HasField("bundle_error") else None,
    )


def _instant(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
