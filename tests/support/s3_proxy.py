"""A real HTTP proxy in front of an S3 server, with one verb for each fault of the server or of the way to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler
from typing import Final

from tests.support.receivers import serving_http

_CHUNK: Final = 64 << 10
_NOT_FORWARDED: Final = frozenset({"connection", "transfer-encoding", "keep-alive"})


class S3Proxy:
    """Forwards requests, except those that a fault is for. A fault is for the next requests of a method, as many as are named."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._faults: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._flowing = threading.Event()
        self._flowing.set()
        self.requests: list[str] = []
        """Methods and paths of the requests so far."""
        self.answered: list[str] = []
        """Those of them that were forwarded, in the order of their answers."""
        self.address = ""

    def answer_503(self, method: str, times: int = 1 << 30) -> None:
        """Answer with "503 Slow Down"."""
        self._set("503", method, times)

    def refuse_all(self) -> None:
        """Answer every request with 503."""
        for method in ("GET", "PUT", "HEAD", "POST", "DELETE"):
            self.answer_503(method)

    def cut(self, method: str, times: int = 1 << 30) -> None:
        """Break the connection in the middle of the body: of what is sent by PUT, of the answer otherwise."""
        self._set("cut", method, times)

    def corrupt(self, times: int = 1 << 30) -> None:
        """Flip a bit of what GET returns."""
        self._set("corrupt", "GET", times)

    def deny_missing(self) -> None:
        """Answer 403 where an object is missing, as S3 does if the credentials may not list the whole bucket."""
        self._set("deny", "GET", 1 << 30)
        self._set("deny", "HEAD", 1 << 30)

    def stall(self) -> None:
        """Let every request wait."""
        self._flowing.clear()

    def heal(self) -> None:
        """Forward everything."""
        with self._lock:
            self._faults.clear()
        self._flowing.set()

    def count(self, method: str) -> int:
        """Return the number of requests of a method so far."""
        return _count(self.requests, method)

    def wait_for(self, seen: list[str], method: str, count: int) -> None:
        """Block until `requests` or `answered` has so many of a method."""
        with self._changed:
            reached = self._changed.wait_for(lambda: _count(seen, method) >= count, timeout=60)
        assert reached, seen

    def _note(self, seen: list[str], request: BaseHTTPRequestHandler) -> None:
        with self._changed:
            seen.append(f"{request.command} {request.path}")
            self._changed.notify_all()

    def _set(self, kind: str, method: str, times: int) -> None:
        with self._lock:
            self._faults[kind, method] = times

    def _take(self, kind: str, method: str) -> bool:
        with self._lock:
            left = self._faults.get((kind, method), 0)
            if left:
                self._faults[kind, method] = left - 1
            return left > 0

    @contextmanager
    def running(self) -> Iterator[S3Proxy]:
        """Forward requests until the end of the block."""
        with serving_http(self._handle) as port:
            self.address = f"127.0.0.1:{port}"
            try:
                yield self
            finally:
                self.heal()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        method, length = request.command, int(request.headers.get("content-length", 0))
        self._note(self.requests, request)
        self._flowing.wait()
        if self._take("cut", method) if method == "PUT" else False:
            request.rfile.read(length // 2)
            self._break(request)
            return
        body = request.rfile.read(length)
        if self._take("503", method):
            answer = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            request.send_response(503)
            request.send_header("content-length", str(len(answer)))
            request.end_headers()
            if method != "HEAD":
                request.wfile.write(answer)
            return
        connection = HTTPConnection(self._target, timeout=30)
        try:
            connection.request(method, request.path, body, dict(request.headers.items()))
            self._answer(request, connection.getresponse())
            self._note(self.answered, request)
        except ConnectionError:  # the client has ended the request
            self._break(request)
        finally:
            connection.close()

    def _answer(self, request: BaseHTTPRequestHandler, response: HTTPResponse) -> None:
        method, data = request.command, response.read()
        if response.status == 404 and "list-type" not in request.path and self._take("deny", method):
            response.status = 403
            data = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>" if method == "GET" else b""
            response.headers.replace_header("content-length", str(len(data)))
        request.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _NOT_FORWARDED and name.lower() != "content-length":
                request.send_header(name, value)
        length = response.getheader("content-length") if method == "HEAD" else str(len(data))
        request.send_header("content-length", length or "0")
        request.end_headers()
        if method == "GET" and response.status in (200, 206) and "list-type" not in request.path and data:
            if self._take("corrupt", method):
                data = bytes([data[0] ^ 1]) + data[1:]
            if self._take("cut", method):
                request.wfile.write(data[: len(data) // 2])
                self._break(request)
                return
        request.wfile.write(data)

    def _break(self, request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True


def _count(requests: list[str], method: str) -> int:
    return sum(request.startswith(f"{method} ") for request in requests)


@contextmanager
def proxy_to(target: str) -> Iterator[S3Proxy]:
    """Yield a running proxy to an S3 server's address."""
    with S3Proxy(target).running() as proxy:
        yield proxy
