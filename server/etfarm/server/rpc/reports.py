"""ReportService: what the farm found out."""

from __future__ import annotations

from typing import Any

from etfarm.server.jobs.journal import Journal
from etfarm.server.rpc.edge import later
from etfarm.v1 import report_pb2, report_pb2_grpc


class ReportService(report_pb2_grpc.ReportServiceServicer):
    """See report.proto."""

    ListOperators: Any = later("ReportService.ListOperators")
    Compare: Any = later("ReportService.Compare")
    Tag: Any = later("ReportService.Tag")
    ListHistory: Any = later("ReportService.ListHistory")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def Get(self, request: report_pb2.GetReportsRequest, context: object) -> report_pb2.GetReportsResponse:
        job = await self._journal.get(request.job_id)
        return report_pb2.GetReportsResponse(reports=await self._journal.reports(job.id))
