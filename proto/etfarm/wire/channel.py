"""Addresses of servers, and channels to them with TLS, bearer token, keepalive and message limits."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from etfarm.wire.errors import error_for
from etfarm.wire.failover import FailoverChannel
from etfarm.wire.farm_proof import Proofs
from etfarm.wire.names import PROJECT_METADATA, PROJECT_VARIABLE, TLS_CA_VARIABLE, TOKEN_VARIABLE, is_project_name
from etfarm.wire.tls import BadTlsFile, read_certificates, read_identity

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message. A report with a million samples has less than 5 MiB, an artifact's chunk 1 MiB."""

MAX_METADATA_BYTES = 128 << 10
"""Maximum size of trailers. gRPC's default of 8 KiB would turn a long error into RESOURCE_EXHAUSTED; `status` stays below."""

MAX_SERVERS = 16
"""Maximum number of addresses of one farm."""

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *OPTIONS,
    # Detect a broken link within seconds, even on an idle connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The timeout above is that of TCP, whose packets the kernel of a frozen process acknowledges. This one is that of the answer
    # of the process itself, by default a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Two clients of one process must not share a connection that one of them closes.
    ("grpc.use_local_subchannel_pool", 1),
]

FAILOVER_OPTIONS: list[tuple[str, int]] = [
    # As `CLIENT_OPTIONS`, within the time in which another server takes the lead.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
"""Options of the channels to several servers: a server that does not answer is left for another one."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


CALL_METADATA: Final[ContextVar[tuple[tuple[str, str], ...]]] = ContextVar("call_metadata", default=())
"""Metadata that is added to the calls of a task, over channels that were opened while there was some."""


@dataclass(frozen=True)
class Address:
    """The address of a server: HOST:PORT, [IPV6]:PORT or unix:PATH."""

    text: str

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it: a unix socket or a loopback address."""
        if self.text.startswith("unix:"):
            return True
        host = self.text.rpartition(":")[0].strip("[]")
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of a machine."""
        return self.text.rpartition(":")[0] in ("0.0.0.0", "[::]")


_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)\Z")


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_address(text: str) -> Address:
    """Return the address in `text`.

    Raises:
        BAD_ADDRESS: it is neither HOST:PORT, [IPV6]:PORT nor unix:PATH.
    """
    if text.startswith("unix:"):
        if len(text) > len("unix:"):
            return Address(text)
    else:
        host, colon, port = text.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port) < 65536
        if colon and is_port and (_is_ipv6(host[1:-1]) if host[:1] + host[-1:] == "[]" else _HOST.match(host)):
            return Address(text)
    raise error_for("BAD_ADDRESS", f"{text!r} is not an address.", "Give HOST:PORT, [IPV6]:PORT or unix:PATH.", address=text)


def parse_addresses(text: str) -> list[Address]:
    """Return the addresses in `text`: those of one server, or, with commas, of several servers of one farm.

    Raises:
        BAD_ADDRESS: one of them is not an address, or there are too many.
    """
    parts = text.split(",")
    if len(parts) > MAX_SERVERS:
        raise error_for(
            "BAD_ADDRESS", f"{len(parts)} addresses of servers are given.", f"Give at most {MAX_SERVERS}.", address=text[:200]
        )
    return [parse_address(part.strip()) for part in parts]


def token_file_of(socket: Path) -> Path:
    """Return the file with the token of an embedded farm's server, next to the unix socket that the server listens on."""
    return socket.with_name(f"{socket.name}.token")


def socket_token(server: str) -> str:
    """Return the token of an embedded farm's server, which only this user can read; empty for any other server."""
    if not server.startswith("unix:"):
        return ""
    try:
        words = token_file_of(Path(server.removeprefix("unix:"))).read_text().split()
    except (OSError, UnicodeDecodeError):
        return ""
    return words[-1] if words else ""


@dataclass(frozen=True)
class Access:
    """The address and credentials with which a client or an agent connects to a server."""

    server: str
    """The address, as in `parse_addresses`."""
    token: str = ""
    """The bearer token; not sent if empty."""
    tls_ca: Path | None = None
    """PEM certificates of the authorities that may sign the server's certificate; no TLS if None."""
    tls_cert: Path | None = None
    """PEM client certificate chain, if the server requires one."""
    tls_key: Path | None = None
    """The client certificate's key."""
    project: str = ""
    """The project that owns what the caller creates; if empty, the caller's only project, else `default`."""
    proofs: Proofs | None = field(default=None, compare=False)
    """What the farm's servers have proven, for the token of an enrolled agent (`farm_channel`); None for other tokens."""

    @classmethod
    def of(cls, server: str, tls_ca: str | Path | None = None) -> Access:
        """Return the access with the values of ETFARM_TOKEN, ETFARM_PROJECT and, without `tls_ca`, ETFARM_TLS_CA."""
        ca = tls_ca or os.environ.get(TLS_CA_VARIABLE)
        project = os.environ.get(PROJECT_VARIABLE, "")
        token = socket_token(server) or os.environ.get(TOKEN_VARIABLE, "")
        return cls(server, token, Path(ca) if ca else None, project=project)

    def credentials(self, certificate: bytes | None = None) -> grpc.ChannelCredentials | None:
        """Return credentials from the TLS files; None without TLS.

        Args:
            certificate: PEM of the only certificate that the server may have, instead of those that the authorities signed.

        Raises:
            BadTlsFile: a file cannot be read or has other content, or another file is required with it.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadTlsFile("A client certificate needs its key.", "Give both --tls-cert and --tls-key.")
        if self.tls_ca is None:
            if self.tls_cert is not None:
                raise BadTlsFile("A client certificate requires TLS.", f"Give --tls-ca (or {TLS_CA_VARIABLE}) too.")
            return None
        authority = read_certificates(self.tls_ca, f"--tls-ca (or {TLS_CA_VARIABLE})")
        chain, key = read_identity(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else (None, None)
        # As a root, a server's own certificate verifies itself and nothing else; the host's name is checked as always.
        return grpc.ssl_channel_credentials(certificate or authority, key, chain)


def open_channel(access: Access, certificates: Mapping[str, bytes] | None = None) -> grpc.aio.Channel:
    """Return a channel to the server, or to one of several, not connected yet; the caller closes it.

    Args:
        certificates: PEM certificates by address, to connect only to these servers, and with these certificates only.

    Raises:
        BAD_ADDRESS: the address is not valid, or a token would be sent in clear text.
        BadTlsFile: as in `Access.credentials`.
        BAD_PROJECT: the name of the project is not valid.
        BAD_TOKEN: the token is not printable ASCII.
    """
    if not (access.token.isascii() and access.token.isprintable()):
        raise error_for(
            "BAD_TOKEN",
            "The token has characters that no token of a farm has: only printable ASCII can be sent.",
            f"Copy the token again ({TOKEN_VARIABLE}).",
        )
    if access.project and not is_project_name(access.project):
        raise error_for(
            "BAD_PROJECT",
            f"{access.project[:80]!r} is not a project's name.",
            f"Use lower-case letters, digits, dots, dashes and underscores, at most 64 (--project or {PROJECT_VARIABLE}).",
        )
    addresses = parse_addresses(access.server)
    headers = [("authorization", f"Bearer {access.token}")] if access.token else []
    headers += [(PROJECT_METADATA, access.project)] if access.project else []
    credentials = access.credentials()
    if access.token and credentials is None and not all(address.is_local for address in addresses):
        raise error_for(
            "BAD_ADDRESS",
            f"The token would be sent to {access.server} unencrypted.",
            "Give --tls-ca FILE (or ETFARM_TLS_CA), or unset ETFARM_TOKEN for a server that requires none.",
        )
    reached = [(address, credentials) for address in addresses]
    if certificates is not None:
        pinned = [(address, certificates[address.text]) for address in addresses if address.text in certificates]
        reached = [(address, access.credentials(certificate)) for address, certificate in pinned]
    if len(reached) == 1:
        ((address, credentials),) = reached
        return _open_one(address, headers, credentials, CLIENT_OPTIONS)
    options = [*({**dict(CLIENT_OPTIONS), **dict(FAILOVER_OPTIONS)}).items()]
    return FailoverChannel([_open_one(address, headers, pinning, options) for address, pinning in reached])


def _open_one(
    address: Address,
    headers: list[tuple[str, str]],
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, int]],
) -> grpc.aio.Channel:
    options = [*options]
    if address.is_local:
        # An `http_proxy` is another machine: it would receive the token in clear text and resolve the address to itself.
        options.append(("grpc.enable_http_proxy", 0))
    interceptors: list[Any] = [interceptor(headers) for interceptor in _INTERCEPTORS] if headers or CALL_METADATA.get() else []
    if credentials is not None:
        return grpc.aio.secure_channel(address.text, credentials, options=options, interceptors=interceptors)
    return grpc.aio.insecure_channel(address.text, options=options, interceptors=interceptors)


class _Headers:
    """An interceptor that adds the token and the project to every call."""

    def __init__(self, headers: list[tuple[str, str]]) -> None:
        self._headers = headers

    async def _call(self, continuation: Callable[..., Awaitable[Any]], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._headers, *CALL_METADATA.get())
        return await continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call


# grpc.aio uses an interceptor only for the first kind that it is an instance of, so each kind has a class.
class _UnaryUnary(_Headers, grpc.aio.UnaryUnaryClientInterceptor): ...


class _UnaryStream(_Headers, grpc.aio.UnaryStreamClientInterceptor): ...


class _StreamUnary(_Headers, grpc.aio.StreamUnaryClientInterceptor): ...


class _StreamStream(_Headers, grpc.aio.StreamStreamClientInterceptor): ...


_INTERCEPTORS = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)
