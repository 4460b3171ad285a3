"""The typed stubs of one server's services, created once per channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc

from etfarm.client.transport.retry import Patience, Remedy, with_repeated_calls
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

    channel: grpc.aio.Channel
    patience: Patience
    """How long the calls wait for the server."""
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
    def of(cls, channel: grpc.aio.Channel, patience: Patience) -> Stubs:
        """Create the stubs of a channel.

        `await stubs.jobs.Get(request)` is repeated while the server is away and raises an `EtfarmError`. Streams and the calls of
        a session, which are not safe to repeat, raise `grpc.aio.AioRpcError`.
        """
        return cls(
            channel,
            patience,
            with_repeated_calls(agent_pb2_grpc.AgentServiceStub(channel), patience),
            # GetUploadStatus is part of an upload, which is resumed as a whole.
            with_repeated_calls(artifact_pb2_grpc.ArtifactServiceStub(channel), patience, raw=("GetUploadStatus",)),
            with_repeated_calls(audit_pb2_grpc.AuditServiceStub(channel), patience),
            with_repeated_calls(compile_pb2_grpc.CompileServiceStub(channel), patience),
            with_repeated_calls(device_pb2_grpc.DeviceServiceStub(channel), patience),
            with_repeated_calls(farm_pb2_grpc.FarmServiceStub(channel), patience),
            with_repeated_calls(job_pb2_grpc.JobServiceStub(channel), patience),
            with_repeated_calls(project_pb2_grpc.ProjectServiceStub(channel), patience),
            with_repeated_calls(report_service_pb2_grpc.ReportServiceStub(channel), patience),
            session_pb2_grpc.SessionServiceStub(channel),
            with_repeated_calls(token_pb2_grpc.TokenServiceStub(channel), patience, once=("Create", "Revoke", "Rotate")),
            with_repeated_calls(webhook_pb2_grpc.WebhookServiceStub(channel), patience, once=("Create", "Delete", "Test")),
        )

    @property
    def server(self) -> str:
        """The server's address, for error messages."""
        return self.patience.server

    def lasting(self, remedy: Remedy | None = None) -> Stubs:
        """Return the stubs for what goes on while the server is away, such as a job, whose calls wait longer.

        Args:
            remedy: returns what to do if the server does not come back.
        """
        return Stubs.of(self.channel, replace(self.patience, for_s=self.patience.lasting_s, remedy=remedy))
