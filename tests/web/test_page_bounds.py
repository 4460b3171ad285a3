"""What one visitor can take of the page: streams, requests, and memory."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psutil
import pytest

from etfarm.client.web import connections, server
from etfarm.client.web.connections import Place
from etfarm.client.web.options import WebOptions
from etfarm.client.web.visitors import Visitors
from tests.support.farm import wait_until
from tests.support.web import Visit, WebFarm, csrf_of

pytestmark = pytest.mark.slow(reason="starts a server, an agent and the page")

MANY: Final = 64
"""Requests of the static file that a browser asks for and does not take: more than the system buffers."""


@dataclass
class Page:
    """A page in this process."""

    port: int
    visitors: Visitors

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def sign_in(self, token: str) -> Visit:
        visit = Visit(self.url)
        assert (await asyncio.to_thread(visit.sign_in, token)).status == 303
        return visit


@asynccontextmanager
async def page(options: WebOptions) -> AsyncIterator[Page]:
    listener = server.listen("127.0.0.1", 0)
    ready: asyncio.Future[Visitors] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(server.serve(options, listener, on_ready=ready.set_result, stop=stop))
    try:
        yield Page(int(listener.getsockname()[1]), await ready)
    finally:
        stop.set()
        await serving


async def begin(opened: Page, visit: Visit, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the head of a request with the visitor's cookies, and return its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
    cookies = "; ".join(f"{name}={value}" for name, value in visit.cookies.items())
    writer.write(f"{head}\r\nHost: 127.0.0.1:{opened.port}\r\nCookie: {cookies}\r\n\r\n".encode())
    return reader, writer


async def open_stream(opened: Page, visit: Visit) -> tuple[int, asyncio.StreamWriter]:
    """Open a stream of events; return its status and its connection."""
    reader, writer = await begin(opened, visit, "GET /live?topic=devices HTTP/1.1")
    return int((await reader.readline()).split()[1]), writer


async def test_streams_are_bounded_by_visitor_account_and_page(web: WebFarm) -> None:
    options = WebOptions(web.process.address, max_streams=4, max_streams_of_account=3, max_streams_of_visitor=2)
    async with page(options) as opened, asyncio.timeout(60):
        first, second = await opened.sign_in(web.tokens["viewer"]), await opened.sign_in(web.tokens["viewer"])
        third = await opened.sign_in(web.tokens["user"])
        statuses, writers = [], []
        for visit in (first, first, first, second, second, third, third):
            status, writer = await open_stream(opened, visit)
            statuses.append(status)
            writers.append(writer)
        assert statuses == [200, 200, 429, 200, 429, 200, 429]
        writers[0].close()
        assert await asyncio.to_thread(wait_until, lambda: opened.visitors.streams == 3)
        status, writer = await open_stream(opened, third)
        assert status == 200, "a closed stream leaves its place"
        for each in (*writers, writer):
            each.close()


async def test_requests_in_progress_are_bounded_by_visitor(web: WebFarm) -> None:
    async with page(WebOptions(web.process.address, max_requests_of_visitor=1)) as opened, asyncio.timeout(60):
        greedy, other = await opened.sign_in(web.tokens["user"]), await opened.sign_in(web.tokens["user"])
        token = csrf_of((await asyncio.to_thread(greedy.get, "/server")).text)
        head = f"POST /uploads?name=x.pte HTTP/1.1\r\nOrigin: {opened.url}\r\nX-CSRF-Token: {token}\r\nContent-Length: 9"
        _, writer = await begin(opened, greedy, f"{head}\r\nContent-Type: application/octet-stream")
        visitor = next(each for each in opened.visitors._visitors.values() if each.cookie in greedy.cookies.values())
        assert await asyncio.to_thread(wait_until, lambda: visitor.requests == 1)
        assert (await asyncio.to_thread(greedy.get, "/server")).status == 429
        assert (await asyncio.to_thread(other.get, "/server")).status == 200
        writer.close()
        assert await asyncio.to_thread(wait_until, lambda: visitor.requests == 0)
        assert (await asyncio.to_thread(greedy.get, "/server")).status == 200


async def test_a_browser_that_takes_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch, web: WebFarm) -> None:
    monkeypatch.setattr(connections, "PROGRESS_S", 0.3)
    async with page(WebOptions(web.process.address)) as opened, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.port, limit=1 << 10)
        request = f"GET /static/x/vendor/htmx.min.js HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\n\r\n".encode()
        writer.write(request * MANY * 4)
        own = psutil.Process()

        def is_cut() -> bool:
            return not any(
                each.laddr.port == opened.port and each.status == psutil.CONN_ESTABLISHED for each in own.net_connections("tcp")
            )

        assert await asyncio.to_thread(wait_until, is_cut)
        received = 0
        with suppress(ConnectionResetError):
            while data := await reader.read(1 << 16):
                received += len(data)
        assert 0 < received < MANY * 4 * 51_000
        writer.close()


PROGRESS_S: Final = 1.0
LEAST_BYTES: Final = 10_000
"""Bytes that a browser must take or send in `PROGRESS_S`, in tests."""


@pytest.mark.parametrize(("taken_bytes", "is_cut"), [(4_000, False), (100, True)], ids=["slow", "too slow"])
async def test_a_browser_takes_at_least_a_rate(
    monkeypatch: pytest.MonkeyPatch, web: WebFarm, taken_bytes: int, is_cut: bool
) -> None:
    monkeypatch.setattr(connections, "PROGRESS_S", PROGRESS_S)
    monkeypatch.setattr(Place, "least_bytes", property(lambda place: LEAST_BYTES, lambda place, value: None), raising=False)
    async with page(WebOptions(web.process.address)) as opened, asyncio.timeout(60):
        loop = asyncio.get_running_loop()
        with socket.socket() as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            browser.setblocking(False)
            await loop.sock_connect(browser, ("127.0.0.1", opened.port))
            request = f"GET /static/x/vendor/htmx.min.js HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\n\r\n".encode()
            await loop.sock_sendall(browser, request * MANY * 4)
            until_s = loop.time() + 6 * PROGRESS_S
            received = 0
            with suppress(ConnectionResetError):
                while loop.time() < until_s:
                    with suppress(BlockingIOError):
                        received += len(browser.recv(taken_bytes))
                    await asyncio.sleep(0.1)
            assert received
            ports = {
                each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED
            }
            assert (opened.port not in ports) is is_cut


@pytest.mark.parametrize(("sent_bytes", "status"), [(4_000, b"403"), (100, b"")], ids=["slow", "too slow"])
async def test_a_browser_sends_at_least_a_rate(
    monkeypatch: pytest.MonkeyPatch, web: WebFarm, sent_bytes: int, status: bytes
) -> None:
    monkeypatch.setattr(connections, "PROGRESS_S", PROGRESS_S)
    monkeypatch.setattr(connections, "LEAST_BYTES", LEAST_BYTES)
    async with page(WebOptions(web.process.address)) as opened, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
        head = f"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1:{opened.port}\r\nOrigin: {opened.url}\r\nContent-Length: {60_000}\r\n"
        writer.write(f"{head}Content-Type: application/x-www-form-urlencoded\r\n\r\n".encode())
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(60_000 // sent_bytes):
                writer.write(b"x" * sent_bytes)
                await writer.drain()
                await asyncio.sleep(0.2)
                if reader.at_eof():
                    break
        answer = b""
        with suppress(ConnectionResetError):
            answer = await reader.read(100)
        assert answer[9:12] == status
        writer.close()


_LINE, _HEADER = "The request line must be METHOD TARGET HTTP/1.1.", "A header must be one line NAME: VALUE."
_HOST, _SIZE = "The request must have one Host header.", "A body needs its Content-Length; Transfer-Encoding is not supported."
MALFORMED: Final = {
    "no line": ("nonsense\r\n\r\n", 400, _LINE),
    "TLS": ("\x16\x03\x01\x02\x00\x01", 400, _LINE),
    "odd target": ("GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n", 400, _LINE),
    "odd header": ("GET / HTTP/1.1\r\nHost: a\r\nsecret\x00: <b>\r\n\r\n", 400, _HEADER),
    "continued header": ("GET / HTTP/1.1\r\n secret\r\nHost: a\r\n\r\n", 400, _HEADER),
    "no host": ("GET / HTTP/1.1\r\n\r\n", 400, _HOST),
    "two hosts": ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, _HOST),
    "odd size": ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1e3\r\n\r\n", 400, "at most 20 digits"),
    "long size": (f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {'9' * 21}\r\n\r\n", 400, "at most 20 digits"),
    "two sizes": ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "that differ"),
    "chunks": ("POST /sign-in HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 411, _SIZE),
    "gzip": ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501, _SIZE),
    "long line": (f"GET /{'x' * 40_000}", 431, "have more than 32 KiB"),
    "long headers": (f"GET / HTTP/1.1\r\nHost: a\r\nX: {'x' * 40_000}", 431, "have more than 32 KiB"),
}


async def send(opened: Page, request: str) -> tuple[int, str]:
    """Send a request, and return the status and the text of all that the page answers until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
    writer.write(request.encode("latin-1"))
    head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), text


async def test_each_malformed_request_gets_its_own_answer(web: WebFarm) -> None:
    async with page(WebOptions(web.process.address)) as opened, asyncio.timeout(60):
        for name, (request, status, sentence) in MALFORMED.items():
            answered, text = await send(opened, request)
            assert answered == status and sentence in text, (name, answered, text)
            assert len(text) < 100 and "secret" not in text, name


async def test_bytes_after_the_last_request_do_not_spoil_its_answer(web: WebFarm, caplog: pytest.LogCaptureFixture) -> None:
    async with page(WebOptions(web.process.address)) as opened, asyncio.timeout(60):
        visit = await opened.sign_in(web.tokens["user"])
        reader, writer = await begin(opened, visit, "GET /live?topic=devices HTTP/1.1\r\nConnection: close")
        assert (await reader.readline()).split()[1] == b"200"
        writer.write(b"nonsense")
        await writer.drain()
        assert (await asyncio.to_thread(visit.get, "/server")).status == 200, "the page has had the bytes before this request"
        # gRPC's poller logs that another thread has read its byte, as asyncio's.
        errors = [
            each for each in caplog.records if each.levelname == "ERROR" and "PollerCompletionQueue" not in each.getMessage()
        ]
        assert opened.visitors.streams == 1 and not errors
        writer.close()


def test_requests_leave_no_memory_behind(web: WebFarm) -> None:
    assert web.page is not None
    process = psutil.Process(web.page.pid)
    visit = Visit(web.url)
    visit.sign_in(web.tokens["user"])
    form = csrf_of(visit.get("/server").text)
    addresses = (f"127.0.1.{number}" for number in range(1, 255))

    def harass(rounds: int) -> int:
        for _ in range(rounds):
            junk = secrets.token_hex(2_000)
            for path in (
                "/",
                "/search?q=",
                "/live?topic=",
                "/live?topic=device:",
                "/jobs/",
                "/devices?selector=name=",
                "/compare?report=",
            ):
                assert visit.get(path + junk).status in (200, 400, 404)
            assert visit.post(f"/uploads?name={junk[:50]}.exe", {"csrf_token": form}).status == 400
            # From an address of its own: the eleventh refusal of one is a second late, and so is each further one.
            assert Visit(web.url, source=next(addresses)).sign_in(junk).status == 401
        return process.memory_info().rss

    before = harass(40)
    assert harass(120) - before < 12 << 20


def test_a_large_form_is_refused(web: WebFarm) -> None:
    visit = Visit(web.url)
    assert visit.post("/sign-in", {"token": "x" * (65 << 10)}).status == 413
