"""Connections that keep neither the page nor others waiting: limited in number by owner, in time, and to a least rate.

A connection belongs to its address until a request of it has a signed-in visitor, and then to the visitor's account. Each of the
two kinds has room of its own. An excess connection does not wait: the one that has been idle for longest ends for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from etfarm.client.web.options import WebOptions
from etfarm.client.web.turns import Pace, TooManyRequests
from etfarm.wire.authority import network_of

REQUEST_S: Final = 30.0
"""Seconds until the head of the next request must have arrived."""
HANDSHAKE_S: Final = 10.0
"""Seconds until TLS must be agreed."""
PROGRESS_S: Final = 60.0
"""Seconds of waiting for a browser in which it must take, or send, at least a number of bytes."""
LEAST_BYTES: Final = 16 << 10
"""That number: a page on the worst line of a phone arrives, but nobody keeps a connection with a byte a minute."""
LEAST_DOWNLOAD_BYTES: Final = 512 << 10
"""That number for a download, which keeps a stream of the farm: 9 kB/s."""
CONNECTS_PER_S: Final = 200.0
"""New connections a second of an address, after `CONNECTS_AT_ONCE`; others are closed before anything is prepared for them."""
CONNECTS_AT_ONCE: Final = 1_000
_ACCEPTED_OF_A_TURN: Final = 16
"""Number of new connections after which the event loop does other work: who has sent a request is known before many more come."""
_MAX_FILES: Final = 65_536
_OTHER_FILES: Final = 256
"""File descriptors for all but visitors' connections."""

_HEAD_BYTES: Final = 16 << 10
_MALFORMED: Final = "This is not a request of HTTP/1.1."
_REFUSALS: Final = {
    "Receive buffer too long": "The request line and its headers have more than {kib} KiB.",
    "request line": "The request line must be METHOD TARGET HTTP/1.1.",
    "Illegal method": "The request line must be METHOD TARGET HTTP/1.1.",
    "Illegal target": "The request line must be METHOD TARGET HTTP/1.1.",
    "conflicting Content-Length": "The request has several Content-Length headers that differ.",
    "bad Content-Length": "Content-Length must be a number of at most 20 digits.",
    "Host:": "The request must have one Host header.",
    "Transfer-Encoding": "A body needs its Content-Length; Transfer-Encoding is not supported.",
    "header": "A header must be one line NAME: VALUE.",
}
"""What is wrong with a request, by words of the parser's message; the first that match. No byte of the request is repeated."""

_TCP_INFO_BYTES: Final = 136
_BYTES_ACKED: Final = struct.Struct("120xQ")
"""Where Linux's struct tcp_info has the number of bytes that the peer has acknowledged."""

log = logging.getLogger(__name__)


class Place:
    """One connection among the others."""

    def __init__(self, connections: Connections, owner: str, end: Callable[[], None]) -> None:
        self._connections = connections
        self.address_owner = owner
        """The address that it counts for; empty for a reverse proxy, which has many visitors."""
        self.owner = owner
        self.room = connections.strangers
        self.end = end
        self.is_busy = False
        self.since_s = connections.now_s()
        """Since when it is busy or idle."""
        self.least_bytes = LEAST_BYTES
        """Number of bytes of the answer that the browser must take in `PROGRESS_S`."""

    def set_busy(self, is_busy: bool) -> None:
        """Record whether a request is in progress."""
        if is_busy is not self.is_busy:
            self.is_busy, self.since_s = is_busy, self._connections.now_s()
        if not is_busy:
            self.least_bytes = LEAST_BYTES

    def enter(self, account: str) -> None:
        """Count the connection for an account; for its address without one."""
        room = self._connections.visitors if account else self._connections.strangers
        owner = account or self.address_owner
        if (self.room, self.owner) != (room, owner) and self.room.remove(self):
            self.room, self.owner = room, owner
            room.add(self)


class _Room:
    """The connections of one kind by owner, and how many there may be."""

    def __init__(self, limit: int, limit_of_owner: int, *, ends_busy: bool) -> None:
        self._limit = limit
        self._limit_of_owner = limit_of_owner
        self._ends_busy = ends_busy
        self._owners: dict[str, set[Place]] = {}
        self.count = 0

    def add(self, place: Place) -> None:
        """Add a connection; for an excess one, another one of the same owner ends, or one of the owner that has the most."""
        members = self._owners.setdefault(place.owner, set())
        members.add(place)
        self.count += 1
        if place.owner and len(members) > self._limit_of_owner:
            self._end_one(members, place)
        elif self.count > self._limit:
            self._end_one(max(self._owners.values(), key=len), place)

    def remove(self, place: Place) -> bool:
        """Remove a connection, and return whether it was there."""
        members = self._owners.get(place.owner)
        if members is None or place not in members:
            return False
        members.discard(place)
        self.count -= 1
        if not members:
            del self._owners[place.owner]
        return True

    def _end_one(self, members: set[Place], new: Place) -> None:
        others = (each for each in members if each is not new and (self._ends_busy or not each.is_busy))
        excess = min(others, key=lambda each: (each.is_busy, each.since_s), default=new)
        self.remove(excess)
        excess.end()
        log.warning("Closed a connection beyond the limits: its address or token has %d.", len(members) + 1)


class Connections:
    """All connections of the page."""

    def __init__(self, options: WebOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.now_s = clock
        limit = min(options.max_connections, (_raise_file_limit() - _OTHER_FILES) // 2)
        # What strangers may ask for is answered at once: a request that takes long is one that is sent or taken slowly.
        self.strangers = _Room(limit, options.max_connections_of_address, ends_busy=True)
        self.visitors = _Room(limit, options.max_connections_of_account, ends_busy=False)
        self._options = options
        self._pace = Pace(CONNECTS_PER_S, CONNECTS_AT_ONCE, 0.0, clock)
        self._places: dict[tuple[str, int], Place] = {}
        """Accepted connections by their peers, until they are made."""

    def accept(self, connected: socket.socket, peer: Any) -> bool:
        """Give a new connection its place; return False if its address opens too many, and nothing may be done for it."""
        owner = "" if self._options.is_proxy(peer[0]) else network_of(peer[0])
        try:
            if owner:
                self._pace.delay_s(owner)
        except TooManyRequests:
            log.warning("Refused a connection of an address that opens over %d a second.", CONNECTS_PER_S)
            return False

        def end() -> None:
            with contextlib.suppress(OSError):  # it has ended
                connected.shutdown(socket.SHUT_RDWR)

        place = Place(self, owner, end)
        self._places[peer[0], peer[1]] = place
        self.strangers.add(place)
        asyncio.get_running_loop().call_later(HANDSHAKE_S, self._expire, (peer[0], peer[1]), place)
        return True

    def begin(self, peer: Any, end: Callable[[], None]) -> Place:
        """Return the place of a connection that is made: it has been accepted, and TLS is agreed."""
        place = self._places.pop((peer[0], peer[1]), None)
        if place is None:
            place = Place(self, "" if self._options.is_proxy(peer[0]) else network_of(peer[0]), end)
            self.strangers.add(place)
        place.end = end
        return place

    def _expire(self, peer: tuple[str, int], place: Place) -> None:
        if self._places.get(peer) is place:
            del self._places[peer]
            place.room.remove(place)
            place.end()


class Listener(socket.socket):
    """A socket that listens, and refuses connections of an address that opens too many before they cost anything."""

    connections: Connections | None = None
    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            if self._accepted >= _ACCEPTED_OF_A_TURN:
                raise BlockingIOError
            connected, peer = super().accept()
            self._accepted += 1
            if self._accepted == 1:
                asyncio.get_running_loop().call_soon(self._end_turn)
            if self.connections is None or self.connections.accept(connected, peer):
                return connected, peer
            connected.close()

    def _end_turn(self) -> None:
        self._accepted = 0


class _Parser(h11.Connection):
    """A parser that takes bodies of an announced size only, as browsers send them: it would work on each of many small chunks.

    Args:
        head_bytes: maximum size of a request's head.
    """

    def __init__(self, head_bytes: int) -> None:
        super().__init__(h11.SERVER, head_bytes)
        self._head_bytes = head_bytes
        self.refusal = HTTPStatus.BAD_REQUEST, _MALFORMED
        """Status and sentence for the request that was refused."""

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
                raise h11.RemoteProtocolError("Transfer-Encoding", error_status_hint=HTTPStatus.LENGTH_REQUIRED)
            return event
        except h11.RemoteProtocolError as error:
            sentence = next((text for words, text in _REFUSALS.items() if words in str(error)), _MALFORMED)
            self.refusal = HTTPStatus(error.error_status_hint), sentence.format(kib=self._head_bytes >> 10)
            raise


class PromptProtocol(H11Protocol):
    """A connection that ends unless the head of a request arrives in time, and unless the browser takes what it asked for.

    Each head has its time: the first one, and each after an answer. Bodies and answers have a least rate.
    """

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._parser = _Parser(self.config.h11_max_incomplete_event_size or _HEAD_BYTES)
        self._connections = connections
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._received_bytes = 0
        self._paused_s = 0.0
        """Seconds in which bytes waited for the browser, since they were last counted."""
        self._taken_bytes = 0
        """Number of bytes that it took in that time."""
        self._paused_at: tuple[float, int] | None = None
        """Time and number of taken bytes when the current wait began; None while nothing waits."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.place = self._connections.begin(transport.get_extra_info("peername"), transport.abort)
        self.app_state = {**self.app_state, "connection": self.place}
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.place.room.remove(self.place)
        for timer in self._timers.values():
            timer.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.flow.pause_reading()  # the last request's answer is still sent, and ends the connection
            return
        status, sentence = self._parser.refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        response = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
        for event in (response, h11.Data(data=sentence.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at = self.loop.time(), self._acknowledged()
        self._start("taking", max(0.0, PROGRESS_S - self._paused_s), self._judge_taking)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_pause()
        self._cancel("taking")

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            return
        self.place.set_busy(True)
        self._cancel("request")
        self._await_body()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self.place.set_busy(False)
            self._await_request()
        else:  # a request that was sent before the answer to the last one
            self._await_body()

    def _await_request(self) -> None:
        self._start("request", REQUEST_S, self._close)

    def _close(self) -> None:
        """End the connection in order; at once if the browser does not take what is left."""
        self.transport.close()
        self._start("request", PROGRESS_S, self.transport.abort)

    def _await_body(self) -> None:
        """Watch the rate of a request's body, if it is not complete."""
        cycle, received_bytes = self.cycle, self._received_bytes
        if "body" in self._timers or cycle.response_complete or not cycle.more_body:
            return

        def judge() -> None:
            self._cancel("body")
            is_sending = self.cycle is cycle and cycle.more_body and not cycle.response_complete and not self.flow.read_paused
            if is_sending and self._received_bytes - received_bytes < LEAST_BYTES:
                log.warning("Closed a connection that sent a body with less than %d bytes in %g s.", LEAST_BYTES, PROGRESS_S)
                self.transport.abort()
                return
            self._await_body()

        self._start("body", PROGRESS_S, judge)

    def _end_pause(self) -> None:
        if self._paused_at is not None:
            (began_s, acknowledged), self._paused_at = self._paused_at, None
            self._paused_s += self.loop.time() - began_s
            self._taken_bytes += self._acknowledged() - acknowledged

    def _judge_taking(self) -> None:
        self._end_pause()
        if self._taken_bytes < self.place.least_bytes:
            log.warning("Closed a connection that took less than %d bytes in %g s.", self.place.least_bytes, PROGRESS_S)
            self.transport.abort()
            return
        self._paused_s, self._taken_bytes = 0.0, 0
        self._paused_at = self.loop.time(), self._acknowledged()
        self._start("taking", PROGRESS_S, self._judge_taking)

    def _acknowledged(self) -> int:
        """Return a number that grows by each byte which the browser's machine takes."""
        with contextlib.suppress(AttributeError, OSError, struct.error):
            information = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return int(_BYTES_ACKED.unpack_from(information)[0])
        return -self.transport.get_write_buffer_size()

    def _start(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self.loop.call_later(delay_s, action)

    def _cancel(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _raise_file_limit() -> int:
    """Raise the limit on open files of this process as far as permitted, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
