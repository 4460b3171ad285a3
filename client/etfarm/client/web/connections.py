"""Connections that keep neither the page nor others waiting: uvicorn lets silent ones stay, and they are limited in number."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S: Final = 30.0
"""Seconds until the head of the next request must have arrived."""
TAKE_S: Final = 60.0
"""Seconds that a browser may take nothing of an answer that waits for it."""


class PromptProtocol(H11Protocol):
    """A connection that ends unless the head of a request arrives in time, and unless the browser takes what it asked for.

    Each head has its time: the first one, and each after an answer.
    """

    _deadline: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel()
        self._end_taking()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_taking()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self._await_request()

    def _await_request(self) -> None:
        self._cancel()
        self._deadline = self.loop.call_later(REQUEST_S, self.transport.close)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
