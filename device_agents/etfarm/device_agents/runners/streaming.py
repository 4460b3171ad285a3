"""The `stream` command: one text whose tokens come as they are generated."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.device_agents.runners import answers
from etfarm.wire.series import little_endian

COMMAND: Final = "stream"
MAX_TOKENS_OF_EVENT: Final = 256
"""Maximum number of tokens of one event."""
_MAX_NS: Final = 1 << 50
_MAX_TOKEN: Final = (1 << 31) - 1
_REASONS: Final = ("LENGTH", "STOP_TOKEN", "MAX_TIME", "CANCELLED")


@dataclass(frozen=True)
class StreamRequest:
    """Generation of one text by two loaded methods, or by one that does both."""

    prefill_method: str
    """The method that processes several tokens."""
    decode_method: str
    """The method that processes one token."""
    context: array[int]
    """Token ids, type code `i`: those that the methods have executed, then the prompt."""
    depth: int
    """Number of tokens that the methods have executed."""
    tokens: int
    """Maximum number of tokens to generate."""
    stop_tokens: Sequence[int]
    """Tokens that end the text."""
    max_time_ns: int
    """Time after which the text ends."""
    token_input: int = 0
    """Index of the input with the tokens."""
    position_input: int = 1
    """Index of the input with the position of the first token, or of each."""
    max_chunk: int = 1
    """Maximum number of tokens of one execution."""

    def arguments(self) -> list[tuple[str, str | int]]:
        """Return the command's arguments."""
        return [
            ("prefill", self.prefill_method), ("decode", self.decode_method), ("token_input", self.token_input),
            ("position_input", self.position_input), ("max_chunk", self.max_chunk), ("depth", self.depth),
            ("tokens", self.tokens), ("stop_tokens", ",".join(map(str, self.stop_tokens))),
            ("max_time_ns", self.max_time_ns),
        ]  # fmt: skip

    def payload(self) -> bytes:
        """Return the command's payload."""
        return little_endian(array("i", self.context)).tobytes()


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of a text."""

    tokens: tuple[int, ...]
    token_ns: tuple[int, ...]
    """Times parallel to `tokens`: of the first one from the start of the prompt, of the others of execution and selection."""
    prefill_ns: int | None
    """With the first token, the time of the prompt's executions."""


OnTokens = Callable[[Tokens], None]


@dataclass(frozen=True)
class Streamed:
    """The end of a text."""

    tokens: int
    """Number of generated tokens."""
    finish_reason: str
    """`LENGTH`, `STOP_TOKEN`, `MAX_TIME` or `CANCELLED`."""


class TokenReader:
    """Reads the events of a text, which are untrusted.

    Args:
        most: maximum number of tokens of the text.
        on_tokens: takes the tokens.
    """

    def __init__(self, most: int, on_tokens: OnTokens) -> None:
        self._most = most
        self._on_tokens = on_tokens
        self._seen = 0

    def read(self, event: Mapping[str, Any]) -> None:
        """Pass on the tokens of an event.

        Raises:
            BadAnswer: fields are missing or invalid, or there are more tokens than requested.
        """
        tokens = answers.wholes(event, "tokens", min(MAX_TOKENS_OF_EVENT, self._most - self._seen))
        token_ns = answers.wholes(event, "token_ns", MAX_TOKENS_OF_EVENT)
        prefill_ns = answers.optional_whole(event, "prefill_ns")
        if not tokens or len(tokens) != len(token_ns):
            raise answers.BadAnswer(f"{len(tokens)} tokens with {len(token_ns)} times")
        if max(tokens) > _MAX_TOKEN or max(token_ns) > _MAX_NS or (prefill_ns or 0) > _MAX_NS:
            raise answers.BadAnswer("a token or a time is impossible")
        if (prefill_ns is None) != bool(self._seen):
            raise answers.BadAnswer("the time of the prompt must come with the first token")
        self._seen += len(tokens)
        self._on_tokens(Tokens(tokens, token_ns, prefill_ns))

    def end(self, event: Mapping[str, Any]) -> Streamed:
        """Return the content of the answer.

        Raises:
            BadAnswer: fields are missing or invalid, or other tokens were sent.
        """
        tokens, reason = answers.whole(event, "tokens", self._most), answers.text(event, "finish_reason")
        if tokens != self._seen or reason not in _REASONS:
            raise answers.BadAnswer(f"{self._seen} of {tokens} tokens came, with {reason!r}")
        return Streamed(tokens, reason)
