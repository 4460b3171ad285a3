"""Receivers of notices: real HTTP and HTTPS servers on loopback, friendly and hostile, each in threads of its own."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

STEP_S = 0.02
"""Pause between two bytes of a receiver that drips."""


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A running server."""

    port: int
    scheme: str = "http"
    requests: Queue[Received] = field(default_factory=Queue)

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"


Answer = Callable[[BaseHTTPRequestHandler], None]
"""Function that answers a request whose body has been read."""


def status(code: int, text: str = "ok", **headers: str) -> Answer:
    """Answer with a status and a text."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        body = text.encode()
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        with suppress(OSError):
            request.wfile.write(body)

    return answer


def statuses(*codes: int) -> Answer:
    """Answer with one status after the other; the last one stays."""
    left = list(codes)
    lock = threading.Lock()

    def answer(request: BaseHTTPRequestHandler) -> None:
        with lock:
            code = left.pop(0) if len(left) > 1 else left[0]
        status(code)(request)

    return answer


@contextmanager
def serving_http(handle: Answer, identity: ssl.SSLContext | None = None, protocol: str = "HTTP/1.1") -> Iterator[int]:
    """Let a function answer requests of every method, whose bodies it reads, in threads; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_GET(self) -> None:
            handle(self)

        do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass  # pytest's output is not its log

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that hangs up, or refuses the certificate

    server = Server(("127.0.0.1", 0), Handler)
    if identity is not None:
        server.socket = identity.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": STEP_S}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def receiver(answer: Answer | None = None, identity: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Serve requests; those that arrive are put into `requests` before they are answered."""
    respond, requests = answer or status(200), Queue[Received]()

    def take(request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        requests.put(Received(request.path, dict(request.headers.items()), body))
        respond(request)

    with serving_http(take, identity, "HTTP/1.0") as port:
        yield Receiver(port, "http" if identity is None else "https", requests)


@contextmanager
def raw(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[Receiver]:
    """Accept connections and let `talk` do with each what no server does; its event is set at the end."""
    end = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # closed
            connections.append(connection)
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        with suppress(OSError):
            talk(connection, end)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Receiver(listening.getsockname()[1])
    finally:
        end.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connection in connections:
            connection.close()
        thread.join()


def hang(connection: socket.socket, end: threading.Event) -> None:
    """Read, and never answer."""
    end.wait()


def drip(connection: socket.socket, end: threading.Event) -> None:
    """Send a header without end, a byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not end.wait(STEP_S):
        connection.sendall(b"a")


def flood(connection: socket.socket, end: threading.Event) -> None:
    """Answer with a body without end."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while not end.is_set():
        connection.sendall(b"x" * 65536)


def flood_of_headers(connection: socket.socket, end: threading.Event) -> None:
    """Answer with headers without end."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not end.is_set():
        connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")


def babble(connection: socket.socket, end: threading.Event) -> None:
    """Answer in another protocol."""
    connection.recv(65536)
    connection.sendall(b"220 mail.example ESMTP\r\n")
    connection.close()
