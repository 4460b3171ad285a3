"""The transfer of a session's tensors: tensor files up to 1 MiB inline, larger ones as artifacts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from etfarm.v1 import common_pb2, session_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.generation import MAX_CONTEXT_TOKENS

INLINE_BYTES = 1 << 20
"""Maximum size of inline data; more would delay other calls on the same connection."""

CALL_TIMEOUT_S = 600.0
"""Default of SessionTask.timeout_s, the time limit of a call on the device."""

MAX_PROMPT_TOKENS = 1 << 18
MAX_GENERATED_TOKENS = 1 << 16
"""Maximum number of tokens that one generation makes; as many may wait for its caller."""
MAX_STOP_TOKENS = 1024
GENERATION_TIME_S = 600.0
"""Default of SessionGeneration.max_time_s."""


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
        BAD_CALL: a field is missing or out of range; the message names it.
    """
    if task.HasField("timeout_s") and not 0 < task.timeout_s <= 7 * 86_400:
        raise error_for(
            "BAD_CALL",
            f"`timeout_s` must be above 0 and at most 604,800, got {task.timeout_s:g}.",
            "Give seconds above 0, a week at most.",
        )
    if len(task.inputs.inline) > INLINE_BYTES:
        raise error_for(
            "BAD_CALL",
            f"The inputs have {len(task.inputs.inline)} bytes inline; at most 1 MiB is allowed.",
            "Upload them as an artifact.",
        )
    if task.reset:
        return
    if task.HasField("generation"):
        _check_generation(task.generation)
        return
    if not task.method:
        raise error_for("BAD_CALL", "The call does not name a method.", "Name one of the program's.")
    if not task.HasField("loop"):
        return
    loop = task.loop
    if not 1 <= loop.iterations <= 1_000_000:
        raise error_for("BAD_CALL", f"`iterations` must be 1 to 1,000,000, got {loop.iterations}.", "Give 1 to 1,000,000.")
    if loop.HasField("warmup") and not 0 <= loop.warmup <= 1_000_000:
        raise error_for("BAD_CALL", f"`warmup` must be 0 to 1,000,000, got {loop.warmup}.", "Give 0 to 1,000,000.")
    if loop.HasField("min_time_s") and not 0 <= loop.min_time_s <= 3600:
        raise error_for("BAD_CALL", f"`min_time_s` must be 0 to 3600, got {loop.min_time_s:g}.", "Give 0 to 3600.")
    _check_max_time(loop)


def _check_generation(generation: session_pb2.SessionGeneration) -> None:
    limits = (
        ("prompt_tokens", len(generation.prompt_tokens), 0, MAX_PROMPT_TOKENS, " tokens"),
        ("tokens", generation.tokens, 1, MAX_GENERATED_TOKENS, ""),
        ("position", generation.position, 0, MAX_CONTEXT_TOKENS, ""),
        ("stop_tokens", len(generation.stop_tokens), 0, MAX_STOP_TOKENS, " tokens"),
    )
    for name, count, least, most, unit in limits:
        if not least <= count <= most:
            raise error_for(
                "BAD_CALL", f"`{name}` must be {least:,} to {most:,}{unit}, got {count:,}.", f"Give {least:,} to {most:,}."
            )
    for name, tokens in (("prompt_tokens", generation.prompt_tokens), ("stop_tokens", generation.stop_tokens)):
        if tokens and min(tokens) < 0:
            raise error_for("BAD_CALL", f"`{name}` has a negative token: {min(tokens)}.", "Token ids are 0 or more.")
    _check_max_time(generation)


def _check_max_time(task: session_pb2.SessionLoop | session_pb2.SessionGeneration) -> None:
    if task.HasField("max_time_s") and not 0 < task.max_time_s <= 86_400:
        raise error_for(
            "BAD_CALL",
            f"`max_time_s` must be above 0 and at most 86,400, got {task.max_time_s:g}.",
            "Give seconds above 0, a day at most.",
        )
