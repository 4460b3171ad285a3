"""Text that a session's language model generates: `AsyncTokenStream`, whose tokens come one by one, and `GeneratedTokens`."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from etfarm.v1 import session_pb2
from etfarm.wire import sessions
from etfarm.wire.errors import error_for
from etfarm.wire.status import from_proto
from etfarm.wire.words import word_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Parts = AsyncGenerator[session_pb2.GenerateSessionResponse, None]
"""What the device sends of one generation; closing it stops the generation."""
OpenStream = Callable[[session_pb2.SessionGeneration], Parts]

_MAX_TOKEN: Final = (1 << 31) - 1


@dataclass
class TextContext:
    """The text of a session, as far as its caller received it."""

    tokens: int = 0
    """Number of tokens of all prompts and generated texts."""


@dataclass(frozen=True)
class GeneratedTokens:
    """The result of a generation on the device. Times are from the runner's monotonic clock."""

    tokens: tuple[int, ...]
    """The generated tokens; a stop token is the last one."""
    token_ns: NDArray[np.int64] = field(repr=False)
    """Time of each token in nanoseconds: of the first one from the start of the prompt until it was selected, of the others for
    their execution and selection. int64, shape (number of tokens,)."""
    prefill_ns: int | None
    """Time of the prompt's executions in nanoseconds; None without a token."""
    finish_reason: str
    """`LENGTH`, `STOP_TOKEN`, `MAX_TIME`, or `CANCELLED` if the tokens were not read to the end."""
    context_tokens: int
    """Number of tokens in the session's context, where the next generation continues."""

    @property
    def ttft_ns(self) -> int | None:
        """The time to the first token, in nanoseconds; None without a token."""
        return int(self.token_ns[0]) if self.token_ns.size else None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the tokens after the first one; None below two tokens."""
        rest = self.token_ns[1:]
        return float(rest.size * 1e9 / rest.sum()) if rest.size else None


class AsyncTokenStream:
    """The tokens of one generation, each as soon as the device has sent it.

    `async for token in stream` starts the generation. Leaving the loop early stops it on the device; the tokens that the loop has
    seen stay in the session's context.
    """

    def __init__(self, open_stream: OpenStream, request: session_pb2.SessionGeneration, context: TextContext) -> None:
        """Prepare a generation; AsyncSession.generate creates instances.

        Args:
            open_stream: starts the generation on the device.
            request: what to generate; without a position, it continues `context`.
            context: the session's text, which gets the prompt and the tokens.
        """
        self._open = open_stream
        self._request = request
        self._context = context
        # A strong reference would keep a loop that was left from ending.
        self._receiving: weakref.ref[AsyncGenerator[int, None]] | None = None
        self._tokens: list[int] = []
        self._token_ns: list[int] = []
        self._prefill_ns: int | None = None
        self._finish_reason = "CANCELLED"
        self._context_tokens = 0

    def __aiter__(self) -> AsyncIterator[int]:
        """Iterate over the tokens once.

        Raises:
            EtfarmError: as `result`.
        """
        receiving = self._receiving() if self._receiving is not None else None
        if receiving is None:
            receiving = self._receive(is_first=self._receiving is None)
            self._receiving = weakref.ref(receiving)
        return receiving

    async def result(self) -> GeneratedTokens:
        """Read the remaining tokens and return all of them with their times.

        After a loop that was left early, the result has the tokens that it saw.

        Raises:
            UserError: the request does not fit the program; the session stays usable and its context unchanged. Errors such as
                PROGRAM_CRASHED end the session.
            EtfarmError: the session has ended; this is the reason.
        """
        import numpy as np

        async for _ in self:
            pass
        return GeneratedTokens(
            tuple(self._tokens),
            np.array(self._token_ns, dtype=np.int64),
            self._prefill_ns,
            self._finish_reason,
            self._context_tokens,
        )

    async def _receive(self, *, is_first: bool) -> AsyncGenerator[int, None]:
        if not is_first:
            return
        request, context = self._request, self._context
        position = request.position if request.HasField("position") else context.tokens
        self._context_tokens = context.tokens
        # What this caller has not received is not part of its text, even if the device has it.
        request.position = position
        async with aclosing(self._open(request)) as parts:
            async for part in parts:
                if part.HasField("answer"):
                    self._end(part.answer)
                    return
                if part.tokens.HasField("prefill_ns"):
                    self._prefill_ns = part.tokens.prefill_ns
                for token, token_ns in zip(part.tokens.tokens, part.tokens.token_ns, strict=True):
                    self._tokens.append(token)
                    self._token_ns.append(token_ns)
                    context.tokens = self._context_tokens = position + len(request.prompt_tokens) + len(self._tokens)
                    yield token

    def _end(self, answer: session_pb2.SessionAnswer) -> None:
        if answer.HasField("error"):
            raise from_proto(answer.error)
        self._finish_reason = word_of(session_pb2.FinishReason.DESCRIPTOR, answer.generated.finish_reason) or ""


def request_of(
    prompt_tokens: Any, tokens: int, stop_tokens: Iterable[int] | Literal["eos"], **fields: Any
) -> session_pb2.SessionGeneration:
    """Return the request for a generation.

    Args:
        fields: other fields of SessionGeneration.

    Raises:
        BAD_CALL: a value is not of its type or out of range.
    """
    at_eos = isinstance(stop_tokens, str)
    if at_eos and stop_tokens != "eos":
        raise error_for("BAD_CALL", f"`stop_tokens` is {stop_tokens!r}.", 'Give token ids, or "eos" for the program\'s own.')
    try:
        request = session_pb2.SessionGeneration(
            prompt_tokens=_token_ids("prompt_tokens", prompt_tokens),
            tokens=tokens,
            stop_tokens=() if at_eos else _token_ids("stop_tokens", stop_tokens),
            stop_at_eos=at_eos,
            **fields,
        )
    except (ValueError, TypeError) as error:
        raise error_for(
            "BAD_CALL", f"The request for a generation has an impossible value: {error}.", "Give whole numbers of 0 or more."
        ) from None
    sessions.check_task(session_pb2.SessionTask(generation=request))
    return request


def _token_ids(name: str, values: Any) -> list[int]:
    """Return token ids, as given in a sequence or set, an array or a tensor of shape (n,) or (1, n)."""
    import numpy as np

    array = np.asarray(sorted(values) if isinstance(values, set | frozenset) else values)
    if not array.size:
        return []
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise error_for(
            "BAD_CALL",
            f"`{name}` must be whole numbers in one row, got {array.dtype} of shape {list(array.shape)}.",
            "Give the token ids that the model's tokenizer returns.",
        )
    if array.min() < 0 or array.max() > _MAX_TOKEN:
        raise error_for(
            "BAD_CALL", f"`{name}` must be 0 to {_MAX_TOKEN:,}.", "Give the token ids that the model's tokenizer returns."
        )
    return [int(value) for value in array]
