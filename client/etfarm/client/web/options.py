"""`WebOptions`: which farm the page shows, and at which address the page is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from etfarm.client.errors import UserError

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


class BadWebOption(UserError):
    """Error of an option of the page that has a wrong value."""

    reason = "BAD_WEB_OPTION"


@dataclass(frozen=True)
class WebOptions:
    """The configuration of the page."""

    server: str
    """The farm's address: HOST:PORT, [IPV6]:PORT or unix:PATH."""
    tls_ca: Path | None = None
    """PEM certificates of the authorities that may sign the farm's certificate."""
    public_url: str = ""
    """The address that visitors use behind a reverse proxy, such as https://farm.example/etfarm; empty without one."""
    allowed_hosts: frozenset[str] = LOOPBACK_HOSTS
    """Names that a request's Host header may have, without the port; that of `public_url` is always allowed."""
    is_https: bool = False
    """Whether the page itself serves TLS."""
    max_body_bytes: int = 64 << 10
    """Maximum size of a request's body, but for uploads."""
    max_upload_bytes: int = 4 << 30
    """Maximum size of an uploaded file, a body of the type application/octet-stream, and of an account's files together."""
    max_uploads_bytes: int = 8 << 30
    """Maximum size of all visitors' files together."""
    max_download_bytes: int = 4 << 30
    """Maximum size of an artifact that the page sends."""
    max_sessions: int = 512
    """Maximum number of signed-in visitors; for another, the account with the most loses the one idle longest."""
    max_streams: int = 512
    """Maximum number of open event streams of all visitors."""
    max_streams_of_account: int = 256
    """Maximum number of open event streams of visitors with one token."""
    max_streams_of_visitor: int = 32
    """Maximum number of open event streams of one visitor."""
    max_requests_of_visitor: int = 32
    """Maximum number of one visitor's requests in progress, but for event streams."""
    idle_timeout_s: float = 12 * 3600.0
    """Seconds without a request or an open stream after which a visitor is signed out."""
    session_timeout_s: float = 7 * 86_400.0
    """Seconds after which a visitor has to sign in again in any case."""
    request_timeout_s: float = 30.0
    """Seconds that a page may take to be composed."""

    def __post_init__(self) -> None:
        if self.public_url:
            parts = urlsplit(self.public_url)
            if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment or parts.username:
                raise BadWebOption(
                    f"The public URL must be http(s)://HOST[:PORT][/PATH], got {self.public_url!r}.",
                    "Give the address that visitors use, for example https://farm.example/etfarm.",
                    value=self.public_url,
                )

    @property
    def root_path(self) -> str:
        """The path that every address of the page begins with, without a slash at its end; empty for none."""
        return urlsplit(self.public_url).path.rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Whether visitors reach the page by https."""
        return self.is_https or urlsplit(self.public_url).scheme == "https"

    @property
    def public_origin(self) -> str:
        """Scheme, host and port of `public_url`; empty without one."""
        parts = urlsplit(self.public_url)
        return f"{parts.scheme}://{parts.netloc}".lower() if self.public_url else ""

    @property
    def hosts(self) -> frozenset[str]:
        """All names that a request's Host header may have."""
        public = host_name(urlsplit(self.public_url).netloc)
        return frozenset(host.lower() for host in (*self.allowed_hosts, *([public] if public else [])))


def host_name(authority: str) -> str:
    """Return the host of HOST, HOST:PORT or [IPV6]:PORT in lower case."""
    if authority.startswith("["):
        return authority.partition("]")[0].lower() + "]"
    return authority.partition(":")[0].lower()
