"""WebhookService: webhooks, the log of deliveries, and reports of gates."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from etfarm.server.access.projects import require_active
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.notices.errors import webhook_not_found
from etfarm.server.notices.notices import Notices
from etfarm.server.rpc.door.caller import caller, require_owner, scope
from etfarm.server.state.paging import PAGE_SIZES, page_of, page_size, page_start
from etfarm.v1 import webhook_pb2, webhook_pb2_grpc
from etfarm.v1.webhook_pb2 import DeliveryState


class WebhookService(webhook_pb2_grpc.WebhookServiceServicer):
    """The servicer of WebhookService; see webhook.proto."""

    def __init__(self, notices: Notices, journal: Journal) -> None:
        self._notices = notices
        self._journal = journal

    async def Create(self, request: webhook_pb2.CreateWebhookRequest, context: object) -> webhook_pb2.CreateWebhookResponse:
        webhook_id, secret = await self._notices.add_webhook(request.url, request.events, caller().name)
        for row, waiting in await self._notices.outbox.webhooks():
            if row.id == webhook_id:
                return webhook_pb2.CreateWebhookResponse(webhook=_webhook(row, waiting), secret=secret)
        raise webhook_not_found(webhook_id)  # another admin has removed it

    async def List(self, request: webhook_pb2.ListWebhooksRequest, context: object) -> webhook_pb2.ListWebhooksResponse:
        rows, following = page_of(await self._notices.outbox.webhooks(), request.page_size, request.page_token)
        webhooks = [_webhook(row, waiting) for row, waiting in rows]
        return webhook_pb2.ListWebhooksResponse(webhooks=webhooks, next_page_token=following)

    async def Delete(self, request: webhook_pb2.DeleteWebhookRequest, context: object) -> webhook_pb2.Webhook:
        return _webhook(await self._notices.outbox.remove(request.id), 0)

    async def Test(self, request: webhook_pb2.TestWebhookRequest, context: object) -> webhook_pb2.WebhookDelivery:
        row = await self._notices.test_webhook(request.id)
        if row is None:
            raise webhook_not_found(request.id)
        return _delivery(row)

    async def ListDeliveries(
        self, request: webhook_pb2.ListWebhookDeliveriesRequest, context: object
    ) -> webhook_pb2.ListWebhookDeliveriesResponse:
        size, before = page_size(request.page_size, *PAGE_SIZES), page_start(request.page_token)
        rows = await self._notices.outbox.deliveries(
            size + 1,
            before if request.page_token else None,
            webhook_id=request.webhook_id,
            job_id=request.job_id,
            scope=scope(),
        )
        token = str(rows[size - 1].number) if len(rows) > size else ""
        deliveries = [_delivery(row) for row in rows[:size]]
        return webhook_pb2.ListWebhookDeliveriesResponse(deliveries=deliveries, next_page_token=token)

    async def GetSecret(self, request: webhook_pb2.GetNotifySecretRequest, context: object) -> webhook_pb2.NotifySecret:
        project = require_active(caller())
        return webhook_pb2.NotifySecret(project=project, secret=await self._notices.outbox.secret_of(project))

    async def ReportGate(self, request: webhook_pb2.ReportGateRequest, context: object) -> webhook_pb2.ReportGateResponse:
        job = await self._journal.get(request.job_id, scope())
        require_owner(job.owner, f"Job {job.id}")
        await self._notices.gate_failed(job, request.gate, request.failures)
        return webhook_pb2.ReportGateResponse()


def _webhook(row: Row[Any], waiting: int) -> webhook_pb2.Webhook:
    return webhook_pb2.Webhook(
        id=row.id, url=row.url, events=row.events.split(","), created_by=row.created_by, configured=row.configured,
        waiting=waiting, dropped=row.dropped, create_time=row.created_at,
    )  # fmt: skip


def _delivery(row: Row[Any]) -> webhook_pb2.WebhookDelivery:
    return webhook_pb2.WebhookDelivery(
        number=row.number, event_id=row.event_id, event=row.event, webhook_id=row.webhook_id, url=row.url, job_id=row.job_id,
        project=row.project, state=DeliveryState.Value(f"DELIVERY_STATE_{row.state}"), attempts=row.attempts, error=row.error,
        answer=row.answer, status=row.status, create_time=row.created_at, next_time=row.due_at, end_time=row.ended_at,
    )  # fmt: skip
