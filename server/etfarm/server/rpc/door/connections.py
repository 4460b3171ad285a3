"""Limits on connections to the server. Connections without a valid token are closed before they exhaust the limits.

gRPC neither reports nor closes connections without calls. However, they are sockets of this process, so their peers can be read
and the sockets shut down, which gRPC handles as if the peer had closed them.
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
"""Time for which a connection may stay open without a call with a valid token."""

STRANGERS_OF_AN_ADDRESS: Final = 32
"""Maximum number of connections without a valid token from one address."""

CONNECTIONS_OF_AN_ADDRESS: Final = 1024
"""Maximum number of connections from one address, which may be the gateway of a whole team."""

MAX_CONNECTIONS: Final = 8192

MAX_FILES: Final = 65_536

HANDSHAKE_MS: Final = 10_000
"""Time limit for TLS and the first HTTP/2 frames of a connection, in milliseconds."""

MAX_STREAMS: Final = 256
"""Maximum number of concurrent calls over one connection; further calls wait in the client.

Refusing a call takes 0.35 ms, and calls of one method are handled in order. This many calls, on all connections that one address
may open without a valid token, delay others by up to 3 s.
"""

MAX_PENDING: Final = 65_536
"""Maximum number of calls of one method that wait for the event loop: more than one address can open without a valid token."""

MAX_REQUEST_BYTES: Final = 32 << 20
"""Maximum size of a received message. The largest is an agent's result of eight programs; other rpcs need far less."""

MAX_METADATA_BYTES: Final = 16 << 10
"""Maximum size of a request's metadata, which contains a token and a project."""

LOOK_S: Final = 1.0

_PAUSE_S: Final = 0.05
"""Minimum time between two checks, regardless of the number of calls with invalid tokens."""

_MIN_RESERVED: Final = 192
"""Minimum number of file descriptors reserved for the server: the database, children's pipes, and artifact transfers."""


def raise_file_limit() -> int:
    """Raise the limit on open files of this process as far as permitted, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def most_connections(files: int) -> int:
    """Return the number of connections to allow, so that enough of `files` descriptors remain for everything else."""
    return max(min(files - max(_MIN_RESERVED, files // 3), MAX_CONNECTIONS), 16)


def server_options(files: int) -> list[tuple[str, int]]:
    """Return gRPC's options for a server that may open this number of files."""
    return [
        # Excess connections are closed immediately, and their clients try again.
        ("grpc.max_allowed_incoming_connections", most_connections(files)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # If more calls wait for the event loop, gRPC cancels random ones: a flood without tokens would end other callers' calls.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        # Only "identity": etfarm's clients do not compress, and a small compressed message can expand to a large one.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


OPEN_FILES: Final = Path("/proc/self/fd")
"""Folder with a file for each descriptor of this process."""

Peer = tuple[str, int]


@contextlib.contextmanager
def _socket(number: int) -> Iterator[socket.socket | None]:
    """Yield the duplicated socket of a descriptor, since gRPC may close its own at any time; None if it is not a socket.

    The descriptor of a file is never duplicated: closing the duplicate would release this process's locks on the file (`man 2
    fcntl`). Without SQLite's locks, another program that opens the database would delete its write-ahead log.
    """
    try:
        duplicate = os.dup(number) if stat.S_ISSOCK(os.fstat(number).st_mode) else -1
    except OSError:
        duplicate = -1  # closed in the meantime
    # A file that took over the descriptor in the meantime stays open.
    if duplicate == -1 or not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
        yield None
        return
    with socket.socket(fileno=duplicate) as opened:
        yield opened


def find_peer(number: int, port: int) -> Peer | None:
    """Return the peer of a descriptor that is a TCP connection to the port; None for any other descriptor."""
    with _socket(number) as opened:
        return _peer_of(opened, port)


def _peer_of(opened: socket.socket | None, port: int) -> Peer | None:
    if opened is None or opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        return None
    try:
        if opened.getsockname()[1] != port:
            return None
        host, peer_port = opened.getpeername()[:2]
    except OSError:  # the listening socket, or a socket with a disconnected peer
        return None
    return _plain(host), peer_port


class Connections:
    """The TCP connections to one port of this process.

    Args:
        asks_for_tokens: returns whether callers need a token; otherwise only the number of connections is limited.
        clock: returns seconds on a monotonic clock.
        open_files: folder with a file for each descriptor of this process.
        find_peer: as `find_peer`.
    """

    def __init__(
        self,
        asks_for_tokens: Callable[[], bool],
        clock: Callable[[], float],
        open_files: Path = OPEN_FILES,
        find_peer: Callable[[int, int], Peer | None] = find_peer,
    ) -> None:
        self._asks_for_tokens = asks_for_tokens
        self._clock = clock
        self._open_files = open_files
        self._find_peer = find_peer
        self._trusted: set[Peer] = set()
        self._distrusted: set[Peer] = set()
        self._closing: set[Peer] = set()
        self._since: dict[Peer, float] = {}
        self._sockets: dict[tuple[int, int], Peer | None] = {}
        """Peers of the sockets at the last look, by descriptor and inode; None for those that are no connections to the port.
        Asking the kernel takes long."""
        self._wake = asyncio.Event()

    def trust(self, peer: str) -> None:
        """Record that a call with a valid token arrived over a connection; `peer` is gRPC's name of the connection's peer."""
        if (known := _parse(peer)) is not None:
            self._trusted.add(known)

    def distrust(self, peer: str) -> None:
        """Record that a connection keeps sending invalid tokens. It is closed at once unless it has also sent a valid one."""
        if (known := _parse(peer)) is not None:
            self._distrusted.add(known)
            self._wake.set()

    def close(self, peer: str) -> None:
        """Close a connection at once, although it has sent a valid token."""
        if (known := _parse(peer)) is not None:
            self._closing.add(known)
            self._wake.set()

    async def watch(self, port: int) -> None:
        """Close connections without a valid token until the task is cancelled."""
        if not self._open_files.is_dir():
            return
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            await asyncio.sleep(_PAUSE_S)
            self._wake.clear()
            try:
                closed = await asyncio.to_thread(self.look, port)
            except Exception:
                log.exception("the connections could not be checked")
                continue
            if closed:
                log.warning("closed connections without a valid token or beyond the limits", connections=closed)

    def look(self, port: int) -> int:
        """Shut down excess connections and those without a valid token; return their number."""
        now = self._clock()
        # This runs in a thread: a connection may open and become trusted while the sockets are listed, and an agent calls only
        # once.
        trusted = self._trusted.copy()
        descriptors = self._list(port)
        self._since = {peer: self._since.get(peer, now) for peer in descriptors}
        self._trusted -= trusted - descriptors.keys()
        closing = self._closing.copy()
        excess = list(dict.fromkeys([*(closing & descriptors.keys()), *self._excess(now)]))
        self._distrusted.clear()
        self._closing -= closing
        for peer in excess:
            _shut_down(descriptors[peer], peer, port)
        return len(excess)

    def _list(self, port: int) -> dict[Peer, int]:
        """Return the descriptors of the connections to the port by their peers."""
        sockets: dict[tuple[int, int], Peer | None] = {}
        for path in self._open_files.iterdir():
            number = int(path.name)
            try:
                status = os.fstat(number)
            except OSError:
                continue  # closed in the meantime
            if stat.S_ISSOCK(status.st_mode):
                key = number, status.st_ino
                sockets[key] = self._sockets[key] if key in self._sockets else self._find_peer(number, port)
        self._sockets = sockets
        return {peer: number for (number, _), peer in sockets.items() if peer is not None}

    def _excess(self, now: float) -> Iterator[Peer]:
        """Yield the connections to close. Per address, connections without a valid token are closed first, then the newest."""
        strangers: defaultdict[str, int] = defaultdict(int)
        totals: defaultdict[str, int] = defaultdict(int)
        requires_token = self._asks_for_tokens()
        if len(self._since) <= CONNECTIONS_OF_AN_ADDRESS and not (requires_token and self._since.keys() - self._trusted):
            return
        for peer, since in sorted(self._since.items(), key=lambda item: (item[0] not in self._trusted, item[1])):
            is_stranger = requires_token and peer not in self._trusted
            totals[peer[0]] += 1
            strangers[peer[0]] += is_stranger
            if (
                totals[peer[0]] > CONNECTIONS_OF_AN_ADDRESS
                or (is_stranger and (peer in self._distrusted or now - since > STRANGER_S))
                or (is_stranger and strangers[peer[0]] > STRANGERS_OF_AN_ADDRESS)
            ):
                yield peer


def _shut_down(number: int, peer: Peer, port: int) -> None:
    with _socket(number) as opened, contextlib.suppress(OSError):  # the peer has already disconnected
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
