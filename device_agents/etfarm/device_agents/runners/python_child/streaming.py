"""Generation of one text whose tokens are sent as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from etfarm.device_agents.runners.python_child.refusals import Refusal
from etfarm.device_agents.runners.python_child.token_methods import LanguageModel, Methods, ModelMethods

_SEND_NS: Final = 50_000_000
"""Minimum time between two `tokens` events."""
_MAX_TOKENS_OF_EVENT: Final = 256

Send = Callable[[dict[str, Any]], None]
"""Callback that sends an event."""


@dataclass(frozen=True)
class Stream:
    """The arguments of `stream`; PROTOCOL.md describes them."""

    model: ModelMethods
    depth: int
    tokens: int
    max_time_ns: int
    stop_tokens: tuple[int, ...]
    context: tuple[int, ...]


def stream(methods: Methods, plan: Stream, send: Send, has_input: Callable[[], bool]) -> dict[str, Any]:
    """Process the prompt and generate tokens until there are enough, or a stop token, the time or another command ends it."""
    for name in (plan.model.prefill, plan.model.decode):
        if methods.loaded(name).trace:
            raise Refusal("BAD_STATE", f"method '{name}' is loaded with a tracer, which costs time")
    model = LanguageModel(methods, plan.model)
    start_ns = time.monotonic_ns()

    def interruption(now_ns: int) -> str:
        if has_input():
            return "CANCELLED"
        return "MAX_TIME" if now_ns - start_ns >= plan.max_time_ns else ""

    begin, end, largest = plan.depth, len(plan.context), min(plan.model.max_chunk, model.prefill.most)
    reason, done = "", 0
    # `start_ns` at first: what takes one execution gets at least one token.
    now_ns = start_ns
    while begin < end and not (reason := interruption(now_ns)):
        count = min(largest, end - begin)
        # Tokens that are too few for prefill are executed one by one; the text may end between them.
        following = begin + (count if count >= model.prefill.least else 1)
        model.process(plan.context, begin, following)
        begin, now_ns = following, time.monotonic_ns()
    if not reason:
        outbox = _Outbox(send, now_ns - start_ns)
        from_ns = start_ns
        try:
            while not reason:
                token = model.latest.next_token()
                now_ns = time.monotonic_ns()
                outbox.add(token, now_ns - from_ns, now_ns)
                done += 1
                if token in plan.stop_tokens:
                    reason = "STOP_TOKEN"
                elif done == plan.tokens:
                    reason = "LENGTH"
                elif not (reason := interruption(now_ns)):
                    from_ns = time.monotonic_ns()
                    model.step(token, end + done - 1)
        finally:
            # After an error, too: the reader must know which tokens are in the context.
            outbox.send()
    return {"tokens": done, "finish_reason": reason, "duration_ns": time.monotonic_ns() - start_ns}


class _Outbox:
    """The tokens that were not sent yet."""

    def __init__(self, send: Send, prefill_ns: int) -> None:
        self._send = send
        self._prefill_ns: int | None = prefill_ns
        self._tokens: list[int] = []
        self._times: list[int] = []
        self._sent_ns = 0

    def add(self, token: int, token_ns: int, now_ns: int) -> None:
        """Add a token that was selected now; the first one is sent at once."""
        self._tokens.append(token)
        self._times.append(token_ns)
        if now_ns - self._sent_ns >= _SEND_NS or len(self._tokens) == _MAX_TOKENS_OF_EVENT:
            self.send()
            self._sent_ns = now_ns

    def send(self) -> None:
        """Send the tokens, if there are any."""
        if self._tokens:
            self._send({"event": "tokens", "tokens": self._tokens, "token_ns": self._times, "prefill_ns": self._prefill_ns})
            self._tokens, self._times, self._prefill_ns = [], [], None
