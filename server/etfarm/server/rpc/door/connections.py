"""Limits on connections to the server. Connections without a valid token are closed before they exhaust the limits for others.

gRPC neither reports nor closes connections without calls. But they are sockets of this process, so their peers can be read and
the sockets shut down, which gRPC handles as if the peer had closed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import structlog

log = structlog.get_logger()

STRANGER_S: Final = 15.0
"""How long a connection may stay open without a call with a valid token."""

STRANGERS_OF_AN_ADDRESS: Final = 32
"""Maximum number of such connections of one address."""

CONNECTIONS_OF_AN_ADDRESS: Final = 1024
"""Maximum number of connections of one address, which may be a gateway for a whole team."""

MAX_CONNECTIONS: Final = 8192

MAX_FILES: Final = 65_536

HANDSHAKE_MS: Final = 10_000
"""How long TLS and the first HTTP/2 frames of a connection may take."""

MAX_STREAMS: Final = 256
"""Maximum number of concurrent calls over one connection; a client's further calls wait in the client.

Refusing a call takes 0.35 ms, and calls of one method are taken in order: so many on all connections of an address's strangers
delay others by up to 3 s.
"""

MAX_PENDING: Final = 65_536
"""Calls of one method that wait for the event loop: more than the connections of one address's strangers may have open."""

MAX_REQUEST_BYTES: Final = 32 << 20
"""The largest message that is received, which is an agent's result of eight programs; those of other rpcs are far smaller."""

MAX_METADATA_BYTES: Final = 16 << 10
"""Maximum size of a request's metadata, which has a token and a project."""

LOOK_S: Final = 1.0

_PAUSE_S: Final = 0.05
"""Minimum time between two looks, however many calls with invalid tokens come."""

_FEWEST_RESERVED: Final = 192
"""Minimum number of descriptors for the server itself: the database, children's pipes, and artifacts in transfer."""


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may go, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def most_connections(files: int) -> int:
    """Return how many connections to allow, so that enough of `files` descriptors remain for everything else."""
    return max(min(files - max(_FEWEST_RESERVED, files // 3), MAX_CONNECTIONS), 16)


def server_options(files: int) -> list[tuple[str, int]]:
    """Return gRPC's options for a server that may open so many files."""
    return [
        # Excess connections are closed as they come, and clients try again.
        ("grpc.max_allowed_incoming_connections", most_connections(files)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # gRPC cancels calls of anybody at random where more wait for the event loop: a stranger's flood ended others' calls.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        # Only "identity": no client of etfarm compresses, and a small compressed message can become a large one.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


_SOCKETS: Final = Path("/proc/self/fd")

Peer = tuple[str, int]


class Connections:
    """The TCP connections to one port of this process.

    Args:
        asks_for_tokens: returns whether callers need a token; if not, only the number of connections is limited.
        clock: returns monotonic seconds.
    """

    def __init__(self, asks_for_tokens: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._asks_for_tokens = asks_for_tokens
        self._clock = clock
        self._trusted: set[Peer] = set()
        self._distrusted: set[Peer] = set()
        self._since: dict[Peer, float] = {}
        self._wake = asyncio.Event()

    def trust(self, peer: str) -> None:
        """Note that a call with a valid token came over a connection; `peer` is gRPC's name of it."""
        if (known := _parse(peer)) is not None:
            self._trusted.add(known)

    def distrust(self, peer: str) -> None:
        """Note that a connection keeps sending invalid tokens; it is closed at once, unless it has sent a valid one, too."""
        if (known := _parse(peer)) is not None:
            self._distrusted.add(known)
            self._wake.set()

    async def watch(self, port: int) -> None:
        """Close connections without a valid token for as long as the server runs."""
        if not _SOCKETS.is_dir():
            return
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            await asyncio.sleep(_PAUSE_S)
            self._wake.clear()
            try:
                closed = await asyncio.to_thread(self.look, port)
            except Exception:
                log.exception("the connections could not be looked at")
                continue
            if closed:
                log.warning("closed connections without a valid token or beyond the limits", connections=closed)

    def look(self, port: int) -> int:
        """Shut down excess connections and those without a valid token; return their number."""
        now = self._clock()
        # This is a thread: a connection may come and be trusted while the sockets are listed, and an agent's calls only once.
        trusted = self._trusted.copy()
        descriptors: dict[Peer, int] = {}
        for name in _SOCKETS.iterdir():
            if (peer := _peer(int(name.name), port)) is not None:
                descriptors[peer] = int(name.name)
        self._since = {peer: self._since.get(peer, now) for peer in descriptors}
        self._trusted -= trusted - descriptors.keys()
        excess = list(self._excess(now))
        self._distrusted.clear()
        for peer in excess:
            _shut_down(descriptors[peer], peer, port)
        return len(excess)

    def _excess(self, now: float) -> Iterator[Peer]:
        """Yield the connections to close. Of an address with too many, those without a valid token and the newest come first."""
        strangers: defaultdict[str, int] = defaultdict(int)
        everything: defaultdict[str, int] = defaultdict(int)
        asks = self._asks_for_tokens()
        for peer, since in sorted(self._since.items(), key=lambda item: (item[0] not in self._trusted, item[1])):
            is_stranger = asks and peer not in self._trusted
            everything[peer[0]] += 1
            strangers[peer[0]] += is_stranger
            if (
                everything[peer[0]] > CONNECTIONS_OF_AN_ADDRESS
                or (is_stranger and (peer in self._distrusted or now - since > STRANGER_S))
                or (is_stranger and strangers[peer[0]] > STRANGERS_OF_AN_ADDRESS)
            ):
                yield peer


@contextlib.contextmanager
def _socket(number: int) -> Iterator[socket.socket | None]:
    """Yield the socket of a descriptor, duplicated since gRPC may close its own at any time; None if it is not a socket.

    A descriptor of a file is never duplicated: closing the duplicate would drop this process's locks on the file (`man 2 fcntl`),
    among them those of SQLite, without which another program that opens the database deletes its write-ahead log.
    """
    try:
        own = os.dup(number) if stat.S_ISSOCK(os.fstat(number).st_mode) else -1
    except OSError:
        own = -1  # closed meanwhile
    if own == -1 or not stat.S_ISSOCK(os.fstat(own).st_mode):  # a file that took the descriptor meanwhile stays open
        yield None
        return
    with socket.socket(fileno=own) as opened:
        yield opened


def _peer(number: int, port: int) -> Peer | None:
    """Return the peer of a descriptor that is a TCP connection to the port; None for any other."""
    with _socket(number) as opened:
        return _peer_of(opened, port)


def _peer_of(opened: socket.socket | None, port: int) -> Peer | None:
    if opened is None or opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        return None
    try:
        if opened.getsockname()[1] != port:
            return None
        host, peer_port = opened.getpeername()[:2]
    except OSError:  # the listening socket, or one whose peer has left
        return None
    return _plain(host), peer_port


def _shut_down(number: int, peer: Peer, port: int) -> None:
    with _socket(number) as opened, contextlib.suppress(OSError):  # the peer left by itself
        if opened is not None and _peer_of(opened, port) == peer:  # the descriptor may belong to another connection by now
            opened.shutdown(socket.SHUT_RDWR)


def _parse(peer: str) -> Peer | None:
    """Return the address and port of a gRPC peer such as `ipv6:%5B::1%5D:4711`; None for a unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
