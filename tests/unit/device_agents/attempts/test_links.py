"""Links to S3, against real HTTP servers: exact bytes or an error, no redirects, no proxies, nothing but https or loopback."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
import trustme

from etfarm.device_agents.attempts.links import AVOID_S, Links, parse
from etfarm.v1.artifact_pb2 import ArtifactLink
from etfarm.wire.chunks import CHUNK_BYTES, LinkFailed, artifact_of
from tests.support.receivers import Answer, babble, drip, flood, flood_of_headers, hang, raw, receiver, status

DATA = os.urandom(2 * CHUNK_BYTES + 777)
ARTIFACT = artifact_of(DATA)
SECRET = "/bucket/key?X-Amz-Signature=0123456789abcdef"


def s3(data: bytes = DATA, **headers: str) -> Answer:
    """Answer as S3 does, with further headers."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        request.send_response(206 if "Range" in request.headers else 200)
        default = {"Content-Length": str(len(data) - start)}
        if "Range" in request.headers:
            default["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        for name, value in (default | {name.replace("_", "-"): value for name, value in headers.items()}).items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data[start:])

    return answer


async def read(url: str, offset: int = 0, certificates: bytes = b"", links: Links | None = None) -> bytes:
    links = links or Links(answer_s=5.0, piece_s=5.0)
    return b"".join([piece async for piece in links.follow(ArtifactLink(url=url, certificates=certificates), ARTIFACT, offset)])


async def failure(url: str, offset: int = 0, certificates: bytes = b"", links: Links | None = None) -> str:
    with pytest.raises(LinkFailed) as failed:
        await read(url, offset, certificates, links)
    assert "Signature" not in str(failed.value) and "0123456789abcdef" not in str(failed.value)
    return str(failed.value)


@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES, len(DATA) - 1])
async def test_the_bytes_from_an_offset_on_arrive(offset: int) -> None:
    with receiver(s3()) as server:
        assert await read(server.url(SECRET), offset) == DATA[offset:]
        request = server.requests.get_nowait()
        assert request.path == SECRET
        assert request.headers["Host"] == f"127.0.0.1:{server.port}"  # it is signed
        assert request.headers.get("Range") == (f"bytes={offset}-" if offset else None)
        assert "Authorization" not in request.headers


@pytest.mark.parametrize(
    ("answer", "offset", "why"),
    [
        (status(403), 0, "it answers 403"),
        (status(404), 0, "it answers 404"),
        (status(503), 5, "it answers 503"),
        (status(200, "everything"), 5, "it answers 200"),
        (s3(DATA[:-1]), 0, "it sends another number of bytes"),
        (s3(DATA + b"more"), 0, "it sends another number of bytes"),
        (s3(Transfer_Encoding="chunked"), 0, "it sends another number of bytes"),
        (s3(Content_Range="bytes 0-9/10"), 5, "it sends another part"),
    ],
)
async def test_an_answer_with_anything_else_is_refused(answer: Answer, offset: int, why: str) -> None:
    with receiver(answer) as server:
        assert await failure(server.url(SECRET), offset) == why


async def test_a_redirect_is_not_followed() -> None:
    with receiver(s3()) as other, receiver(status(302, Location=other.url("/secret"))) as server:
        assert await failure(server.url(SECRET)) == "it answers 302"
        assert other.requests.empty()


async def test_proxy_variables_are_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver(status(200)) as proxy, receiver(s3()) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        assert await read(server.url(SECRET)) == DATA
        assert proxy.requests.empty()


def cut_in_the_middle(connection: socket.socket, end: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\n\r\n".encode() + DATA[: CHUNK_BYTES + 5])
    connection.close()


def trickle(connection: socket.socket, end: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\n\r\n".encode())
    while not end.wait(0.02):
        connection.sendall(b"x")


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (hang, "it does not answer in time"),
        (drip, "it does not answer in time"),
        (trickle, "it does not answer in time"),
        (flood, "it sends another number of bytes"),
        (flood_of_headers, "it cut the connection"),
        (babble, "it cut the connection"),
        (cut_in_the_middle, "it cut the connection"),
    ],
)
async def test_a_download_from_a_hostile_server_ends(talk: Callable[[socket.socket, threading.Event], None], why: str) -> None:
    with raw(talk) as server:
        assert await failure(server.url(SECRET), links=Links(answer_s=0.5, piece_s=0.5)) == why


async def test_what_arrived_before_the_connection_was_cut_is_kept() -> None:
    pieces = []
    with raw(cut_in_the_middle) as server, pytest.raises(LinkFailed):
        async for piece in Links().follow(ArtifactLink(url=server.url(SECRET)), ARTIFACT, 0):
            pieces.append(piece)
    assert b"".join(pieces) == DATA[:CHUNK_BYTES]


async def test_a_server_that_is_away_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}{SECRET}"
    assert "refused" in (await failure(url)).lower() or "connect" in (await failure(url)).lower()


@pytest.fixture
def authority() -> Iterator[trustme.CA]:
    yield trustme.CA()


async def test_tls_is_verified_with_the_certificates_of_the_link(authority: trustme.CA) -> None:
    identity = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(identity)
    with receiver(s3(), identity) as server:
        assert await read(server.url(SECRET), certificates=authority.cert_pem.bytes()) == DATA
        assert server.requests.get_nowait().path == SECRET
        await failure(server.url(SECRET))
        await failure(server.url(SECRET, host="localhost"), certificates=authority.cert_pem.bytes())
        await failure(server.url(SECRET), certificates=trustme.CA().cert_pem.bytes())
        for unreadable in (b"no certificate", b"\xff\xfe"):
            why = await failure(server.url(SECRET), certificates=unreadable)
            assert why == "its certificates cannot be read"
        await failure(server.url(SECRET), certificates=authority.cert_pem.bytes() * 200)
        assert server.requests.empty()


@pytest.mark.parametrize("host", ["s3..example", "s" * 64 + ".example"])
async def test_a_host_that_cannot_be_looked_up_is_a_failure_of_the_link(host: str) -> None:
    assert await failure(f"https://{host}/key") == "its URL has a host that no name server knows"


@pytest.mark.parametrize(
    "url",
    [
        "https://s3.example/bucket/key?X-Amz-Signature=1", "https://s3.example:8333/key", "https://[2001:db8::1]:8333/key",
        "http://127.0.0.1:8333/key", "http://localhost:8333/key", "http://[::1]:8333/key",
    ],
)  # fmt: skip
def test_links_to_an_https_server_or_this_machine_are_allowed(url: str) -> None:
    assert parse(url).geturl() == url


@pytest.mark.parametrize(
    "url",
    [
        "", "key", "file:///etc/passwd", "ftp://s3.example/key", "http://s3.example/key", "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1.example/key", "http://localhost.example/key", "http://0.0.0.0:8333/key", "http://10.0.0.1/key",
        "http://[::ffff:10.0.0.1]/key", "HTTP://s3.example/key", "data:,x", "unix:///run/docker.sock", "//s3.example/key",
        "https://", "https:///key", "https://user@s3.example/key", "https://user:word@s3.example/key", "https://s3.example/key#part",
        "https://s3.example:0/key", "https://s3.example:99999/key", "https://s3.example:port/key", "https://[::1/key",
        "https://s3.example/key\r\nX-Other: 1", "https://s3.example/a b", "https://s3.example/\u00e9", "https://s3.example/\x00",
        "\thttps://s3.example/key", "https://s3.example/" + "k" * 8192,
    ],
)  # fmt: skip
def test_other_links_are_refused(url: str) -> None:
    with pytest.raises(LinkFailed):
        parse(url)


async def test_no_link_is_followed_for_a_while_after_one_failed() -> None:
    now_s = [100.0]
    links = Links(lambda: now_s[0])
    assert links.are_usable
    links.avoid()
    assert not links.are_usable
    now_s[0] += AVOID_S - 1
    assert not links.are_usable
    now_s[0] += 1
    assert links.are_usable
