"""Salvage of agents' messages that exceed the limits, so that one program's output does not affect other devices and runs.

A program may print anything, and its errors quote it, so over-long texts are cut. A result that is still too large becomes a
device error, since the agent would otherwise resend it forever. Other messages that are too large are dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import structlog

from etfarm.server.rpc.door.limits import LIMITS, LimitExceeded, check, shorten
from etfarm.v1 import agent_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.status import to_proto

log = structlog.get_logger()


class Salvaged:
    """The messages of an agent, with refused ones shortened or replaced where possible; a refused Hello raises."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = aiter(messages)

    def __aiter__(self) -> Salvaged:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                return await anext(self._messages)
            except LimitExceeded as error:
                message = error.refused
                if message is None or (isinstance(message, agent_pb2.AgentMessage) and message.HasField("hello")):
                    raise
                log.warning("an agent's message is too large", kind=message.DESCRIPTOR.name, why=error.message)
                if (salvaged := _shortened(message, error)) is not None:
                    return salvaged


def _shortened(message: Any, error: LimitExceeded) -> Any:
    shorten(message)
    if message.WhichOneof("message" if isinstance(message, agent_pb2.AgentMessage) else "reply") == "run_progress":
        del message.run_progress.log_lines[LIMITS["RunProgress.log_lines"].most :]
    try:
        check(message)
    except LimitExceeded:
        return _failed_result(message, error)
    return message


def _failed_result(message: Any, error: LimitExceeded) -> Any:
    """Return a result with the reason of the refusal in place of the refused result; None for other messages."""
    if isinstance(message, agent_pb2.SessionReply):
        raise error
    if not message.HasField("run_result"):
        return None
    result = message.run_result
    why = error_for("RESULT_TOO_LARGE", f"The agent's result was refused: {error.message}", "Update the agent.", **error.metadata)
    failed = agent_pb2.RunResult(attempt_id=result.attempt_id, device_id=result.device_id, error=to_proto(why))
    return agent_pb2.AgentMessage(run_result=failed)
