"""AuditService: see audit.proto."""

from __future__ import annotations

from typing import Any

from etfarm.server.rpc.edge import later
from etfarm.v1 import audit_pb2_grpc


class AuditService(audit_pb2_grpc.AuditServiceServicer):
    """See audit.proto."""

    List: Any = later("AuditService.List")
