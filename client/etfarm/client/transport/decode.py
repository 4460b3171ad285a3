"""Conversion of the contract's messages to the library's values; the only place that uses both."""

from __future__ import annotations

from datetime import UTC

from etfarm.client.models import (
    Agent,
    AgentWheel,
    Artifact,
    Bundle,
    Cell,
    CellChanged,
    CellState,
    Event,
    FarmServer,
    JobChanged,
    JobInfo,
    JobState,
    LogLine,
    Metric,
    MetricSample,
    Progress,
    Project,
    QueuedRun,
    RecipeInfo,
    RemovedAgent,
    ServerInfo,
    ServerSetting,
    ServerStatus,
    UpgradeProgress,
    Webhook,
    WebhookDelivery,
)
from etfarm.client.transport.timestamps import from_timestamp
from etfarm.v1 import (
    agent_pb2,
    artifact_pb2,
    common_pb2,
    compile_pb2,
    farm_pb2,
    job_pb2,
    project_pb2,
    report_pb2,
    webhook_pb2,
)
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
        submitted_at=from_timestamp(message.create_time),
        finished_at=from_timestamp(message.end_time) if message.HasField("end_time") else None,
        cells=tuple(cell(item) for item in message.cells),
        tags=tuple(message.tags),
        project=message.project,
    )


def queued_run(message: job_pb2.QueuedRun) -> QueuedRun:
    """Return a QueuedRun."""
    return QueuedRun(
        rank=message.rank,
        job_id=message.job_id,
        job_name=message.job_name,
        session_id=message.session_id,
        cell_ids=tuple(message.cell_ids),
        model=message.candidate_name,
        recipe=message.recipe_name or None,
        method=message.method,
        selector=message.selector,
        reservation=message.reservation_id,
        exclusive=message.exclusive,
        priority=message.priority,
        aged_priority=message.aged_priority,
        share_penalty=message.share_penalty,
        waiting_since=from_timestamp(message.wait_start_time),
        waiting_for=message.waiting_for,
        expires_at=from_timestamp(message.expire_time) if message.HasField("expire_time") else None,
        starts_at=from_timestamp(message.start_estimate_time) if message.HasField("start_estimate_time") else None,
        owner=message.owner,
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
        phase=message.phase,
        error=status.from_proto(message.error) if message.HasField("error") else None,
        on_device=message.HasField("device_index"),
        p50_ns=message.p50_ns if message.HasField("p50_ns") else None,
        p50_ci95_ns=tuple(message.p50_ci95_ns),
        verdict=word_of(report_pb2.VerdictStatus.DESCRIPTOR, message.verdict),
        started_at=from_timestamp(message.attempts[-1].start_time) if message.attempts else None,
    )


def event(message: job_pb2.JobEvent) -> Event | None:
    """Return a JobEvent; None for a kind that this version does not know."""
    sequence = message.sequence if message.HasField("sequence") else None
    at = from_timestamp(message.time)
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
    return LogLine(from_timestamp(message.time), message.number, message.cell_id, source, message.text)


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
        version=message.version,
        host=message.host,
        allows_upgrade=message.allows_upgrade,
        retired=message.retired,
        outdated=message.outdated,
    )


def removed_agent(message: agent_pb2.RemoveAgentResponse) -> RemovedAgent:
    """Return a RemovedAgent."""
    return RemovedAgent(agent(message.agent), tuple(message.revoked_token_ids))


def upgrade_progress(message: agent_pb2.UpgradeAgentProgress) -> UpgradeProgress:
    """Return an UpgradeProgress."""
    phase = word_of(agent_pb2.UpgradePhase.DESCRIPTOR, message.phase) or ""
    return UpgradeProgress(phase, message.version, message.former_version, message.message)


def webhook(message: webhook_pb2.Webhook) -> Webhook:
    """Return a Webhook."""
    return Webhook(
        id=message.id,
        url=message.url,
        events=tuple(message.events),
        created_at=from_timestamp(message.create_time),
        created_by=message.created_by,
        configured=message.configured,
        waiting=message.waiting,
        dropped=message.dropped,
    )


def delivery(message: webhook_pb2.WebhookDelivery) -> WebhookDelivery:
    """Return a WebhookDelivery."""
    return WebhookDelivery(
        number=message.number,
        event_id=message.event_id,
        event=message.event,
        webhook_id=message.webhook_id,
        url=message.url,
        job_id=message.job_id,
        project=message.project,
        state=word_of(webhook_pb2.DeliveryState.DESCRIPTOR, message.state) or "",
        attempts=message.attempts,
        status=message.status if message.HasField("status") else None,
        error=message.error,
        answer=message.answer,
        created_at=from_timestamp(message.create_time),
        next_at=from_timestamp(message.next_time) if message.HasField("next_time") else None,
        ended_at=from_timestamp(message.end_time) if message.HasField("end_time") else None,
    )


def server_status(message: farm_pb2.ServerStatus) -> ServerStatus:
    """Return a ServerStatus."""
    return ServerStatus(
        tuple(ServerSetting(setting.name, setting.value, setting.source) for setting in message.settings),
        tuple(
            Metric(
                metric.name, metric.help, metric.kind,
                tuple(MetricSample(sample.suffix, dict(sample.labels), sample.value) for sample in metric.samples),
            )
            for metric in message.metrics
        ),
    )  # fmt: skip


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
        protocol_version=message.protocol_version,
        server_time=from_timestamp(message.server_time) if message.HasField("server_time") else None,
        token_expires_at=from_timestamp(message.token_expire_time) if message.HasField("token_expire_time") else None,
        certificate_expires_at=(
            from_timestamp(message.certificate_expire_time) if message.HasField("certificate_expire_time") else None
        ),
        is_stopping=message.stopping,
        disk_free_bytes=message.disk.free_bytes if message.HasField("disk") else None,
        is_disk_full=message.disk.full,
        agent_wheel=(
            AgentWheel(message.agent_wheel.version, message.agent_wheel.digest) if message.HasField("agent_wheel") else None
        ),
        servers=tuple(
            FarmServer(server.address, server.version, server.leads, from_timestamp(server.start_time))
            for server in message.servers
        ),
        forwarded_by=message.forwarded_by,
    )
