"""Crowds at the page: many idle, slow or broken connections of some addresses do not keep others out."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
import pytest
import trustme

from etfarm.client.admin import artifacts
from etfarm.client.aio import AsyncFarm
from tests.support.farm import Daemon, wait_until
from tests.support.web import Visit, WebFarm, listening_port, running_page

pytestmark = pytest.mark.slow(reason="starts a server, an agent and the page")

IDLE: Final = 1_150
"""Idle connections: more than the page keeps without a sign-in."""
FLOOD_S: Final = 4.0
FLOODERS: Final = 4
DOWNLOADS_OF_A_TOKEN: Final = 4
LARGE_BYTES: Final = 24 << 20
SOON_S: Final = 10.0
"""Much less than the 30 s after which idle connections end by themselves."""


@pytest.fixture
def page(web: WebFarm, tmp_path: Path) -> Iterator[tuple[Daemon, str]]:
    """A page of its own."""
    with running_page(web.process.address, tmp_path / "web.log", executes=True) as (daemon, url):
        yield daemon, url


def cookies_of(visit: Visit) -> str:
    return "; ".join(f"{name}={value}" for name, value in visit.cookies.items())


def connect(url: str, source: str, sent: bytes = b"") -> socket.socket:
    """Open a connection from an address of loopback, and send something."""
    parts = urlsplit(url)
    opened = socket.create_connection((parts.hostname, parts.port), timeout=30, source_address=(source, 0))
    opened.sendall(sent)
    return opened


@contextmanager
def crowd(url: str, count: int, sources: list[str], sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Keep connections open that send the same and nothing more."""
    connections: list[socket.socket] = []
    try:
        for index in range(count):
            with suppress(OSError):  # the page ends the oldest ones meanwhile
                connections.append(connect(url, sources[index % len(sources)], sent))
        yield connections
    finally:
        for each in connections:
            each.close()


def sign_in_s(url: str, token: str, source: str) -> float:
    """Sign in from an address and open a page; return the seconds that it takes."""
    began_s = time.monotonic()
    visit = Visit(url, source=source)
    assert visit.sign_in(token).status == 303
    assert visit.get("/server").status == 200
    return time.monotonic() - began_s


HALF_HEAD: Final = b"GET /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"
HALF_FORM: Final = (
    b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\nContent-Length: 99\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken="
)
MANY_ADDRESSES: Final = [f"127.0.1.{number}" for number in range(1, 41)]


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_FORM], ids=["silent", "half a head", "half a form"])
@pytest.mark.parametrize("sources", [["127.0.0.2"], MANY_ADDRESSES], ids=["one address", "40 addresses"])
def test_idle_connections_keep_nobody_out(web: WebFarm, page: tuple[Daemon, str], sources: list[str], sent: bytes) -> None:
    _, url = page
    member = Visit(url)
    assert member.sign_in(web.tokens["viewer"]).status == 303
    request = f"GET /server HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookies_of(member)}\r\n\r\n".encode()
    with connect(url, sources[0], request) as kept, ExitStack() as stack:
        assert kept.recv(12) == b"HTTP/1.1 200"
        stack.enter_context(crowd(url, IDLE, sources, sent))
        assert sign_in_s(url, web.tokens["user"], "127.0.0.3") < SOON_S, "an address outside of the crowd"
        assert sign_in_s(url, web.tokens["user"], sources[0]) < SOON_S, "a neighbour of the crowd"
        while b"</html>" not in kept.recv(1 << 16):
            pass
        kept.sendall(request)
        assert kept.recv(12) == b"HTTP/1.1 200", "a connection of the signed-in outlives the crowd"


def test_a_crowd_behind_an_unknown_proxy_keeps_nobody_out(web: WebFarm, tmp_path: Path) -> None:
    with running_page(web.process.address, tmp_path / "web.log", "--public-url", "http://127.0.0.1") as (daemon, _):
        url = f"http://127.0.0.1:{listening_port(daemon.pid)}"
        with crowd(url, IDLE, ["127.0.0.1"]):
            assert sign_in_s(url, web.tokens["user"], "127.0.0.1") < SOON_S


def test_connections_without_a_handshake_keep_nobody_out(web: WebFarm, tmp_path: Path) -> None:
    authority = trustme.CA()
    (tmp_path / "both.pem").touch(mode=0o600)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    tls = ("--tls-cert", str(tmp_path / "both.pem"), "--tls-key", str(tmp_path / "both.pem"))
    with running_page(web.process.address, tmp_path / "web.log", *tls) as (_, url), crowd(url, IDLE, MANY_ADDRESSES):
        for source in ("127.0.0.3", MANY_ADDRESSES[0]):
            began_s = time.monotonic()
            visit = Visit(url, context=context, source=source)
            assert visit.sign_in(web.tokens["user"]).status == 303
            assert time.monotonic() - began_s < SOON_S


def flood(url: str, source: str, sent: bytes, until_s: float, takes: bool) -> None:
    """Open connections as fast as possible, send something over each, and reset it; or take the answers first."""
    os.nice(10)
    reset = struct.pack("ii", 1, 0)
    while time.monotonic() < until_s:
        with suppress(OSError), connect(url, source, sent) as opened:
            if takes:
                opened.settimeout(1.0)
                while time.monotonic() < until_s and opened.recv(1 << 16):
                    opened.sendall(sent)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)


GET: Final = b"GET /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "takes"),
    [
        (b"", False),
        (GET, False),
        (GET * 100, False),
        (GET * 100, True),
        (b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n" * 50, True),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", False),
        (b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000, True),
    ],
    ids=["connect and reset", "request and reset", "pipeline and reset", "pipelines", "refused forms", "no HTTP", "small chunks"],
)
def test_floods_of_an_address_keep_nobody_out(web: WebFarm, page: tuple[Daemon, str], sent: bytes, takes: bool) -> None:
    daemon, url = page
    sign_in_s(url, web.tokens["user"], "127.0.0.3")
    process = psutil.Process(daemon.pid)
    before_bytes = process.memory_info().rss
    with ProcessPoolExecutor(FLOODERS, multiprocessing.get_context("spawn")) as processes:
        list(processes.map(abs, range(FLOODERS)))  # they have started
        until_s = time.monotonic() + FLOOD_S
        floods = [processes.submit(flood, url, "127.0.0.2", sent, until_s, takes) for _ in range(FLOODERS)]
        waits = []
        while time.monotonic() < until_s:
            waits.append(sign_in_s(url, web.tokens["user"], "127.0.0.3"))
        for each in floods:
            each.result()
    print(f"{len(waits)} sign-ins, the slowest in {max(waits):.2f} s; {process.memory_info().rss - before_bytes >> 10} KiB more")
    assert max(waits) < SOON_S
    assert wait_until(lambda: len(process.net_connections("tcp")) < 100)
    assert process.memory_info().rss - before_bytes < 48 << 20
    assert daemon.log.stat().st_size < 32 << 10, "a flood does not fill the log"


@pytest.fixture(scope="module")
def artifact(web: WebFarm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an artifact that is larger than what the system buffers of a download."""
    file = tmp_path_factory.mktemp("artifact") / "large.bin"
    file.write_bytes(bytes(LARGE_BYTES))

    async def put() -> str:
        async with AsyncFarm(web.process.address, token=web.tokens["user"]) as farm:
            stored, _ = await artifacts.put(farm._connection.stubs, file)
            return stored.digest

    return asyncio.run(put())


def test_one_token_does_not_take_all_downloads(web: WebFarm, page: tuple[Daemon, str], artifact: str) -> None:
    _, url = page
    slow, other = Visit(url), Visit(url)
    slow.sign_in(web.tokens["user"])
    other.sign_in(web.tokens["viewer"])
    request = f"GET /artifacts/{artifact}/content HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with crowd(url, 12, ["127.0.0.2"], f"{request}Cookie: {cookies_of(slow)}\r\n\r\n".encode()) as readers:
        for reader in readers[:DOWNLOADS_OF_A_TOKEN]:
            assert reader.recv(12) == b"HTTP/1.1 200"
        began_s = time.monotonic()
        assert other.get(f"/artifacts/{artifact}/content").status == 200
        assert time.monotonic() - began_s < SOON_S
        readers[0].close()
        waiting = readers[DOWNLOADS_OF_A_TOKEN]
        waiting.settimeout(SOON_S)
        assert waiting.recv(12) == b"HTTP/1.1 200", "the next one of the same token, in turn"
