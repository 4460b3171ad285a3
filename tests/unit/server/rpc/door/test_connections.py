"""Which connections to a server are closed: real sockets of this process, and a clock in the test's hands."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etfarm.server.rpc.door import connections
from etfarm.server.rpc.door.connections import STRANGER_S, STRANGERS_OF_AN_ADDRESS, Connections
from etfarm.server.rpc.door.failures import FLOOD, FORGET_S, FREE, MAX_ADDRESSES, MAX_WAIT_S, Failures, address_of


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

    def connect(self) -> tuple[socket.socket, str]:
        """Return a client's socket, and its peer as gRPC names it."""
        client = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        client.settimeout(30)
        self._stack.enter_context(self._listener.accept()[0])
        return client, f"ipv4:127.0.0.1:{client.getsockname()[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack)


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_connection_that_is_trusted_during_a_look_stays_trusted(server: Server) -> None:
    clock = Clock()
    clients: list[socket.socket] = []

    class OpenFiles:
        """The descriptors of this process, to which one comes when all were listed for the first time."""

        def iterdir(self) -> Iterator[Path]:
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


def test_strangers_are_closed_after_a_while_and_others_never(server: Server) -> None:
    clock = Clock()
    watched = Connections(lambda: True, clock)
    (stranger, _), (known, peer) = server.connect(), server.connect()
    watched.trust(peer)
    assert watched.look(server.port) == 0
    clock.now += STRANGER_S + 1
    assert watched.look(server.port) == 1
    assert not is_open(stranger) and is_open(known)
    clock.now += 100 * STRANGER_S
    watched.look(server.port)
    assert is_open(known)


def test_of_an_address_with_too_many_strangers_the_newest_are_closed(server: Server) -> None:
    clock = Clock()
    watched = Connections(lambda: True, clock)
    clients = []
    for _ in range(STRANGERS_OF_AN_ADDRESS + 5):
        clients.append(server.connect()[0])
        clock.now += 0.01
        if len(clients) <= STRANGERS_OF_AN_ADDRESS:
            assert watched.look(server.port) == 0
    assert watched.look(server.port) == 5
    assert [is_open(client) for client in clients].count(True) == STRANGERS_OF_AN_ADDRESS
    assert is_open(clients[0])


def test_one_that_goes_on_with_wrong_tokens_is_closed_at_once(server: Server) -> None:
    watched = Connections(lambda: True, Clock())
    (wrong, peer), (other, _) = server.connect(), server.connect()
    watched.distrust(peer)
    assert watched.look(server.port) == 1
    assert not is_open(wrong) and is_open(other)


def test_the_kernel_is_asked_once_for_each_connection(server: Server) -> None:
    asked: list[int] = []

    def count(number: int, port: int) -> tuple[str, int] | None:
        asked.append(number)
        return connections.find_peer(number, port)

    watched = Connections(lambda: True, Clock(), find_peer=count)
    watched.trust(server.connect()[1])
    watched.look(server.port)
    asked.clear()
    watched.look(server.port)
    assert asked == []
    stranger, peer = server.connect()
    watched.distrust(peer)
    assert watched.look(server.port) == 1 and not is_open(stranger)


def test_a_server_without_tokens_knows_no_strangers(server: Server) -> None:
    clock = Clock()
    watched = Connections(lambda: False, clock)
    client, _ = server.connect()
    watched.look(server.port)
    clock.now += 100 * STRANGER_S
    assert watched.look(server.port) == 0
    assert is_open(client)


def test_an_address_has_a_bound_of_connections_with_tokens_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_OF_AN_ADDRESS", 3)
    watched = Connections(lambda: True, Clock())
    for _ in range(5):
        watched.trust(server.connect()[1])
    assert watched.look(server.port) == 2


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.7:4711", "10.0.0.7"), ("ipv6:%5B2001:db8::1%5D:80", "2001:db8::1"), ("unix:", "unix"), ("unix:/a/b", "unix")],
)
def test_a_peer_has_an_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_failures_are_forgiven_then_cost_time_and_are_forgotten() -> None:
    clock = Clock()
    failures = Failures(clock)
    assert [failures.note("a") for _ in range(FREE + 3)][-4:] == [0, 1, 2, 4]
    assert max(failures.note("a") for _ in range(50)) == MAX_WAIT_S
    assert not failures.is_flood("a")
    for _ in range(FLOOD):
        failures.note("a")
    assert failures.is_flood("a") and not failures.is_flood("b")
    clock.now += FORGET_S + 1
    assert failures.note("a") == 0


def test_the_table_of_failures_is_bounded() -> None:
    failures = Failures(Clock())
    for number in range(3 * MAX_ADDRESSES):
        failures.note(str(number))
    assert len(failures._failed) == MAX_ADDRESSES
