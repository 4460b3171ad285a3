"""The versions of the contract that this client and a server have in common."""

from __future__ import annotations

from importlib.metadata import version

from etfarm.v1 import farm_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.names import FIRST_PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


def protocol_version(info: farm_pb2.ServerInfo, *, server: str) -> int:
    """Return the newest version of the contract that a server and this client speak.

    Raises:
        SERVER_TOO_OLD, CLIENT_TOO_OLD: they have none in common; the remedy names what to install.
    """
    newest = info.protocol_version if info.HasField("protocol_version") else FIRST_PROTOCOL_VERSION
    oldest = info.oldest_protocol_version if info.HasField("oldest_protocol_version") else newest
    if info.version.startswith("0.1.") or newest < OLDEST_PROTOCOL_VERSION:
        raise error_for(
            "SERVER_TOO_OLD",
            f"The server at {server} is etfarm {info.version}, which this version cannot talk to.",
            "Update the server, or stop the `etfarm up` of the old version.",
            server=server,
            version=info.version,
        )
    if oldest > PROTOCOL_VERSION:
        raise error_for(
            "CLIENT_TOO_OLD",
            f"The server at {server} is etfarm {info.version}, which no longer serves etfarm {version('etfarm')}.",
            f"Install the server's version: pip install 'etfarm=={info.version}'.",
            server=server,
            version=info.version,
        )
    return min(newest, PROTOCOL_VERSION)


def require_protocol(known: int, needed: int, what: str) -> None:
    """Check that a server knows something that a later version of the contract added.

    Raises:
        SERVER_TOO_OLD: it would ignore it.
    """
    if known < needed:
        raise error_for(
            "SERVER_TOO_OLD",
            f"{what} requires a server with version {needed} of the contract, and this one speaks {known}.",
            f"Update the server to etfarm {version('etfarm')}, or leave it out.",
        )
