"""The typed stubs of one server's services, created once per channel."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from etfarm.client.transport.retry import with_repeated_calls
from etfarm.v1 import (
    agent_pb2_grpc,
    artifact_pb2_grpc,
    audit_pb2_grpc,
    compile_pb2_grpc,
    device_pb2_grpc,
    farm_pb2_grpc,
    job_pb2_grpc,
    project_pb2_grpc,
    report_service_pb2_grpc,
    session_pb2_grpc,
    token_pb2_grpc,
    webhook_pb2_grpc,
)


@dataclass(frozen=True)
class Stubs:
    """The services of one server."""

    server: str
    agents: agent_pb2_grpc.AgentServiceAsyncStub
    artifacts: artifact_pb2_grpc.ArtifactServiceAsyncStub
    audit: audit_pb2_grpc.AuditServiceAsyncStub
    compiler: compile_pb2_grpc.CompileServiceAsyncStub
    devices: device_pb2_grpc.DeviceServiceAsyncStub
    farm: farm_pb2_grpc.FarmServiceAsyncStub
    jobs: job_pb2_grpc.JobServiceAsyncStub
    projects: project_pb2_grpc.ProjectServiceAsyncStub
    reports: report_service_pb2_grpc.ReportServiceAsyncStub
    sessions: session_pb2_grpc.SessionServiceAsyncStub
    tokens: token_pb2_grpc.TokenServiceAsyncStub
    webhooks: webhook_pb2_grpc.WebhookServiceAsyncStub

    @classmethod
    def of(cls, channel: grpc.aio.Channel, server: str) -> Stubs:
        """Create the stubs of a channel.

        `await stubs.jobs.Get(request)` is repeated while the server is unavailable and raises an `EtfarmError`. Streams and the
        calls of a session, which are not safe to repeat, raise `grpc.aio.AioRpcError`.
        """
        tokens = token_pb2_grpc.TokenServiceStub(channel)
        return cls(
            server,
            with_repeated_calls(agent_pb2_grpc.AgentServiceStub(channel), server),
            artifact_stub(channel, server),
            with_repeated_calls(audit_pb2_grpc.AuditServiceStub(channel), server),
            with_repeated_calls(compile_pb2_grpc.CompileServiceStub(channel), server),
            with_repeated_calls(device_pb2_grpc.DeviceServiceStub(channel), server),
            with_repeated_calls(farm_pb2_grpc.FarmServiceStub(channel), server),
            with_repeated_calls(job_pb2_grpc.JobServiceStub(channel), server),
            with_repeated_calls(project_pb2_grpc.ProjectServiceStub(channel), server),
            with_repeated_calls(report_service_pb2_grpc.ReportServiceStub(channel), server),
            session_pb2_grpc.SessionServiceStub(channel),
            with_repeated_calls(tokens, server, once=("Create", "Revoke", "Rotate")),
            with_repeated_calls(webhook_pb2_grpc.WebhookServiceStub(channel), server, once=("Create", "Delete", "Test")),
        )


def artifact_stub(channel: grpc.aio.Channel, server: str) -> artifact_pb2_grpc.ArtifactServiceAsyncStub:
    """Return the stub of the artifact store; GetUploadStatus is part of an upload, which is resumed as a whole."""
    return with_repeated_calls(artifact_pb2_grpc.ArtifactServiceStub(channel), server, raw=("GetUploadStatus",))
