"""Which connections to a server are closed: real sockets of this process, and a clock in the test's hands."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PosixPath
from typing import Any

import pytest
from structlog.testing import capture_logs

from etfarm.server.rpc.door import connections
from etfarm.server.rpc.door.connections import (
    FIRST_BYTES,
    FLOOD_CALLS,
    MANY_BYTES,
    MAX_STREAMS,
    NEXT_BYTES,
    REFUSALS,
    REFUSALS_A_SECOND,
    STRANGER_S,
    STRANGERS_OF_AN_ADDRESS,
    YOUNG_OF_AN_ADDRESS,
    YOUNG_S,
    Connections,
    parse_peer,
)
from etfarm.server.rpc.door.failures import FLOOD, FORGET_S, FREE, MAX_ADDRESSES, MAX_WAIT_S, Allowance, Failures, address_of
from tests.support.http2 import ACK, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame

TLS_DATA = bytes([23, 3, 3])
"""The beginning of a record of TLS that has calls, or a client's certificates."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A listening socket and those that were accepted, as gRPC has them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listener.getsockname()[1]
        self.accepted: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, str]:
        """Return a client's socket, and its peer as gRPC names it."""
        client = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        client.settimeout(30)
        self.accepted.append(self._stack.enter_context(self._listener.accept()[0]))
        self.accepted[-1].settimeout(30)
        return client, f"ipv4:127.0.0.1:{client.getsockname()[1]}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(clock: Clock) -> Connections:
    """The connections of a server with tokens."""
    return Connections(lambda: True, clock)


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack)


def test_a_duplicate_of_a_connection_is_not_inherited(server: Server) -> None:
    _, peer = server.connect()
    known = parse_peer(peer)
    assert known is not None
    with connections._duplicate(server.accepted[-1].fileno(), known, server.port) as duplicate:
        assert duplicate is not None and not os.get_inheritable(duplicate)


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize("has_called", [False, True])
def test_only_a_connection_that_called_without_a_token_is_logged(
    watched: Connections, clock: Clock, server: Server, has_called: bool
) -> None:
    """A client of several servers connects to more of them than it calls."""
    client, peer = server.connect()
    watched.look(server.port)
    if has_called:
        watched.admits(peer, lambda: False)
    with capture_logs() as lines:
        watched.start(server.port)
        while is_open(client):
            clock.now += STRANGER_S
            time.sleep(0.01)
        watched.close()
    assert watched.unused == (not has_called)
    assert [(line["log_level"], line["connections"]) for line in lines] == ([("warning", 1)] if has_called else [])


def test_a_connection_that_is_trusted_during_a_look_stays_trusted(clock: Clock, server: Server) -> None:
    clients: list[socket.socket] = []

    class OpenFiles:
        """The descriptors of this process, to which one comes when all were listed for the first time."""

        def iterdir(self) -> Any:
            yield from list(connections.OPEN_FILES.iterdir())
            if not clients:
                client, peer = server.connect()
                watched.trust(peer)
                clients.append(client)

    watched = Connections(lambda: True, clock, OpenFiles())  # type: ignore[arg-type]
    watched.look(server.port)
    watched.look(server.port)
    clock.now += STRANGER_S + 1
    assert watched.look(server.port) == 0
    assert is_open(*clients)


def test_a_look_keeps_the_locks_of_files(server: Server, tmp_path: Path) -> None:
    """SQLite's: without them, a second program that opens the database deletes the log that the server writes to."""
    path = tmp_path / "locked"
    ask = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        server.connect()
        Connections(lambda: True, Clock()).look(server.port)
        taken = subprocess.run([sys.executable, "-c", ask, path], capture_output=True, text=True, timeout=60, check=False)
    assert taken.returncode == 1 and "BlockingIOError" in taken.stderr


def test_strangers_are_closed_after_a_while_and_others_never(watched: Connections, clock: Clock, server: Server) -> None:
    (stranger, _), (known, peer) = server.connect(), server.connect()
    watched.trust(peer)
    assert watched.look(server.port) == 0
    clock.now += STRANGER_S + 1
    assert watched.look(server.port) == 1
    assert not is_open(stranger) and is_open(known)
    clock.now += 100 * STRANGER_S
    watched.look(server.port)
    assert is_open(known)


def test_of_an_address_with_too_many_strangers_the_newest_are_closed(watched: Connections, clock: Clock, server: Server) -> None:
    clients = []
    for _ in range(STRANGERS_OF_AN_ADDRESS + 5):
        clients.append(server.connect()[0])
        clock.now += 0.01
        if len(clients) <= STRANGERS_OF_AN_ADDRESS:
            assert watched.look(server.port) == 0
    assert watched.look(server.port) == 0  # their first calls may be on their way
    clock.now += YOUNG_S
    assert watched.look(server.port) == 5
    assert [is_open(client) for client in clients].count(True) == STRANGERS_OF_AN_ADDRESS
    assert is_open(clients[0])


def test_strangers_of_one_machine_are_counted_together_whichever_of_its_addresses_they_have(tmp_path: Path) -> None:
    """A machine has a /64 network of IPv6 addresses."""
    clock, sockets = Clock(), [socket.socket() for _ in range(STRANGERS_OF_AN_ADDRESS + 5)]
    for each in sockets:
        (tmp_path / str(each.fileno())).touch()
    watched = Connections(lambda: True, clock, tmp_path, lambda number, port: (f"2001:db8::{number:x}", number))
    try:
        assert watched.look(1) == 0
        clock.now += YOUNG_S
        assert watched.look(1) == 5
    finally:
        for each in sockets:
            each.close()


def test_one_that_goes_on_with_wrong_tokens_is_closed_at_once(watched: Connections, server: Server) -> None:
    (wrong, peer), (other, _) = server.connect(), server.connect()
    watched.distrust(peer)
    assert watched.look(server.port) == 1
    assert not is_open(wrong) and is_open(other)


def test_a_server_without_tokens_knows_no_strangers(clock: Clock, server: Server) -> None:
    watched = Connections(lambda: False, clock)
    client, _ = server.connect()
    watched.look(server.port)
    clock.now += 100 * STRANGER_S
    assert watched.look(server.port) == 0
    assert is_open(client)


def test_an_address_has_a_bound_of_connections_with_tokens_too(
    watched: Connections, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_OF_AN_ADDRESS", 3)
    for _ in range(5):
        watched.trust(server.connect()[1])
    assert watched.look(server.port) == 2


def test_all_clients_of_an_address_may_connect_at_once(
    watched: Connections, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert YOUNG_OF_AN_ADDRESS > 300 > STRANGERS_OF_AN_ADDRESS
    monkeypatch.setattr(connections, "YOUNG_OF_AN_ADDRESS", 40)
    clients = [server.connect()[0] for _ in range(40)]
    assert watched.look(server.port) == 0
    newest = server.connect()[0]
    assert watched.look(server.port) == 1
    assert not is_open(newest) and all(map(is_open, clients))


class Accepted:
    """A connection from a client to a server, of which a test holds both ends."""

    def __init__(self, server: Server) -> None:
        self.port = server.port
        self.client, self.name = server.connect()
        self.server = server.accepted[-1]

    def arrives(self, sent: bytes) -> bool:
        """Return whether a message arrives without delay."""
        self.client.sendall(sent)
        self.server.setblocking(False)
        try:
            return self.server.recv(len(sent)) == sent
        except BlockingIOError:
            return False
        finally:
            self.server.settimeout(30)


@pytest.fixture
def accepted(server: Server) -> Accepted:
    return Accepted(server)


def test_a_connection_that_has_sent_much_is_paused_during_a_flood_until_its_token_is_known(
    watched: Connections, accepted: Accepted
) -> None:
    assert accepted.arrives(bytes(MANY_BYTES))
    watched.is_flooded = True
    assert watched.look(accepted.port) == 0, "it has sent little"
    assert accepted.arrives(b"1")
    watched.is_flooded = False
    assert watched.look(accepted.port) == 0
    watched.is_flooded = True
    assert watched.look(accepted.port) == 1
    assert not accepted.arrives(b"2")
    assert watched.look(accepted.port) == 0
    assert watched.admits(accepted.name, lambda: True)
    watched.look(accepted.port)
    assert accepted.server.recv(1) == b"2"  # sent again by the kernel: nothing is lost


def test_a_connection_that_floods_without_calls_is_paused_until_its_token_is_known(
    watched: Connections, clock: Clock, accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FLOOD_BYTES", 8 << 10)
    assert accepted.arrives(bytes(8 << 10))
    assert watched.look(accepted.port) == 0
    assert accepted.arrives(b"1")
    assert watched.look(accepted.port) == 0  # its first calls may wait for the event loop
    clock.now += YOUNG_S
    assert watched.look(accepted.port) == 1
    assert not accepted.arrives(b"2")
    assert watched.look(accepted.port) == 0
    assert watched.admits(accepted.name, lambda: True)
    watched.look(accepted.port)
    assert accepted.server.recv(1) == b"2"


def test_a_pause_ends_with_the_flood_unless_calls_were_dropped(watched: Connections, accepted: Accepted) -> None:
    watched.is_flooded = True
    assert accepted.arrives(bytes(MANY_BYTES + 1))
    assert watched.look(accepted.port) == 1
    watched.is_flooded = False
    watched.look(accepted.port)
    assert accepted.arrives(b"1")
    watched.is_flooded = True
    while watched.admits(accepted.name, lambda: False):
        pass
    watched.is_flooded = False
    assert watched.look(accepted.port) == 1
    assert watched.look(accepted.port) == 0
    assert not accepted.arrives(b"2")


def test_the_thread_outlives_a_lack_of_descriptors_when_a_flood_begins(tmp_path: Path) -> None:
    class Files(PosixPath):
        """A folder that can be listed at the second try only."""

        is_listed = threading.Event()
        tries = 0

        def iterdir(self) -> Any:
            self.tries += 1
            if self.tries == 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.is_listed.set()
            return iter(())

    watched = Connections(lambda: True, time.monotonic, open_files=Files(tmp_path))
    for _ in range(FLOOD_CALLS + 1):
        watched.admits("ipv4:192.0.2.7:4711", lambda: False)
    watched.start(1)
    assert Files.is_listed.wait(60)
    watched.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_new_connection_is_held_until_its_token_is_known(watched: Connections, host: str) -> None:
    watched.is_encrypted = True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, 0), family=family))
        port: int = listener.getsockname()[1]
        watched.hold_new(port, holds=True)
        clients, servers = [], []
        for _ in range(2):
            clients.append(stack.enter_context(socket.create_connection((host, port))))
            servers.append(stack.enter_context(listener.accept()[0]))
            servers[-1].settimeout(30)
            clients[-1].sendall(TLS_DATA + bytes(FIRST_BYTES - len(TLS_DATA)) + b"more")
            assert len(servers[-1].recv(2 * FIRST_BYTES)) == FIRST_BYTES
        peer = f"ipv6:[::1]:{clients[0].getsockname()[1]}" if ":" in host else f"ipv4:{host}:{clients[0].getsockname()[1]}"
        watched.look(port)
        watched.trust(peer)
        watched.look(port)
        clients[0].sendall(bytes(2 * FIRST_BYTES))
        assert receive(servers[0], 4 + 2 * FIRST_BYTES).startswith(b"more")
        watched.hold_new(port, holds=False)
        watched.look(port)
        clients[1].sendall(bytes(2 * FIRST_BYTES))
        assert receive(servers[1], 4 + 2 * FIRST_BYTES).startswith(b"more")


@pytest.mark.parametrize("kind", [22, 20], ids=["hello", "certificates"])
def test_the_handshake_of_a_new_connection_is_not_held(watched: Connections, server: Server, kind: int) -> None:
    """The kernel would take what it sends again in ever longer intervals: no chain of certificates would arrive in time."""
    watched.is_encrypted = True
    watched.hold_new(server.port, holds=True)
    client, _ = server.connect()
    flight = bytes([kind, 3, 3, 0, 1, 1]) + TLS_DATA + bytes(5000)
    client.sendall(flight)
    assert receive(server.accepted[-1], len(flight)) == flight
    assert sent_again(client) == 0
    watched.is_flooded = True
    assert watched.look(server.port) == 0
    client.sendall(bytes(NEXT_BYTES))  # the rest of a record
    assert receive(server.accepted[-1], NEXT_BYTES) == bytes(NEXT_BYTES)
    assert sent_again(client) == 0


@pytest.mark.parametrize("begins", [PREFACE + frame(SETTINGS, 0, 0, bytes(6)), frame(SETTINGS, ACK, 0, b""), b""])
def test_a_new_connection_that_is_held_receives_one_call(watched: Connections, server: Server, begins: bytes) -> None:
    call = frame(HEADERS, END_HEADERS, 1, bytes(700))
    watched.hold_new(server.port, holds=True)
    client, peer = server.connect()
    accepted = server.accepted[-1]
    client.sendall(begins + call + frame(HEADERS, END_HEADERS, 3, b"more") * 200)
    assert receive(accepted, len(begins + call)) == begins + call
    watched.look(server.port)
    watched.trust(peer)
    watched.look(server.port)
    assert receive(accepted, 200 * 13) == frame(HEADERS, END_HEADERS, 3, b"more") * 200
    assert sent_again(client) > 0


@pytest.mark.parametrize("data", [bytes([22, 3, 1, 2, 0]) + bytes(600), b"short", b"\xff" * 3000], ids=["TLS", "short", "noise"])
def test_what_is_no_http2_passes_a_held_connection(watched: Connections, server: Server, data: bytes) -> None:
    watched.hold_new(server.port, holds=True)
    client, _ = server.connect()
    client.sendall(data)
    assert receive(server.accepted[-1], len(data)) == data
    assert sent_again(client) == 0


def sent_again(client: socket.socket) -> int:
    """Return `tcpi_total_retrans` of <linux/tcp.h>: the number of segments that were sent again."""
    return int.from_bytes(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:], sys.byteorder)


def receive(server: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += server.recv(size - len(data))
    return data


def test_a_paused_connection_is_closed_after_a_while(watched: Connections, clock: Clock, accepted: Accepted) -> None:
    watched.is_flooded = True
    while watched.admits(accepted.name, lambda: False):
        pass
    assert watched.look(accepted.port) == 1
    clock.now += STRANGER_S + 1
    assert watched.look(accepted.port) == 1
    assert accepted.client.recv(1) == b""  # it learns of it, as the kernel takes its acknowledgements again


def test_calls_without_a_token_are_refused_at_a_bounded_rate(watched: Connections, clock: Clock, accepted: Accepted) -> None:
    assert all(watched.admits(f"ipv4:10.0.0.1:{number}", lambda: False) for number in range(REFUSALS))
    assert not watched.admits(accepted.name, lambda: False)
    clock.now += 1 / REFUSALS_A_SECOND + 1e-6
    assert not watched.admits(accepted.name, lambda: False)  # its other calls may be on their way
    assert watched.admits("ipv4:10.0.0.2:1", lambda: False)
    assert not watched.admits("ipv4:10.0.0.3:1", lambda: False)
    assert watched.dropped == 3
    assert watched.look(accepted.port) == 1
    assert accepted.client.recv(1) == b""


def test_calls_with_a_token_are_always_admitted(watched: Connections, accepted: Accepted) -> None:
    watched.is_flooded = True
    while watched.admits(accepted.name, lambda: False):
        pass
    dropped = watched.dropped
    assert watched.admits(accepted.name, lambda: True)  # a later connection from the same port
    assert all(watched.admits(accepted.name, lambda: False) for _ in range(10 * MAX_STREAMS))
    assert watched.dropped == dropped
    assert watched.look(accepted.port) == 0


def test_a_server_without_tokens_admits_all_calls(accepted: Accepted) -> None:
    watched = Connections(lambda: False, Clock())
    watched.is_flooded = True
    assert accepted.arrives(bytes(MANY_BYTES + 1))
    assert all(watched.admits(accepted.name, lambda: False) for _ in range(10 * REFUSALS))
    assert watched.look(accepted.port) == 0


def test_a_unix_socket_has_no_connections_to_pause(watched: Connections) -> None:
    watched.is_flooded = True
    assert all(watched.admits("unix:", lambda: False) for _ in range(10 * REFUSALS))


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.7:4711", "10.0.0.7"), ("ipv6:%5B2001:db8::1%5D:80", "2001:db8::1"), ("unix:", "unix"), ("unix:/a/b", "unix")],
)
def test_a_peer_has_an_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_failures_are_forgiven_then_cost_time_and_are_forgotten(clock: Clock) -> None:
    failures = Failures(clock)
    assert [failures.note("a") for _ in range(FREE + 3)][-4:] == [0, 1, 2, 4]
    assert max(failures.note("a") for _ in range(50)) == MAX_WAIT_S
    assert not failures.is_flood("a")
    for _ in range(FLOOD):
        failures.note("a")
    assert failures.is_flood("a") and not failures.is_flood("b")
    clock.now += FORGET_S + 1
    assert failures.note("a") == 0


def test_failures_of_one_machine_are_counted_together() -> None:
    failures = Failures(Clock())
    assert [failures.note(f"2001:db8::{number:x}") for number in range(FREE + 1)][-1] == 1
    assert failures.note("2001:db8:0:1::1") == 0


def test_the_table_of_failures_is_bounded() -> None:
    failures = Failures(Clock())
    for number in range(3 * MAX_ADDRESSES):
        failures.note(str(number))
    assert len(failures._failed) == MAX_ADDRESSES


def test_an_allowance_refills_up_to_its_size(clock: Clock) -> None:
    allowance = Allowance(3, 2.0, clock)
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
    clock.now += 0.5
    assert [allowance.take() for _ in range(2)] == [True, False]
    clock.now += 1000
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
