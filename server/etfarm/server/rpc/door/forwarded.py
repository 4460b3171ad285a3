"""The address of a caller whose call another server or this server's web page forwarded, and the leader's word on a caller."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from typing import Any, Final

from grpc.aio import ServicerContext

from etfarm.wire.names import FORWARDED_KEY_METADATA, FORWARDED_PEER_METADATA

PEER: Final = FORWARDED_PEER_METADATA
KEY: Final = FORWARDED_KEY_METADATA
QUESTION: Final = "etfarm-forwarded-question"
"""The metadata of a call that only asks whether the leader admits its caller. It has no message, and the method is not called."""
ACCEPTED: Final = "etfarm-accepted"
"""The trailing metadata with which the leader admits the caller of such a call. Any other end of the call admits nobody."""
MAX_PEER: Final = 256

FORWARDED_BYTES: Final = 1 << 10
"""Room for what a server adds to the metadata of a call that it forwards: what the caller sent must still fit."""


def forwarded_metadata(peer: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a server adds to a call that it forwards."""
    return (PEER, peer[:MAX_PEER]), (KEY, secret)


class Forwarded:
    """The check of forwarded addresses, which callers could invent: it believes the farm's servers and this process's web page.

    Args:
        secret: the secret of the farm's servers; empty if no other server forwards calls to this one.
        page_key: the secret of the web page that this process starts, which calls for its visitors; empty without a page.
    """

    def __init__(self, secret: str = "", page_key: str = "") -> None:
        self._secrets = [each.encode() for each in (secret, page_key) if each]

    def peer(self, metadata: Any) -> str | None:
        """Return gRPC's name of the caller's connection; None for a call that the caller made here."""
        sent = {name: value for name, value in metadata or () if name in (PEER, KEY)}
        key, peer = sent.get(KEY), sent.get(PEER)
        if not isinstance(key, str) or not isinstance(peer, str):
            return None
        return peer[:MAX_PEER] if any(hmac.compare_digest(key.encode(), secret) for secret in self._secrets) else None


def is_question(metadata: Any) -> bool:
    """Return whether a call of another server only asks about its caller."""
    return any(name == QUESTION for name, _ in metadata or ())


async def accept(requests: object, context: ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    """Answer a question about a caller who is authenticated and authorized."""
    context.set_trailing_metadata(((ACCEPTED, "1"),))
    return
    yield b""
