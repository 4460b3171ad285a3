"""The address that the server listens on, and the file in which local clients look it up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from etfarm.server.config import Config
from etfarm.server.rpc.door.accepting import accept_waiting, new_server
from etfarm.server.rpc.door.calls import Calls
from etfarm.server.rpc.door.connections import MAX_METADATA_BYTES, Connections, raise_file_limit, server_options
from etfarm.wire.channel import SERVER_OPTIONS
from etfarm.wire.errors import EtfarmError, error_for


def guarded_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    connections: Connections,
    has_token: Callable[[Any], bool],
    is_urgent: Callable[[str, Any], bool],
    metadata_bytes: int = MAX_METADATA_BYTES,
    options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Server:
    """Return a gRPC server with the limits of every server of a farm, not started yet.

    Args:
        interceptors: as of `grpc.aio.server`.
        connections: decides which calls are dropped; its owner starts it once the server's port is known.
        has_token: returns whether the metadata of a call contain a valid token.
        is_urgent: returns whether a call of a method, with this context, is handled even during a flood.
        metadata_bytes: maximum size of a request's metadata.
        options: further options of gRPC.
    """
    limits = dict(SERVER_OPTIONS) | dict(server_options(raise_file_limit(), metadata_bytes)) | dict(options)
    return new_server(interceptors, list(limits.items()), connections, has_token, is_urgent)


async def end_calls(server: grpc.aio.Server, calls: Calls, error: EtfarmError, grace_s: float) -> None:
    """End all calls of a server with an error, and then the server.

    gRPC cancels calls that are open when its server ends, and those that it has not handed over yet, as if their callers had done
    so. They are ended before that, while the port is open.

    Args:
        grace_s: time in which calls that have a single answer may end by themselves, and statuses are sent.
    """
    await calls.finish(error, grace_s)
    await accept_waiting(server)
    await server.stop(grace_s)


def bind(server: grpc.aio.Server, config: Config, credentials: grpc.ServerCredentials | None) -> str:
    """Bind the server to the configured address; return the address with the chosen port.

    Args:
        credentials: the server's certificate; None without TLS.

    Raises:
        CANNOT_LISTEN: the address cannot be used.
    """
    text = config.listen.text
    try:
        if credentials is not None:
            port = server.add_secure_port(text, credentials)
        else:
            if text.startswith("unix:") and (path := Path(text.removeprefix("unix:"))).is_socket():
                path.unlink()  # left by an earlier server; other files must not be deleted
            before = os.umask(0o077)  # other users must never reach a unix socket, not even before its mode is changed
            try:
                port = server.add_insecure_port(text)
            finally:
                os.umask(before)
    except RuntimeError as error:
        raise error_for(
            "CANNOT_LISTEN", f"Cannot listen on {text}: {error}.", "Choose another --listen address.", address=text
        ) from None
    if text.startswith("unix:"):
        Path(text.removeprefix("unix:")).chmod(0o600)
        return text
    return f"{text.rpartition(':')[0]}:{port}"


def port_of(address: str) -> int | None:
    """Return the TCP port of an address that `bind` returned; None for a unix socket."""
    return None if address.startswith("unix:") else int(address.rpartition(":")[2])


def write_address(path: Path, address: str) -> None:
    """Write the address file atomically, readable only by its owner."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump({"address": address, "pid": os.getpid()}, file)
    fresh.replace(path)
