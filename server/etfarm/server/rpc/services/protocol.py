"""The version of the protocol that an agent and this server have in common."""

from __future__ import annotations

from etfarm.v1 import agent_pb2
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from etfarm.wire.protocol import common_version

Greeting = agent_pb2.Hello | agent_pb2.EnrollAgentRequest
"""The messages that have the versions that an agent speaks."""


def protocol_unsupported(hello: Greeting, version: str) -> EtfarmError:
    """Return the error of an agent with another version of the protocol."""
    theirs = hello.agent_version[:40] or "of an unknown version"
    older = hello.protocol_version < OLDEST_PROTOCOL_VERSION
    return error_for(
        "PROTOCOL_UNSUPPORTED",
        f"The agent (etfarm {theirs}) speaks protocol {hello.protocol_version}, "
        f"and this server (etfarm {version}) speaks {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}.",
        f"Install the server's version on the {'device, and start the agent again' if older else 'server or on the device'}: "
        f"pip install 'etfarm[agent]=={version}'.",
        supported=PROTOCOL_VERSION,
        oldest=OLDEST_PROTOCOL_VERSION,
        protocol=hello.protocol_version,
        version=version,
    )


def require_common_version(hello: Greeting, version: str) -> int:
    """Return the newest version of the protocol that both speak.

    Args:
        version: the server's version of etfarm.

    Raises:
        PROTOCOL_UNSUPPORTED: there is none.
    """
    if (common := common_version(hello)) is None:
        raise protocol_unsupported(hello, version)
    return common
