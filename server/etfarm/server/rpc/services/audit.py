"""AuditService: the audit log."""

from __future__ import annotations

from etfarm.server.access.audit import AuditLog
from etfarm.server.rpc.services.tokens import PAGE
from etfarm.server.state.paging import page_size, page_start
from etfarm.v1 import audit_pb2, audit_pb2_grpc


class AuditService(audit_pb2_grpc.AuditServiceServicer):
    """The servicer of AuditService; see audit.proto."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    async def List(self, request: audit_pb2.ListAuditEntriesRequest, context: object) -> audit_pb2.ListAuditEntriesResponse:
        size, before = page_size(request.page_size, *PAGE), page_start(request.page_token)
        entries = await self._audit.list(size + 1, before or None, request.principal, request.action)
        token = str(entries[size - 1].number) if len(entries) > size else ""
        return audit_pb2.ListAuditEntriesResponse(entries=entries[:size], next_page_token=token)
