"""The versions of the contract that this client and a server have in common."""

from __future__ import annotations

from importlib.metadata import version

from etfarm.v1 import farm_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


def require_common_version(info: farm_pb2.ServerInfo, *, server: str) -> None:
    """Check that a server and this client speak a common version of the contract.

    Raises:
        SERVER_TOO_OLD, CLIENT_TOO_OLD: they have none in common; the remedy names what to install.
    """
    if info.protocol_version < OLDEST_PROTOCOL_VERSION:
        raise error_for(
            "SERVER_TOO_OLD",
            f"The server at {server} is etfarm {info.version}, which this version cannot talk to.",
            "Update the server, or stop the `etfarm up` of the old version.",
            server=server,
            version=info.version,
        )
    if info.oldest_protocol_version > PROTOCOL_VERSION:
        raise error_for(
            "CLIENT_TOO_OLD",
            f"The server at {server} is etfarm {info.version}, which no longer serves etfarm {version('etfarm')}.",
            f"Install the server's version: pip install 'etfarm=={info.version}'.",
            server=server,
            version=info.version,
        )
