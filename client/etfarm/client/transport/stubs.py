"""The typed stubs of one server's services, created once per channel."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

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

    @classmethod
    def of(cls, channel: grpc.aio.Channel, server: str) -> Stubs:
        """Create the stubs of a channel."""
        return cls(
            server,
            agent_pb2_grpc.AgentServiceStub(channel),
            artifact_pb2_grpc.ArtifactServiceStub(channel),
            audit_pb2_grpc.AuditServiceStub(channel),
            compile_pb2_grpc.CompileServiceStub(channel),
            device_pb2_grpc.DeviceServiceStub(channel),
            farm_pb2_grpc.FarmServiceStub(channel),
            job_pb2_grpc.JobServiceStub(channel),
            project_pb2_grpc.ProjectServiceStub(channel),
            report_service_pb2_grpc.ReportServiceStub(channel),
            session_pb2_grpc.SessionServiceStub(channel),
            token_pb2_grpc.TokenServiceStub(channel),
        )
