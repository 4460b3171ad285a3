"""Limits on connections to the server. Connections without a valid token are closed or paused before they exhaust the limits.

gRPC neither reports nor closes connections without calls. However, they are sockets of this process, so their peers can be read
and the sockets shut down, which gRPC handles as if the peer had closed them.

A connection without a valid token may begin calls faster than the event loop can refuse them. While many calls wait, the loop
drops those without a valid token, and a thread pauses the connections that begin them. A pause loses nothing: the kernel ignores
what arrives, and the peer sends it again later. So a client whose first calls wait is only delayed, and an attacker does not
notice that another connection is needed. While calls are dropped, and while many connections are opened thereafter, each new one
receives only the first call of each packet: an attacker that reconnects for each burst of calls would otherwise be faster than
the thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import ipaddress
import resource
import socket
import struct
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import structlog

from etfarm.server.rpc.door.failures import Allowance
from etfarm.wire.authority import network_of

log = structlog.get_logger()

STRANGER_S: Final = 15.0
"""Time for which a connection may stay open without a call with a valid token."""

STRANGERS_OF_AN_ADDRESS: Final = 32
"""Maximum number of connections without a valid token from one address."""

YOUNG_S: Final = 1.0
"""Age up to which a connection does not count as one without a valid token: its first call may wait for the event loop."""

YOUNG_OF_AN_ADDRESS: Final = 512
"""Maximum number of such connections from one address: after a restart of the server, all agents of a site connect at once."""

CONNECTIONS_OF_AN_ADDRESS: Final = 1024
"""Maximum number of connections from one address, which may be the gateway of a whole team."""

MAX_CONNECTIONS: Final = 8192

MAX_FILES: Final = 65_536

HANDSHAKE_MS: Final = 10_000
"""Time limit for TLS and the first HTTP/2 frames of a connection, in milliseconds."""

MAX_STREAMS: Final = 256
"""Maximum number of concurrent calls over one connection; further calls wait in the client.

gRPC also counts calls that were reset and still wait for the event loop.
"""

MAX_PENDING: Final = 16_384
"""Maximum number of calls of one method that wait for the event loop: more than one address can open without a valid token."""

MAX_REQUEST_BYTES: Final = 32 << 20
"""Maximum size of a received message. The largest is an agent's result of eight programs; other rpcs need far less."""

LOOKAHEAD_BYTES: Final = 1 << 20
"""Number of bytes of a call that its client may send before they are asked for.

For a fast connection gRPC would raise it to many MiB, so that calls of strangers would take hundreds of MiB before they are
refused. Uploads get about as much in each round trip.
"""

MAX_METADATA_BYTES: Final = 16 << 10
"""Maximum size of a request's metadata, which contains a token and a project."""

FLOOD_CALLS: Final = 128
"""Number of calls without a valid token between two ticks of the thread, above which they are a flood."""

FLOOD_S: Final = 0.5
"""Time for which a flood is assumed to go on after such a tick."""

MANY_BYTES: Final = 1 << 10
MANY_ENCRYPTED_BYTES: Final = 8 << 10
"""Number of bytes above which a connection without a valid token is paused during a flood: a first call has fewer, and also a
handshake with a chain of certificates of the client."""

FLOOD_BYTES: Final = 1 << 20
"""Number of bytes above which such a connection is paused at any time: frames that begin no call, as PING, are work, too."""

MESSAGE_BYTES: Final = 16 << 20
"""Further number of bytes for each call: so much of its messages may arrive before its client reads that it is refused."""

FIRST_BYTES: Final = 256
NEXT_BYTES: Final = 1 << 10
"""Number of bytes that the kernel takes of a packet for a new encrypted connection while it is held: of one that begins with a
record of calls, and of one that begins within a record, which may have a client's certificates.

For other connections, it takes one call. The peer sends the rest again after 0.2 s. By then the token of its first call is known.
"""

HOLD_S: Final = 2.0
"""Time for which new connections are held after such a tick."""

OPENED_A_SECOND: Final = 60.0
"""Rate of new connections without a valid token above which a flood begins or goes on, however few calls the event loop takes.

While it is late, each refusal takes long. And while new connections are held, few calls begin.
"""

REFUSALS: Final = 256
"""Number of calls without a valid token that are refused at once; each takes 0.35 ms."""

REFUSALS_WHILE_FLOODED: Final = 1
"""Number of calls of a connection without a valid token that are refused while many calls wait; further ones are dropped."""

REFUSALS_A_SECOND: Final = 100.0
"""Rate at which further calls without a valid token are refused; those beyond it are dropped, and their connections closed."""

LOOK_S: Final = 1.0
"""Maximum time between two checks of the connections."""

_TICK_S: Final = 0.05
"""Interval at which calls are counted, and the connections checked during a flood."""

_IDLE_TICK_S: Final = 0.25
"""The interval while no call waits and no connection without a valid token calls."""

_SPARE_NAMES: Final = 256
"""Number of names of peers that stay parsed beside twice that of the connections: an agent opens one for each attempt."""

_FLOODED_SWITCH_S: Final = 0.0005
"""Time after which a busy event loop lets the thread run during a flood, instead of Python's 5 ms."""

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


def server_options(files: int, metadata_bytes: int = MAX_METADATA_BYTES) -> list[tuple[str, int]]:
    """Return gRPC's options for a server that may open this number of files and reads metadata of this size."""
    return [
        # Excess connections are closed immediately, and their clients try again.
        ("grpc.max_allowed_incoming_connections", most_connections(files)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
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


_libc: Final = ctypes.PyDLL(None)
"""The C library. Its calls keep the interpreter, which a busy event loop would return only after a while, for each call anew."""


def _name(ask: Callable[..., int], number: int) -> bytes | None:
    """Return the address that getpeername or getsockname has of a descriptor; None if it has none."""
    address, size = ctypes.create_string_buffer(28), ctypes.c_uint32(28)
    return None if ask(number, address, ctypes.byref(size)) else address.raw[: size.value]


def _option(number: int, level: int, name: int, size_bytes: int) -> bytes:
    """Return an option of a socket; zeros if it is closed."""
    value, size = ctypes.create_string_buffer(size_bytes), ctypes.c_uint32(size_bytes)
    _libc.getsockopt(number, level, name, value, ctypes.byref(size))
    return value.raw


def _is_set(number: int, name: int) -> bool:
    return any(_option(number, socket.SOL_SOCKET, name, 4))


@functools.lru_cache(maxsize=MAX_CONNECTIONS)
def _parse_name(name: bytes) -> Peer | None:
    """Return the address and port of a `struct sockaddr`; None if it is not one of TCP."""
    family = int.from_bytes(name[:2], sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host = socket.inet_ntop(family, name[4:8] if family == socket.AF_INET else name[8:24])
    return host if family == socket.AF_INET else _plain(host), int.from_bytes(name[2:4], "big")


def _is_of(number: int, port: int) -> bool:
    """Return whether a descriptor is a TCP socket of a port of this machine."""
    own = _parse_name(_name(_libc.getsockname, number) or b"")
    kind = int.from_bytes(_option(number, socket.SOL_SOCKET, socket.SO_TYPE, 4), sys.byteorder)
    return own is not None and own[1] == port and kind == socket.SOCK_STREAM


def find_peer(number: int, port: int) -> Peer | None:
    """Return the peer of a descriptor that is a TCP connection to the port; None for any other descriptor."""
    name = _name(_libc.getpeername, number)
    return _parse_name(name) if name is not None and _is_of(number, port) else None


@contextlib.contextmanager
def _duplicate(number: int, peer: Peer, port: int) -> Iterator[int | None]:
    """Yield a duplicate of a connection's descriptor, since gRPC may close its own at any time; None if it has.

    The descriptor of a file is never closed: that would release this process's locks on the file (`man 2 fcntl`). Without
    SQLite's locks, another program that opens the database would delete its write-ahead log.
    """
    duplicate = _libc.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0) if find_peer(number, port) == peer else -1
    if find_peer(duplicate, port) == peer:
        try:
            yield duplicate
        finally:
            _libc.close(duplicate)
        return
    if _name(_libc.getsockname, duplicate) is not None:  # another connection has taken over the number
        _libc.close(duplicate)
    yield None


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
        self.dropped = 0
        """Number of calls that were dropped."""
        self.unused = 0
        """Number of connections that were closed for want of any call, as clients of several servers open them."""
        self._strange = 0
        self._strange_of: Counter[Peer] = Counter()
        """Numbers of calls without a valid token, in total and by connection."""
        self.is_encrypted = False
        self.is_flooded = False
        """Whether many calls without a valid token arrive."""
        self._refusals = Allowance(REFUSALS, REFUSALS_A_SECOND, clock)
        self._trusted: set[Peer] = set()
        self._distrusted: set[Peer] = set()
        self._flooding: set[Peer] = set()
        """Connections whose calls were dropped while many calls waited."""
        self._paused: set[Peer] = set()
        self._held: set[Peer] = set()
        """Connections of which the kernel may take the first bytes only."""
        self._holds_new = self._has_held = False
        """Whether the listening sockets hold new connections, and whether they ever did."""
        self._ending: set[Peer] = set()
        """Connections to close although they have sent a valid token."""
        self._since: dict[Peer, float] = {}
        self._opened = 0
        """Number of connections that had no valid token when they were first seen."""
        self._is_due = False
        """Whether a connection is to be closed, paused or resumed at the next tick."""
        self._called, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def admits(self, peer: str, has_token: Callable[[], bool]) -> bool:
        """Return whether a call is to be handled; otherwise it is to be dropped.

        Calls with a valid token and calls of connections that have sent one are always handled.

        Args:
            peer: gRPC's name of the connection's peer.
            has_token: returns whether the call has a valid token.
        """
        known = parse_peer(peer)
        if known is None or known in self._trusted or not self._asks_for_tokens():
            return True
        if not self._called.is_set():
            self._called.set()
        if has_token():
            self.trust(peer)
            return True
        self._strange += 1
        self._strange_of[known] += 1
        if known not in self._flooding and known not in self._distrusted:
            if not (self.is_flooded and self._strange_of[known] > REFUSALS_WHILE_FLOODED) and self._refusals.take():
                return True
            (self._flooding if self.is_flooded else self._distrusted).add(known)
            self._is_due = True
        self.dropped += 1
        return False

    def trust(self, peer: str) -> None:
        """Record that a call with a valid token arrived over a connection; `peer` is gRPC's name of the connection's peer."""
        if (known := parse_peer(peer)) is not None:
            self._is_due |= known in self._paused or (known not in self._trusted and self._has_held)
            self._trusted.add(known)

    def distrust(self, peer: str) -> None:
        """Record that a connection keeps sending invalid tokens. It is closed at once unless it has also sent a valid one."""
        if (known := parse_peer(peer)) is not None:
            self._distrusted.add(known)
            self._is_due = True

    def end(self, peer: str) -> None:
        """Close a connection at once, although it has sent a valid token."""
        if (known := parse_peer(peer)) is not None:
            self._ending.add(known)
            self._is_due = True

    def start(self, port: int, *, is_encrypted: bool = False) -> None:
        """Close and pause connections in a thread of their own, since the event loop may be late, until `close`."""
        self.is_encrypted = is_encrypted
        if self._open_files.is_dir():
            self._thread = threading.Thread(target=self._watch, args=(port,), name="connections", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End what `start` began."""
        self._closing.set()
        self._called.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, port: int) -> None:
        strange, opened, changed, unused = 0, 0, 0, 0
        flooded_s = -HOLD_S
        looked_s = counted_s = self._clock()
        switch_s = sys.getswitchinterval()
        while not self._closing.wait(_TICK_S):
            if not (self._holds_new or self._is_due):
                self._called.wait(_IDLE_TICK_S)
            is_called = self._called.is_set()
            self._called.clear()
            now = self._clock()
            is_regular = now - looked_s >= LOOK_S
            try:
                if self._strange - strange > FLOOD_CALLS:
                    flooded_s = now
                strange = self._strange
                if (now - flooded_s < FLOOD_S) is not self.is_flooded:
                    self.is_flooded = not self.is_flooded
                    sys.setswitchinterval(_FLOODED_SWITCH_S if self.is_flooded else switch_s)
                if (now - flooded_s < HOLD_S) is not self._holds_new:
                    self.hold_new(port, holds=not self._holds_new)
                is_soon = self._holds_new or is_called
                if not (self.is_flooded or self._is_due or now - counted_s >= (_IDLE_TICK_S if is_soon else LOOK_S)):
                    continue
                self._is_due = False
                changed += self.look(port)
                if now - counted_s >= _IDLE_TICK_S:
                    if self._opened - opened > (now - counted_s) * OPENED_A_SECOND and self._asks_for_tokens():
                        flooded_s = now
                    opened, counted_s = self._opened, now
            except Exception:  # such as for a lack of descriptors: it is tried again
                if is_regular:
                    log.exception("the connections could not be checked")
            if is_regular:
                looked_s = now
                if number := changed - (self.unused - unused):
                    log.warning("closed or paused connections without a valid token or beyond the limits", connections=number)
                changed, unused = 0, self.unused

    def hold_new(self, port: int, *, holds: bool) -> None:
        """Let the kernel take only the first bytes for connections that are accepted from now on, or end this."""
        self._has_held, first = True, _FIRST_BYTES if self.is_encrypted else _FIRST_CALL
        for path in self._open_files.iterdir():
            if _is_of(number := int(path.name), port) and _is_set(number, socket.SO_ACCEPTCONN):
                _filter(number, first if holds else None)
        self._holds_new, self._is_due = holds, True

    def look(self, port: int) -> int:
        """Close excess connections and those without a valid token, and pause those that flood; return their number."""
        now = self._clock()
        # This runs in a thread: a connection may open and become trusted while the sockets are listed, and an agent calls only
        # once.
        known = self._trusted.copy(), self._distrusted.copy(), self._flooding.copy()
        descriptors = self._list(port)
        if self._has_held:  # a connection has the filter that its listening socket had
            self._held = (self._held & descriptors.keys()) | (descriptors.keys() - self._since.keys())
        self._opened += len(descriptors.keys() - self._since.keys() - self._trusted)
        self._since = {peer: self._since.get(peer, now) for peer in descriptors}
        for current, listed in zip((self._trusted, self._distrusted, self._flooding), known, strict=True):
            if current is self._trusted or not self.is_flooded:  # else calls of closed connections may still wait
                current -= listed - descriptors.keys()
        for parse in (_parse_name, parse_peer):
            if parse.cache_info().currsize > 2 * len(descriptors) + _SPARE_NAMES:
                parse.cache_clear()
        for peer in self._strange_of.keys() - descriptors.keys():
            self._strange_of.pop(peer, None)
        self._paused &= descriptors.keys()
        ending = self._ending.copy()
        excess = set(self._excess(now)) | (ending & descriptors.keys())
        self._ending -= ending
        self.unused += sum(
            now - self._since[peer] > STRANGER_S and peer not in self._strange_of for peer in excess - self._trusted
        )
        for peer in excess:
            _shut_down(descriptors[peer], peer, port)
        paused = set(self._to_pause(descriptors.keys() - excess - self._trusted - self._paused, descriptors, now))
        for peer in paused:
            self._paused.add(peer)
            self._held.discard(peer)
            _pause(descriptors[peer], peer, port)
        for peer in [peer for peer in self._paused | self._held if self._may_resume(peer)]:
            self._paused.discard(peer)
            self._held.discard(peer)
            _resume(descriptors[peer], peer, port)
        return len(excess) + len(paused)

    def _to_pause(self, strangers: Collection[Peer], descriptors: Mapping[Peer, int], now: float) -> Iterator[Peer]:
        if not strangers or not self._asks_for_tokens():
            return
        many_bytes = MANY_ENCRYPTED_BYTES if self.is_encrypted else MANY_BYTES
        for peer in strangers:
            received = 0 if peer in self._flooding else _received(descriptors[peer])
            is_young = now - self._since[peer] < YOUNG_S  # its first calls may wait for the event loop
            if received > FLOOD_BYTES + MESSAGE_BYTES * self._strange_of[peer] and not is_young:
                self._flooding.add(peer)
            if peer in self._flooding or (self.is_flooded and received > many_bytes):
                yield peer

    def _may_resume(self, peer: Peer) -> bool:
        return peer in self._trusted or (peer not in self._flooding and not self.is_flooded and not self._holds_new)

    def _list(self, port: int) -> dict[Peer, int]:
        """Return the descriptors of the connections to the port by their peers."""
        peers = ((self._find_peer(int(path.name), port), int(path.name)) for path in self._open_files.iterdir())
        return {peer: number for peer, number in peers if peer is not None}

    def _excess(self, now: float) -> Iterator[Peer]:
        """Yield the connections to close. Per address, those without a valid token are closed first, then the newest."""
        young: defaultdict[str, int] = defaultdict(int)
        strangers: defaultdict[str, int] = defaultdict(int)
        totals: defaultdict[str, int] = defaultdict(int)
        requires_token = self._asks_for_tokens()
        if len(self._since) <= CONNECTIONS_OF_AN_ADDRESS and not (requires_token and self._since.keys() - self._trusted):
            return
        for peer, since in sorted(
            self._since.items(), key=lambda item: (item[0] not in self._trusted, item[0] in self._flooding, item[1])
        ):
            is_stranger = requires_token and peer not in self._trusted
            is_young = is_stranger and now - since < YOUNG_S
            whose = network_of(peer[0]) if ":" in peer[0] else peer[0]  # an IPv6 network may be one machine, or a whole site's
            totals[peer[0]] += 1
            young[whose] += is_young
            strangers[whose] += is_stranger and not is_young
            if (
                totals[peer[0]] > CONNECTIONS_OF_AN_ADDRESS
                or (is_stranger and (peer in self._distrusted or now - since > STRANGER_S))
                or (is_young and young[whose] > YOUNG_OF_AN_ADDRESS)
                or (is_stranger and not is_young and strangers[whose] > STRANGERS_OF_AN_ADDRESS)
            ):
                yield peer


_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # <asm/socket.h>, of all of etfarm's servers' architectures
_NOTHING = struct.pack("=HBBI", 6, 0, 0, 0)
"""A program of the kernel's packet filter: the instruction `BPF_RET | BPF_K` with 0, which accepts no byte of any packet."""


_HEADER: Final = [(0x30, 0, 0, 12), (0x74, 0, 0, 4), (0x64, 0, 0, 2)]  # ldb, rsh, lsh: its length is in the upper half of byte 12
"""Instructions that load the length of a packet's TCP header."""


def _first_bytes() -> list[tuple[int, int, int, int]]:
    """Return the instructions of a program that accepts the first bytes of packets of TLS, and those of a handshake whole."""
    return [
        *_HEADER, (0x07, 0, 0, 0),  # tax
        (0x80, 0, 0, 0), (0x1C, 0, 0, 0), (0x35, 0, 10, 2),  # ld len, sub x, jge 2
        (0x48, 0, 0, 0), (0x15, 5, 0, 0x1703), (0x15, 7, 0, 0x1603), (0x15, 6, 0, 0x1403),  # ldh [x], jeq a kind of record
        (0x87, 0, 0, 0), (0x04, 0, 0, NEXT_BYTES), (0x16, 0, 0, 0),  # txa, add, ret
        (0x87, 0, 0, 0), (0x04, 0, 0, FIRST_BYTES), (0x16, 0, 0, 0),
        (0x06, 0, 0, 0xFFFFFFFF),
    ]  # fmt: skip


def _first_call(frames: int = 6) -> list[tuple[int, int, int, int]]:
    """Return the instructions of a program that accepts what ends a packet's first HEADERS frame of HTTP/2, and nothing after it.

    X is where a frame begins. A packet without such a frame among its first ones ends after these; what is no frame, or none that
    ends in the packet, is accepted.
    """
    frame = [
        (0x80, 0, 0, 0), (0x2D, 0, 0xFF, 0), (0x1C, 0, 0, 0), (0x35, 0, 0xFF, 9),  # ld len, jgt x, sub x, jge 9
        (0x50, 0, 0, 3), (0x15, 0xFE, 0, 1),  # ldb [x + 3], jeq HEADERS
        (0x40, 0, 0, 0), (0x74, 0, 0, 8), (0x04, 0, 0, 9), (0x0C, 0, 0, 0), (0x07, 0, 0, 0),  # ld [x], rsh, add 9, add x, tax
    ]  # fmt: skip
    program = [
        *_HEADER, (0x07, 0, 0, 0),  # tax
        (0x80, 0, 0, 0), (0x1C, 0, 0, 0), (0x35, 0, 0xFF, 24),  # ld len, sub x, jge 24
        (0x40, 0, 0, 0), (0x15, 0, 3, int.from_bytes(b"PRI ", "big")), (0x87, 0, 0, 0), (0x04, 0, 0, 24), (0x07, 0, 0, 0),
        *frame * frames,
        (0x87, 0, 0, 0), (0x16, 0, 0, 0),  # txa, ret
        *frame[6:10], (0x16, 0, 0, 0),  # the end of the HEADERS frame
        (0x06, 0, 0, 0xFFFFFFFF),
    ]  # fmt: skip
    accept, headers = len(program) - 1, len(program) - 6
    target = {0xFF: accept, 0xFE: headers}

    def to(jump: int, at: int) -> int:
        return target[jump] - at - 1 if jump in target else jump

    return [(code, to(yes, at), to(no, at), value) for at, (code, yes, no, value) in enumerate(program)]


def _assemble(program: list[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_FIRST_CALL, _FIRST_BYTES = _assemble(_first_call()), _assemble(_first_bytes())
"""Programs for new connections during a flood, the second for encrypted ones."""


def _filter(number: int, program: bytes | None) -> bool:
    """Give a socket a program of the kernel's packet filter instead of the one that it has; None removes it.

    Returns False where the kernel has no packet filter.
    """
    if program is None:
        return not _libc.setsockopt(number, socket.SOL_SOCKET, _SO_DETACH_FILTER, bytes(4), 4)
    code = ctypes.create_string_buffer(program, len(program))
    value = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    return not _libc.setsockopt(number, socket.SOL_SOCKET, _SO_ATTACH_FILTER, value, len(value))


_RECEIVED_AT = 128  # `tcpi_bytes_received` in <linux/tcp.h>


def _received(number: int) -> int:
    """Return the number of bytes that a connection has received; 0 if it is closed."""
    return int.from_bytes(_option(number, socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)[_RECEIVED_AT:], sys.byteorder)


def _pause(number: int, peer: Peer, port: int) -> None:
    """Make the kernel ignore what arrives over a connection. Where it has no packet filter, shut down the connection."""
    with _duplicate(number, peer, port) as connection:
        if connection is not None and not _filter(connection, _NOTHING):
            _libc.shutdown(connection, socket.SHUT_RDWR)


def _resume(number: int, peer: Peer, port: int) -> None:
    with _duplicate(number, peer, port) as connection:
        if connection is not None:
            _filter(connection, None)


def _shut_down(number: int, peer: Peer, port: int) -> None:
    with _duplicate(number, peer, port) as connection:
        if connection is not None:
            _filter(connection, None)  # else the peer's acknowledgement would be ignored
            _libc.shutdown(connection, socket.SHUT_RDWR)


@functools.lru_cache(maxsize=MAX_CONNECTIONS)
def parse_peer(peer: str) -> Peer | None:
    """Return the address and port of a gRPC peer such as `ipv6:%5B::1%5D:4711`; None for a unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
