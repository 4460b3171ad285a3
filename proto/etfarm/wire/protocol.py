"""The version of the protocol that an agent and a server have in common."""

from __future__ import annotations

from typing import Final

from etfarm.v1 import agent_pb2
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION

UPGRADABLE_PROTOCOL_VERSION: Final = 3
"""The version of agents of before 0.3.0 that understand Upgrade: they are let in for that alone."""


def common_version(
    hello: agent_pb2.Hello | agent_pb2.EnrollAgentRequest,
    *,
    newest: int = PROTOCOL_VERSION,
    oldest: int = OLDEST_PROTOCOL_VERSION,
) -> int | None:
    """Return the newest version that an agent and a server both speak; None if there is none.

    Args:
        newest: the newest version that the server speaks.
        oldest: the oldest one.
    """
    version = min(newest, hello.protocol_version)
    theirs = hello.oldest_protocol_version if hello.HasField("oldest_protocol_version") else hello.protocol_version
    return version if version >= max(oldest, theirs) else None
