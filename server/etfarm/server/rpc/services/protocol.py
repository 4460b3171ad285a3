"""The version of the protocol that a peer and this server have in common."""

from __future__ import annotations

from etfarm.v1 import agent_pb2, job_pb2
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from etfarm.wire.protocol import UPGRADABLE_PROTOCOL_VERSION, common_version

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


def version_with(hello: agent_pb2.Hello, version: str) -> int:
    """Return the version of the protocol for an agent's connection, as `require_common_version`.

    An agent of before 0.3.0 that understands Upgrade is let in, too, to be upgraded.
    """
    if hello.protocol_version == UPGRADABLE_PROTOCOL_VERSION:
        return UPGRADABLE_PROTOCOL_VERSION
    return require_common_version(hello, version)


def require_served_client(request: job_pb2.SubmitJobRequest, version: str) -> None:
    """Check that a client speaks a version of the contract that this server serves.

    Args:
        version: the server's version of etfarm.

    Raises:
        CLIENT_TOO_OLD: it is of before 0.3.0.
    """
    if request.protocol_version < OLDEST_PROTOCOL_VERSION:
        raise error_for(
            "CLIENT_TOO_OLD",
            f"This client is of an etfarm before 0.3.0, and the server is etfarm {version}, which does not serve it.",
            f"Install the server's version: pip install 'etfarm=={version}'.",
            version=version,
        )
