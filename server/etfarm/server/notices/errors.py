"""The errors of webhooks and notices."""

from __future__ import annotations

from etfarm.wire.errors import EtfarmError, Kind, UserError, error_for


class BadWebhook(UserError):
    """An address or an event of a webhook that is not valid."""

    reason = "BAD_WEBHOOK"


class HostRefused(UserError):
    """A host that the server does not send notices to."""

    reason = "WEBHOOK_HOST_REFUSED"
    kind = Kind.PERMISSION_DENIED


def webhook_not_found(webhook_id: str) -> EtfarmError:
    """Return the error of an id that no webhook has."""
    shown = webhook_id[:80]
    return error_for("WEBHOOK_NOT_FOUND", f"There is no webhook {shown!r}.", "`etfarm webhooks list` shows the ids.", id=shown)
