"""The address of a caller whose call another server of the farm, or this server's web page, forwarded."""

from __future__ import annotations

import hmac
import secrets
from typing import Any, Final

from etfarm.wire.names import FORWARDED_KEY_METADATA, FORWARDED_PEER_METADATA

PEER: Final = FORWARDED_PEER_METADATA
KEY: Final = FORWARDED_KEY_METADATA
PAGE_KEY: Final = secrets.token_urlsafe(32)
"""The secret of the web page that this process starts, which calls for its visitors."""
MAX_PEER: Final = 256


def forwarded_metadata(peer: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a server adds to a call that it forwards."""
    return (PEER, peer[:MAX_PEER]), (KEY, secret)


class Forwarded:
    """The check of forwarded addresses, which callers could invent: it believes the farm's servers and this process's web page.

    Args:
        secret: the secret of the farm's servers; empty if no other server forwards calls to this one.
    """

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode()

    def peer(self, metadata: Any) -> str | None:
        """Return gRPC's name of the caller's connection; None for a call that the caller made here."""
        sent = {name: value for name, value in metadata or () if name in (PEER, KEY)}
        key, peer = sent.get(KEY), sent.get(PEER)
        if not isinstance(key, str) or not isinstance(peer, str):
            return None
        is_server = bool(self._secret) and hmac.compare_digest(key.encode(), self._secret)
        return peer[:MAX_PEER] if is_server or hmac.compare_digest(key.encode(), PAGE_KEY.encode()) else None
