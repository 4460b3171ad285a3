"""The address of a caller whose call another server of the farm forwarded."""

from __future__ import annotations

import hmac
from typing import Any, Final

PEER: Final = "etfarm-forwarded-peer"
"""The metadata that names the caller's connection as gRPC does, such as `ipv4:10.0.0.7:4711`."""
KEY: Final = "etfarm-forwarded-key"
"""The metadata with the secret that only servers of the farm know."""
MAX_PEER: Final = 256


def forwarded_metadata(peer: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a server adds to a call that it forwards."""
    return (PEER, peer[:MAX_PEER]), (KEY, secret)


class Forwarded:
    """The check of forwarded addresses. Callers could claim any address, so only servers that know the secret are believed.

    Args:
        secret: the secret of the farm's servers; empty if no other server forwards calls to this one.
    """

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.encode()

    def peer(self, metadata: Any) -> str | None:
        """Return gRPC's name of the caller's connection; None for a call that the caller made here."""
        sent = {name: value for name, value in metadata or () if name in (PEER, KEY)}
        key, peer = sent.get(KEY), sent.get(PEER)
        if not self._secret or not isinstance(key, str) or not isinstance(peer, str):
            return None
        return peer[:MAX_PEER] if hmac.compare_digest(key.encode(), self._secret) else None
