"""The versions of the contract that this client and a server have in common."""

from __future__ import annotations

from importlib.metadata import version

from etfarm.client.errors import Kind, UserError
from etfarm.v1 import farm_pb2
from etfarm.wire.names import FIRST_PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


class ServerTooOld(UserError):
    """A server of a version that this client cannot talk to, or that lacks what a call needs."""

    reason = "SERVER_TOO_OLD"
    kind = Kind.FAILED_PRECONDITION


class ClientTooOld(UserError):
    """A client of a version that the server no longer serves."""

    reason = "CLIENT_TOO_OLD"
    kind = Kind.FAILED_PRECONDITION


def protocol_version(info: farm_pb2.ServerInfo, *, server: str) -> int:
    """Return the newest version of the contract that a server and this client speak.

    Raises:
        ServerTooOld, ClientTooOld: they have none in common; the remedy names what to install.
    """
    newest = info.protocol_version if info.HasField("protocol_version") else FIRST_PROTOCOL_VERSION
    oldest = info.oldest_protocol_version if info.HasField("oldest_protocol_version") else newest
    if info.version.startswith("0.1.") or newest < OLDEST_PROTOCOL_VERSION:
        raise ServerTooOld(
            f"The server at {server} is etfarm {info.version}, which this version cannot talk to.",
            "Update the server, or stop the `etfarm up` of the old version.",
            server=server,
            version=info.version,
        )
    if oldest > PROTOCOL_VERSION:
        raise ClientTooOld(
            f"The server at {server} is etfarm {info.version}, which no longer serves etfarm {version('etfarm')}.",
            f"Install the server's version: pip install 'etfarm=={info.version}'.",
            server=server,
            version=info.version,
        )
    return min(newest, PROTOCOL_VERSION)


def require_protocol(known: int, needed: int, what: str) -> None:
    """Check that a server knows something that a later version of the contract added.

    Raises:
        ServerTooOld: it would ignore it.
    """
    if known < needed:
        raise ServerTooOld(
            f"{what} requires a server with version {needed} of the contract, and this one speaks {known}.",
            f"Update the server to etfarm {version('etfarm')}, or leave it out.",
        )
