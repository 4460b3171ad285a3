"""The transfer of a session's tensors: tensor files up to 1 MiB inline, larger ones as artifacts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from etfarm.v1 import common_pb2, session_pb2
from etfarm.wire.errors import Kind, UserError

INLINE_BYTES = 1 << 20
"""Maximum size of inline data; more would delay other calls on the same connection."""

CALL_TIMEOUT_S = 600.0
"""Default of SessionTask.timeout_s, the time limit of a call on the device."""


class SessionNotFound(UserError):
    """A session id that is unknown, or whose session has ended."""

    reason = "SESSION_NOT_FOUND"
    kind = Kind.NOT_FOUND


class BadCall(UserError):
    """A call that is incomplete, or has values out of range."""

    reason = "BAD_CALL"


async def pack(data: bytes, store: Callable[[bytes], Awaitable[common_pb2.Artifact]]) -> session_pb2.SessionTensors:
    """Return the message for `data`; data above INLINE_BYTES is stored with `store`."""
    if len(data) <= INLINE_BYTES:
        return session_pb2.SessionTensors(inline=data)
    return session_pb2.SessionTensors(artifact=await store(data))


async def unpack(packed: session_pb2.SessionTensors, fetch: Callable[[common_pb2.Artifact], Awaitable[bytes]]) -> bytes:
    """Return the bytes that were packed by `pack`; an artifact is read with `fetch`."""
    return await fetch(packed.artifact) if packed.HasField("artifact") else packed.inline


def check_task(task: session_pb2.SessionTask) -> None:
    """Validate a task before it is sent to a device.

    Raises:
        BadCall: a field is missing or out of range; the message names it.
    """
    if not task.method:
        raise BadCall("The call does not name a method.", "Name one of the program's.")
    if len(task.inputs.inline) > INLINE_BYTES:
        raise BadCall(
            f"The inputs have {len(task.inputs.inline)} bytes inline; at most 1 MiB is allowed.", "Upload them as an artifact."
        )
    if task.HasField("timeout_s") and not 0 < task.timeout_s <= 7 * 86_400:
        raise BadCall(
            f"`timeout_s` must be above 0 and at most 604,800, got {task.timeout_s:g}.", "Give seconds above 0, a week at most."
        )
    if not task.HasField("loop"):
        return
    loop = task.loop
    if not 1 <= loop.iterations <= 1_000_000:
        raise BadCall(f"`iterations` must be 1 to 1,000,000, got {loop.iterations}.", "Give 1 to 1,000,000.")
    if loop.HasField("warmup") and not 0 <= loop.warmup <= 1_000_000:
        raise BadCall(f"`warmup` must be 0 to 1,000,000, got {loop.warmup}.", "Give 0 to 1,000,000.")
    if loop.HasField("min_time_s") and not 0 <= loop.min_time_s <= 3600:
        raise BadCall(f"`min_time_s` must be 0 to 3600, got {loop.min_time_s:g}.", "Give 0 to 3600.")
    if loop.HasField("max_time_s") and not 0 < loop.max_time_s <= 86_400:
        raise BadCall(
            f"`max_time_s` must be above 0 and at most 86,400, got {loop.max_time_s:g}.", "Give seconds above 0, a day at most."
        )
