"""`WebOptions`: which farm the page shows, and at which address the page is reached."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from etfarm.wire.authority import host_of
from etfarm.wire.errors import error_for

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK: Final[tuple[Network, ...]] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))
LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


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
    trusted_proxies: tuple[Network, ...] = ()
    """Reverse proxies whose X-Forwarded-For names the visitor's address; no other is believed."""
    forwarded_key: str = field(default="", repr=False)
    """The secret by which the server that started the page believes the addresses of visitors; empty for a page of its own."""
    max_connections: int = 1_024
    """Maximum number of connections of signed-in visitors, and of others: each has as many, so that neither takes the other's."""
    max_connections_of_address: int = 64
    """Maximum number of an address's connections without a signed-in visitor; for another one, the one idle longest ends."""
    max_connections_of_account: int = 512
    """Maximum number of connections of visitors with one token; for another one, the one idle longest ends."""
    max_body_bytes: int = 64 << 10
    """Maximum size of a request's body, but for uploads."""
    max_upload_bytes: int = 4 << 30
    """Maximum size of an uploaded file, a body of the type application/octet-stream, and of an account's files together."""
    max_uploads_bytes: int = 8 << 30
    """Maximum size of all visitors' files together."""
    max_download_bytes: int = 4 << 30
    """Maximum size of an artifact that the page sends."""
    max_downloads: int = 16
    """Maximum number of downloads at the same time: each is a stream of the farm. Accounts that wait take turns."""
    max_downloads_of_account: int = 4
    """Maximum number of downloads of visitors with one token at the same time."""
    requests_per_s: float = 100.0
    """Requests a second of a signed-in visitor, and of an address that has not signed in; others wait."""
    requests_at_once: int = 500
    """Number of requests that are answered without a wait: a team may open the page together."""
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
            try:
                parts = urlsplit(self.public_url)
                is_address = parts.scheme in ("http", "https") and bool(host_of(parts.netloc))
                is_address = is_address and not parts.query and not parts.fragment
            except ValueError:  # a bracket without the other
                is_address = False
            if not is_address:
                raise error_for(
                    "BAD_WEB_OPTION",
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
        # Browsers leave the scheme's own port out.
        authority = parts.netloc.removesuffix({"http": ":80", "https": ":443"}.get(parts.scheme, ""))
        return f"{parts.scheme}://{authority}".lower() if self.public_url else ""

    @property
    def hosts(self) -> frozenset[str]:
        """All names that a request's Host header may have."""
        public = host_of(urlsplit(self.public_url).netloc)
        return frozenset(host.lower() for host in (*self.allowed_hosts, *([public] if public else [])))

    def is_trusted_proxy(self, host: str) -> bool:
        """Return whether a connection from an address is a reverse proxy that names its visitors."""
        return _is_in(host, self.trusted_proxies)

    def is_proxy(self, host: str) -> bool:
        """Return whether connections from an address are those of many visitors: beside a public URL, also this machine's."""
        return self.is_trusted_proxy(host) or (bool(self.public_url) and _is_in(host, LOOPBACK))


def _is_in(host: str, networks: tuple[Network, ...]) -> bool:
    address = plain_address(host)
    return address is not None and any(address in network for network in networks)


def plain_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address in a text, an IPv4 one if it is mapped into IPv6; None if it is something else."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address
