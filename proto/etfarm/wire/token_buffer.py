"""Tokens of a generation on their way to a caller that may read slowly."""

from __future__ import annotations

import asyncio
from typing import Final

from etfarm.v1 import session_pb2
from etfarm.wire.errors import DeviceError, Kind

MAX_TOKENS_OF_MESSAGE: Final = 4096
"""Maximum number of tokens of a message to the caller."""
BYTES_OF_TOKEN: Final = 16
"""Upper bound of the memory of a token that waits, with its time."""


class BadTokens(DeviceError):
    """Tokens from a device that violate the protocol."""

    reason = "BAD_ANSWER"
    kind = Kind.INVALID_ARGUMENT


class TokenBuffer:
    """Collects the tokens of a generation until its caller reads them: the device never waits, and few messages are kept.

    Args:
        most: maximum number of tokens of the generation, which bounds the buffer.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._waiting = session_pb2.SessionTokens()
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, tokens: session_pb2.SessionTokens) -> None:
        """Add tokens.

        Raises:
            BadTokens: there are more than the generation may have, or they are incomplete or negative.
        """
        count = len(tokens.tokens)
        if count > self._left or count != len(tokens.token_ns) or min((*tokens.tokens, *tokens.token_ns), default=0) < 0:
            raise BadTokens("The device sent tokens that were not requested, or are incomplete.", "Update its etfarm.")
        self._left -= count
        self._waiting.MergeFrom(tokens)
        self._changed.set()

    def close(self) -> None:
        """Record that no tokens follow."""
        self._closed = True
        self._changed.set()

    async def take(self) -> session_pb2.SessionTokens | None:
        """Wait for tokens and return those that have come; None after the last ones."""
        while not self._waiting.tokens:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        waiting = self._waiting
        if len(waiting.tokens) <= MAX_TOKENS_OF_MESSAGE:
            self._waiting = session_pb2.SessionTokens()
            return waiting
        part = session_pb2.SessionTokens(
            tokens=waiting.tokens[:MAX_TOKENS_OF_MESSAGE], token_ns=waiting.token_ns[:MAX_TOKENS_OF_MESSAGE]
        )
        if waiting.HasField("prefill_ns"):
            part.prefill_ns = waiting.prefill_ns
            waiting.ClearField("prefill_ns")
        del waiting.tokens[:MAX_TOKENS_OF_MESSAGE], waiting.token_ns[:MAX_TOKENS_OF_MESSAGE]
        return part
