"""Links to the farm's S3 server, which an agent follows so that an artifact's bytes do not pass through the farm's server.

asyncio's streams are used, since the usual HTTP libraries follow redirects and obey proxy variables unless told otherwise, and
wait in threads that nothing ends.
"""

from __future__ import annotations

import asyncio
import io
import math
import re
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit

from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire.channel import Address
from etfarm.wire.chunks import CHUNK_BYTES, LinkFailed

if TYPE_CHECKING:
    import ssl

AVOID_S: Final = 300.0
"""Time for which no link is followed after one failed: an agent that cannot reach the S3 server would lose time with each."""
ANSWER_S: Final = 10.0
PIECE_S: Final = 30.0
_MAX_URL: Final = 8192
_MAX_CERTIFICATES_BYTES: Final = 64 << 10
_PORTS: Final = {"https": 443, "http": 80}
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")


class Links:
    """The links that an agent follows, and whether it does.

    Args:
        clock: returns seconds on a monotonic clock.
        answer_s: time limit from the start of a connection to the end of the answer's headers.
        piece_s: time limit of each 512 KiB.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, answer_s: float = ANSWER_S, piece_s: float = PIECE_S
    ) -> None:
        self._clock = clock
        self._answer_s = answer_s
        self._piece_s = piece_s
        self._avoid_until_s = -math.inf
        self._context: tuple[bytes, ssl.SSLContext] | None = None

    @property
    def are_usable(self) -> bool:
        """Whether a link may be followed now."""
        return self._clock() >= self._avoid_until_s

    def avoid(self) -> None:
        """Follow no link for a while, since one failed."""
        self._avoid_until_s = self._clock() + AVOID_S

    async def follow(
        self, link: artifact_pb2.ArtifactLink, artifact: common_pb2.Artifact, offset: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield an artifact's bytes from an offset on: as many as it has, which the caller verifies.

        Raises:
            LinkFailed: the link is not allowed, or the S3 server does not send exactly these bytes in time.
        """
        url = parse(link.url)
        left, writer = artifact.size_bytes - offset, None
        try:
            async with asyncio.timeout(self._answer_s):
                context = await self._tls(link.certificates) if url.scheme == "https" else None
                reader, writer = await asyncio.open_connection(
                    url.hostname, url.port or _PORTS[url.scheme], ssl=context, limit=CHUNK_BYTES
                )
                writer.write(_request(url, offset))
                head = await reader.readuntil(b"\r\n\r\n")
            _require_range(head, offset, left)
            while left:
                async with asyncio.timeout(self._piece_s):
                    piece = await reader.readexactly(min(CHUNK_BYTES, left))
                left -= len(piece)
                yield piece
        except TimeoutError:
            raise LinkFailed("it does not answer in time") from None
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise LinkFailed("it cut the connection") from None
        except UnicodeError:
            raise LinkFailed("its URL has a host that no name server knows") from None
        except OSError as error:
            raise LinkFailed(error.strerror or type(error).__name__) from None
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _tls(self, certificates: bytes) -> ssl.SSLContext:
        """Return how TLS verifies the S3 server; reading the system's certificates takes some ten milliseconds."""
        if self._context is None or self._context[0] != certificates:
            self._context = certificates, await asyncio.to_thread(_tls_context, certificates)
        return self._context[1]


def parse(url: str) -> SplitResult:
    """Return the parts of a link's URL.

    Raises:
        LinkFailed: it is neither https nor http to this machine, or has what does not belong into a link.
    """
    if len(url) > _MAX_URL or not _PRINTABLE.fullmatch(url):  # before urlsplit, which removes line breaks
        raise LinkFailed("its URL has characters that no URL has, or is too long")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise LinkFailed("its URL cannot be read") from None
    if not host or port == 0 or parts.username is not None or parts.fragment:
        raise LinkFailed("its URL is not that of an object")
    if parts.scheme != "https" and not (
        parts.scheme == "http" and Address(f"[{host}]:0" if ":" in host else f"{host}:0").is_local
    ):
        raise LinkFailed("its URL is neither https nor http to this machine")
    return parts


def _request(url: SplitResult, offset: int) -> bytes:
    target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
    lines = [f"GET {target} HTTP/1.1", f"Host: {url.netloc}", "Accept-Encoding: identity", "Connection: close"]
    if offset:
        lines.append(f"Range: bytes={offset}-")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _require_range(head: bytes, offset: int, size_bytes: int) -> None:
    """Refuse an answer that does not consist of exactly the bytes from `offset` on.

    Raises:
        LinkFailed: its status or a header says something else.
    """
    status_line, _, rest = head.partition(b"\r\n")
    words = status_line.decode("latin-1").split(" ")
    status = words[1] if len(words) > 1 and words[0].startswith("HTTP/1.") and words[1].isdigit() else "no HTTP status"
    if status != ("206" if offset else "200"):
        raise LinkFailed(f"it answers {status[:20]}")
    import http.client  # a megabyte, which only agents that follow links need

    try:
        headers = http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException:
        raise LinkFailed("it sends too many headers") from None
    if offset and not headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
        raise LinkFailed("it sends another part")
    if headers.get("Content-Length") != str(size_bytes) or headers.get("Transfer-Encoding") is not None:
        raise LinkFailed("it sends another number of bytes")


def _tls_context(certificates: bytes) -> ssl.SSLContext:
    import ssl

    if len(certificates) > _MAX_CERTIFICATES_BYTES:
        raise LinkFailed("it has too many certificates")
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificates:
        try:
            context.load_verify_locations(cadata=certificates.decode("ascii"))
        except (UnicodeDecodeError, ssl.SSLError):
            raise LinkFailed("its certificates cannot be read") from None
    return context
