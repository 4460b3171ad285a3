"""Registration of the contract's services on a gRPC server, with health checks and reflection."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from etfarm.server.rpc.services.agents import AgentService
from etfarm.server.rpc.services.artifacts import ArtifactService
from etfarm.server.rpc.services.audit import AuditService
from etfarm.server.rpc.services.compile import CompileService
from etfarm.server.rpc.services.devices import DeviceService
from etfarm.server.rpc.services.farm import FarmService
from etfarm.server.rpc.services.jobs import JobService
from etfarm.server.rpc.services.projects import ProjectService
from etfarm.server.rpc.services.reports import ReportService
from etfarm.server.rpc.services.sessions import SessionService
from etfarm.server.rpc.services.tokens import TokenService
from etfarm.server.rpc.services.webhooks import WebhookService
from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    artifact_pb2,
    artifact_pb2_grpc,
    audit_pb2,
    audit_pb2_grpc,
    compile_pb2,
    compile_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    project_pb2,
    project_pb2_grpc,
    report_service_pb2,
    report_service_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    token_pb2,
    token_pb2_grpc,
    webhook_pb2,
    webhook_pb2_grpc,
)

SERVICES = tuple(
    service.full_name
    for module in (
        artifact_pb2,
        compile_pb2,
        job_pb2,
        device_pb2,
        session_pb2,
        agent_pb2,
        report_service_pb2,
        farm_pb2,
        token_pb2,
        project_pb2,
        audit_pb2,
        webhook_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""Full names of the contract's services."""


@dataclass(frozen=True)
class Servicers:
    """One servicer for each service of the contract."""

    artifacts: ArtifactService
    compile: CompileService
    jobs: JobService
    devices: DeviceService
    sessions: SessionService
    agents: AgentService
    reports: ReportService
    farm: FarmService
    tokens: TokenService
    projects: ProjectService
    audit: AuditService
    webhooks: WebhookService

    def add_to(self, server: grpc.aio.Server) -> health.HealthServicer:
        """Add the services to a server that is not started yet; return the servicer of its health checks."""
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(self.artifacts, server)
        compile_pb2_grpc.add_CompileServiceServicer_to_server(self.compile, server)
        job_pb2_grpc.add_JobServiceServicer_to_server(self.jobs, server)
        device_pb2_grpc.add_DeviceServiceServicer_to_server(self.devices, server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, server)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.agents, server)
        report_service_pb2_grpc.add_ReportServiceServicer_to_server(self.reports, server)
        farm_pb2_grpc.add_FarmServiceServicer_to_server(self.farm, server)
        token_pb2_grpc.add_TokenServiceServicer_to_server(self.tokens, server)
        project_pb2_grpc.add_ProjectServiceServicer_to_server(self.projects, server)
        audit_pb2_grpc.add_AuditServiceServicer_to_server(self.audit, server)
        webhook_pb2_grpc.add_WebhookServiceServicer_to_server(self.webhooks, server)
        checks = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection([*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
        return checks


async def set_serving(checks: health.HealthServicer, *, is_serving: bool = True) -> None:
    """Report the server and each service as serving, or as not."""
    status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", *SERVICES):
        await checks.set(service, status)
