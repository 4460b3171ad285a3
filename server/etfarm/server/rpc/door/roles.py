"""The access table: one row for each rpc of the contract, with the roles that may call it."""

from __future__ import annotations

from typing import Final

from etfarm.v1.common_pb2 import Role

ADMIN: Final = Role.ROLE_ADMIN
USER: Final = Role.ROLE_USER
AGENT: Final = Role.ROLE_AGENT
VIEWER: Final = Role.ROLE_VIEWER

_READERS: Final = frozenset({ADMIN, USER, VIEWER})
_USERS: Final = frozenset({ADMIN, USER})
_AGENTS: Final = frozenset({ADMIN, AGENT})
_MOVERS: Final = frozenset({ADMIN, USER, AGENT})
_ADMINS: Final = frozenset({ADMIN})
_ALL: Final = frozenset({ADMIN, USER, AGENT, VIEWER})

ROLES: Final[dict[str, frozenset[Role.ValueType]]] = {
    "/etfarm.v1.ArtifactService/FindMissing": _MOVERS,
    "/etfarm.v1.ArtifactService/GetUploadStatus": _MOVERS,
    "/etfarm.v1.ArtifactService/Upload": _MOVERS,
    "/etfarm.v1.ArtifactService/Download": _ALL,
    "/etfarm.v1.ArtifactService/List": _READERS,
    "/etfarm.v1.ArtifactService/Delete": _ADMINS,
    "/etfarm.v1.ArtifactService/Collect": _ADMINS,
    "/etfarm.v1.ArtifactService/Verify": _ADMINS,
    "/etfarm.v1.CompileService/ListRecipes": _READERS,
    "/etfarm.v1.CompileService/GetCompilation": _READERS,
    "/etfarm.v1.CompileService/Inspect": _USERS,
    "/etfarm.v1.JobService/Submit": _USERS,
    "/etfarm.v1.JobService/Get": _READERS,
    "/etfarm.v1.JobService/List": _READERS,
    "/etfarm.v1.JobService/Watch": _READERS,
    "/etfarm.v1.JobService/WatchAll": _READERS,
    "/etfarm.v1.JobService/Cancel": _USERS,
    "/etfarm.v1.JobService/Retry": _USERS,
    "/etfarm.v1.JobService/ListQueue": _READERS,
    "/etfarm.v1.JobService/TailLog": _READERS,
    "/etfarm.v1.JobService/Delete": _USERS,
    "/etfarm.v1.DeviceService/List": _READERS,
    "/etfarm.v1.DeviceService/Get": _READERS,
    "/etfarm.v1.DeviceService/Watch": _READERS,
    "/etfarm.v1.DeviceService/Reserve": _USERS,
    "/etfarm.v1.DeviceService/Renew": _USERS,
    "/etfarm.v1.DeviceService/Release": _USERS,
    "/etfarm.v1.DeviceService/ListReservations": _READERS,
    "/etfarm.v1.DeviceService/ListTelemetry": _READERS,
    "/etfarm.v1.DeviceService/Label": _ADMINS,
    "/etfarm.v1.DeviceService/Drain": _ADMINS,
    "/etfarm.v1.DeviceService/Forget": _ADMINS,
    "/etfarm.v1.DeviceService/Retire": _ADMINS,
    "/etfarm.v1.DeviceService/Restrict": _ADMINS,
    "/etfarm.v1.DeviceService/ListHealthEvents": _READERS,
    "/etfarm.v1.DeviceService/CheckHealth": _USERS,
    "/etfarm.v1.DeviceService/ClearHealth": _ADMINS,
    "/etfarm.v1.SessionService/Open": _USERS,
    "/etfarm.v1.SessionService/Call": _USERS,
    "/etfarm.v1.SessionService/Generate": _USERS,
    "/etfarm.v1.AgentService/Connect": _AGENTS,
    "/etfarm.v1.AgentService/ServeSession": _AGENTS,
    "/etfarm.v1.AgentService/Enroll": _AGENTS,
    "/etfarm.v1.AgentService/ListAgents": _ADMINS,
    "/etfarm.v1.AgentService/BindAgent": _ADMINS,
    "/etfarm.v1.AgentService/RemoveAgent": _ADMINS,
    "/etfarm.v1.AgentService/UpgradeAgent": _ADMINS,
    "/etfarm.v1.ReportService/Get": _READERS,
    "/etfarm.v1.ReportService/ListOperators": _READERS,
    "/etfarm.v1.ReportService/Compare": _READERS,
    "/etfarm.v1.ReportService/Tag": _USERS,
    "/etfarm.v1.ReportService/ListHistory": _READERS,
    "/etfarm.v1.ReportService/Analyze": _USERS,
    "/etfarm.v1.FarmService/GetServerInfo": _ALL,
    "/etfarm.v1.FarmService/ListBundles": _ALL,
    "/etfarm.v1.FarmService/AddBundle": _ADMINS,
    "/etfarm.v1.FarmService/ApplyRetention": _ADMINS,
    "/etfarm.v1.FarmService/GetServerStatus": _ADMINS,
    "/etfarm.v1.FarmService/GetProof": _ALL,
    "/etfarm.v1.TokenService/Create": _ADMINS,
    "/etfarm.v1.TokenService/List": _ADMINS,
    "/etfarm.v1.TokenService/Revoke": _ADMINS,
    "/etfarm.v1.TokenService/Rotate": _ALL,
    "/etfarm.v1.ProjectService/Create": _ADMINS,
    "/etfarm.v1.ProjectService/List": _READERS,
    "/etfarm.v1.ProjectService/Update": _ADMINS,
    "/etfarm.v1.ProjectService/AddMember": _ADMINS,
    "/etfarm.v1.ProjectService/RemoveMember": _ADMINS,
    "/etfarm.v1.AuditService/List": _ADMINS,
    "/etfarm.v1.WebhookService/Create": _ADMINS,
    "/etfarm.v1.WebhookService/List": _ADMINS,
    "/etfarm.v1.WebhookService/Delete": _ADMINS,
    "/etfarm.v1.WebhookService/Test": _ADMINS,
    "/etfarm.v1.WebhookService/ListDeliveries": _READERS,
    "/etfarm.v1.WebhookService/GetSecret": _USERS,
    "/etfarm.v1.WebhookService/ReportGate": _USERS,
    # Services for load balancers and diagnosis; they reveal nothing about jobs or devices.
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _ALL,
}
"""Roles by method. A method without a row cannot be called."""

ENROLL: Final = "/etfarm.v1.AgentService/Enroll"
"""The only rpc that an enrolment token may call."""
PROOF: Final = "/etfarm.v1.FarmService/GetProof"
"""The only rpc for callers without a token. The interceptor answers it."""
