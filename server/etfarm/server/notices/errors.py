"""The errors of webhooks and notices."""

from __future__ import annotations

from etfarm.wire.errors import Kind, UserError


class BadWebhook(UserError):
    """An address or an event of a webhook that is not valid."""

    reason = "BAD_WEBHOOK"


class HostRefused(UserError):
    """A host that the server does not send notices to."""

    reason = "WEBHOOK_HOST_REFUSED"
    kind = Kind.PERMISSION_DENIED


class TooManyWebhooks(UserError):
    """A farm that has the maximum number of webhooks."""

    reason = "TOO_MANY_WEBHOOKS"
    kind = Kind.RESOURCE_EXHAUSTED


class WebhookNotFound(UserError):
    """An id that no webhook has."""

    reason = "WEBHOOK_NOT_FOUND"
    kind = Kind.NOT_FOUND

    def __init__(self, webhook_id: str) -> None:
        shown = webhook_id[:80]
        super().__init__(f"There is no webhook {shown!r}.", "`etfarm webhooks list` shows the ids.", id=shown)


class WebhookConfigured(UserError):
    """A webhook of the server's options, which no command changes."""

    reason = "WEBHOOK_CONFIGURED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, webhook_id: str) -> None:
        super().__init__(
            f"Webhook {webhook_id} comes from the server's options.",
            "Start the server without this --webhook to remove it.",
            id=webhook_id,
        )


class TooManyNotices(UserError):
    """A receiver, or a job, with the maximum number of notices."""

    reason = "TOO_MANY_NOTICES"
    kind = Kind.RESOURCE_EXHAUSTED
