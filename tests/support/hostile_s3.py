"""A small S3 server that stores objects in memory, and lies where a test has it lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from etfarm.server.artifacts.s3.location import BucketLocation, Credentials
from tests.support.receivers import serving_http

_CREDENTIALS: Final = Credentials("farm", "secret-of-the-farm")
_BUCKET: Final = "etfarm-tests"
_LIST: Final = "list-type"
_MAX_KEYS: Final = 1000
FLOOD: Final = b"x" * (1 << 20)

Lie = Callable[[BaseHTTPRequestHandler], object]
"""Function that answers a request instead of the server. It returns, or the client ends the connection."""


class HostileS3:
    """A server whose objects, keys and answers a test may replace."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        """The bytes by key."""
        self.lies: dict[str, Lie] = {}
        """Answers by method, or `LIST`; the others are honest."""
        self.requests: list[str] = []
        """Methods and paths of the requests so far."""
        self.address = ""
        self.stopped = threading.Event()
        self.flooded_bytes = 0
        """Number of bytes of floods that clients have received, or that are on their way to them."""

    def location(self, prefix: str = "") -> BucketLocation:
        """Return the server's only bucket."""
        return BucketLocation(_BUCKET, prefix, f"http://{self.address}", "us-east-1", _CREDENTIALS)

    def flood(self, request: BaseHTTPRequestHandler, most_bytes: int, piece: bytes = FLOOD) -> None:
        """Send a body until the client has had enough, at most so many bytes."""
        sent_bytes = 0
        with suppress(OSError):
            while sent_bytes < most_bytes and not self.stopped.is_set():
                request.wfile.write(piece)
                sent_bytes += len(piece)
                self.flooded_bytes += len(piece)
        request.close_connection = True

    @contextmanager
    def running(self) -> Iterator[HostileS3]:
        """Serve until the end of the block."""
        with serving_http(self._serve) as port:
            self.address = f"127.0.0.1:{port}"
            try:
                yield self
            finally:
                self.stopped.set()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        method, parts = request.command, urlsplit(request.path)
        request.sent = request.rfile.read(int(request.headers.get("content-length", 0)))  # type: ignore[attr-defined]
        query, key = parse_qs(parts.query), unquote(parts.path).removeprefix(f"/{_BUCKET}").removeprefix("/")
        self.requests.append(f"{method} {request.path}")
        lie = self.lies.get("LIST" if _LIST in query else method)
        is_of_checks = key.startswith("probe") or query.get("prefix", [""])[0].startswith(("probe", "owner"))
        if lie is not None and not is_of_checks:
            lie(request)
        else:
            self.answer(request, key, query)

    def answer(self, request: BaseHTTPRequestHandler, key: str, query: dict[str, list[str]]) -> None:
        """Answer as S3 does."""
        match request.command:
            case "PUT":
                source = (
                    unquote(request.headers.get("x-amz-copy-source", "")).removeprefix(f"/{_BUCKET}/").removeprefix(f"{_BUCKET}/")
                )
                self.objects[key] = self.objects[source] if source else request.sent  # type: ignore[attr-defined]
                body = b"<CopyObjectResult><ETag>1</ETag></CopyObjectResult>" if source else b""
                reply(request, 200, body, ETag='"1"')
            case "DELETE":
                self.objects.pop(key, None)
                reply(request, 204)
            case "GET" if _LIST in query:
                after = query.get("start-after", query.get("continuation-token", [""]))[0]
                keys = sorted(each for each in self.objects if each.startswith(query.get("prefix", [""])[0]) and each > after)
                reply(request, 200, listing([(each, len(self.objects[each])) for each in keys], _MAX_KEYS))
            case "GET" | "HEAD" if key in self.objects:
                self._send(request, self.objects[key])
            case _:
                reply(request, 404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _send(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        first, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
        if not first:
            return reply(request, 200, data, **facts())
        start, end = int(first), min(int(last or len(data)), len(data) - 1)
        if start >= len(data):
            return reply(request, 416, b"<Error><Code>InvalidRange</Code></Error>")
        where = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        return reply(request, 206, data[start : end + 1], **where, **facts())


def facts() -> dict[str, str]:
    """Return the headers of an object besides its size."""
    return {"ETag": '"1"', "Last-Modified": "Fri, 27 Nov 2026 09:00:00 GMT"}


def listing(objects: Sequence[tuple[str, int | str]], most: int = 1 << 30, *, old: bool = False) -> bytes:
    """Return the answer to a listing: its first objects (key, size), and whether there are more."""
    at = datetime.now(UTC) - timedelta(days=30 * old)
    rows = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{at:%Y-%m-%dT%H:%M:%S}Z</LastModified><ETag>1</ETag>"
        f"<Size>{size}</Size></Contents>"
        for key, size in objects[:most]
    )
    more = f"<NextContinuationToken>{escape(objects[most - 1][0])}</NextContinuationToken>" if len(objects) > most else ""
    truncated = "true" if more else "false"
    return f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{rows}{more}</ListBucketResult>".encode()


def reply(request: BaseHTTPRequestHandler, code: int, body: bytes = b"", /, **headers: str) -> None:
    """Answer with a status, headers and a body; those of a HEAD have its length only."""
    request.send_response_only(code)
    for name, value in ({"Content-Length": str(len(body))} | headers).items():
        if value:
            request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        with suppress(OSError):
            request.wfile.write(body)


@contextmanager
def hostile_s3() -> Iterator[HostileS3]:
    """Yield a running server."""
    with HostileS3().running() as server:
        yield server
