"""The webhooks of a farm, and the log of what was sent to them and to the addresses of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.client.models import NotifySecret, Webhook, WebhookDelivery
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.paging import iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import webhook_pb2


class AsyncWebhooks:
    """The webhooks of a farm. Only admins use them, except for `deliveries` and `secret`."""

    def __init__(self, stubs: Stubs) -> None:
        """Wrap a connection's stubs; use `AsyncFarm.webhooks`."""
        self._stubs = stubs.webhooks
        self._server = stubs.server

    async def list(self) -> list[Webhook]:
        """Return the webhooks, oldest first."""
        rows = iterate_rows(self._stubs.List, webhook_pb2.ListWebhooksRequest(), "webhooks", server=self._server)
        return [decoded(Webhook, message) async for message in rows]

    async def add(self, url: str, events: Sequence[str] = ()) -> tuple[Webhook, str]:
        """Add a webhook. Return it and the secret that signs its notices, which cannot be read again.

        Args:
            url: http:// or https://.
            events: `job.ended`, `gate.failed`, `device.quarantined`, `device.offline`; all when empty.

        Raises:
            EtfarmError: BAD_WEBHOOK, WEBHOOK_HOST_REFUSED, TOO_MANY_WEBHOOKS; PERMISSION_DENIED.
        """
        created = await self._stubs.Create(webhook_pb2.CreateWebhookRequest(url=url, events=events))
        return decoded(Webhook, created.webhook), created.secret

    async def remove(self, webhook_id: str) -> Webhook:
        """Remove a webhook, with what waits to be sent to it, and return what it was.

        Raises:
            EtfarmError: WEBHOOK_NOT_FOUND, WEBHOOK_CONFIGURED; PERMISSION_DENIED.
        """
        return decoded(Webhook, await self._stubs.Delete(webhook_pb2.DeleteWebhookRequest(id=webhook_id)))

    async def test(self, webhook_id: str) -> WebhookDelivery:
        """Send a test to a webhook, and return what came of the first try.

        Raises:
            EtfarmError: WEBHOOK_NOT_FOUND, TOO_MANY_NOTICES; PERMISSION_DENIED.
        """
        return decoded(WebhookDelivery, await self._stubs.Test(webhook_pb2.TestWebhookRequest(id=webhook_id)))

    async def deliveries(self, *, webhook_id: str = "", job_id: str = "", limit: int = 50) -> Sequence[WebhookDelivery]:
        """Return at most `limit` notices that were sent or wait, newest first.

        Callers who are not admins see those to the addresses of their projects' jobs.

        Args:
            webhook_id: only those to this webhook.
            job_id: only those about this job: its whole id.
        """
        request = webhook_pb2.ListWebhookDeliveriesRequest(webhook_id=webhook_id, job_id=job_id)
        rows = iterate_rows(self._stubs.ListDeliveries, request, "deliveries", server=self._server, limit=limit)
        return [decoded(WebhookDelivery, message) async for message in rows]

    async def secret(self) -> NotifySecret:
        """Return the secret that signs the notices to the addresses of the project's jobs (`notify`)."""
        return decoded(NotifySecret, await self._stubs.GetSecret(webhook_pb2.GetNotifySecretRequest()))
