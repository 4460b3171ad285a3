"""Where notices may go: the check of an address before it is stored, and of what its host resolves to before each try.

A user of the farm names addresses that the server then connects to, from inside its network. Without a check that would reach
whatever the server reaches: its loopback interface, a cloud's metadata service, the routers of the laboratory.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from etfarm.server.notices.errors import BadWebhook, HostRefused

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Sequence[str]]
"""Function that returns the addresses of a host and port, as texts. It blocks."""

MAX_URL: Final = 2_000
"""Maximum length of an address, in characters."""

_HOST: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_-]{1,63})*\.?", re.ASCII)
_PORTS: Final = {"http": 80, "https": 443}
_FIRST_UNPRIVILEGED: Final = 1024

_EMBEDDING: Final = tuple(
    ipaddress.IPv6Network(text)
    # Compatible, mapped and translated addresses, NAT64 (twice), Teredo, 6to4, and old site-local ones: each leads to an IPv4
    # address, or to a network, that a check of the IPv6 address alone does not see.
    for text in (
        "::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10",
    )
)  # fmt: skip


# Users read it, and must not learn from it to what the names of a private network resolve.
_NOT_PUBLIC: Final = "its address is not public"

# Python's `is_global` follows the registries of its release, and knows only what they list. These are checked besides.
_SPECIAL: Final = tuple(
    ipaddress.IPv4Network(text)
    # Azure's platform service, which answers only within a virtual machine; protocol assignments; the AS112 servers, which a
    # network may have of its own (twice); relays of multicast, and of 6to4.
    for text in (
        "168.63.129.16/32", "192.0.0.0/24", "192.31.196.0/24", "192.175.48.0/24", "192.52.193.0/24", "192.88.99.0/24",
    )
)  # fmt: skip
_SPECIAL_V6: Final = tuple(
    ipaddress.IPv6Network(text)
    # Protocol assignments, the AS112 servers, and the second range for documentation, which is newer than Python 3.11.
    for text in ("2001::/23", "2620:4f:8000::/48", "3fff::/20")
)
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All that IANA has assigned to hosts of the internet. The rest is reserved, or special: SIDs of segment routing, discarded."""


@dataclass(frozen=True)
class Target:
    """A parsed address of a receiver."""

    url: str
    scheme: str
    host: str
    """A lower-case name, or an IP address without brackets."""
    port: int
    path: str
    """Path and query, as in a request's first line."""

    @property
    def origin(self) -> str:
        """Scheme, host and port: the address without what may be secret in it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == _PORTS[self.scheme] else f":{self.port}")


@dataclass(frozen=True)
class AllowList:
    """The hosts that an admin lists: they may have addresses that are not public."""

    hosts: frozenset[str] = frozenset()
    """Names, in lower case. `*.example.com` stands for every name below example.com."""
    networks: tuple[IpNetwork, ...] = ()
    only_listed: bool = False
    """Whether notices go to listed hosts only."""

    @classmethod
    def of(cls, entries: Sequence[str], *, only_listed: bool = False) -> AllowList:
        """Return the list of the entries: names, `*.NAME`, IP addresses, or networks such as 10.0.0.0/8.

        Raises:
            BadWebhook: an entry is none of these.
        """
        hosts, networks = set(), []
        for entry in entries:
            text = entry.strip().lower().removeprefix("[").removesuffix("]")
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError:
                if not _HOST.fullmatch(text.removeprefix("*.")):
                    raise BadWebhook(
                        f"--webhook-allow {entry!r} is neither a host nor a network.",
                        "Give a name such as hooks.example.com or *.example.com, an address, or a network such as 10.0.0.0/8.",
                    ) from None
                hosts.add(text.removesuffix("."))
        return cls(frozenset(hosts), tuple(networks), only_listed)

    def has_host(self, host: str) -> bool:
        """Return whether a name is listed."""
        labels = host.removesuffix(".").split(".")
        above = ("*." + ".".join(labels[start:]) for start in range(1, len(labels)))
        return host.removesuffix(".") in self.hosts or any(name in self.hosts for name in above)

    def has_address(self, address: IpAddress) -> bool:
        """Return whether an address is listed, itself or by its network."""
        return any(address in network for network in self.networks if network.version == address.version)


def parse(url: str) -> Target:
    """Return the parts of an address.

    Raises:
        BadWebhook: it is not a valid address for notices.
    """
    remedy = "Give https://HOST/PATH or http://HOST:PORT/PATH."
    if not 0 < len(url) <= MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise BadWebhook(
            f"{url[:80]!r} is not an address for notices: it must have 1 to {MAX_URL} printable ASCII characters without spaces.",
            remedy,
        )
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise BadWebhook(f"{url[:80]!r} is not an address: {error}.", remedy) from None
    if parts.scheme not in _PORTS:
        raise BadWebhook(f"{url[:80]!r} must begin with https:// or http://.", remedy)
    if "@" in parts.netloc:
        raise BadWebhook("An address for notices must not contain a user name or password.", "Receivers verify the signature.")
    if parts.fragment or url.endswith("#"):
        raise BadWebhook(f"{url[:80]!r} must not have a fragment (#).", remedy)
    if port == 0 or not (_HOST.fullmatch(host) or _literal(host) is not None):
        raise BadWebhook(f"{url[:80]!r} has no valid host and port.", remedy)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(url, parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)


def require_permitted(target: Target, allowed: AllowList) -> None:
    """Check what is known without resolving the host's name.

    Raises:
        HostRefused: notices do not go to this host.
    """
    if allowed.has_host(target.host):
        return
    if (address := _literal(target.host)) is not None:
        _require_address(target, address, allowed)
    elif target.host.rstrip(".").rpartition(".")[2] in ("localhost", "local", "internal", "localdomain") and not allowed.networks:
        raise _refused(target, f"{target.host} is not a public host")
    elif allowed.only_listed and not allowed.networks:
        raise _refused(target, f"{target.host} is not listed")
    _require_port(target, allowed)


def resolve(target: Target, allowed: AllowList, lookup: Resolve) -> str:
    """Return the address to connect to: the first that the host has. Blocks.

    All addresses of the host are checked: a name with a public and a private address is refused.

    Raises:
        HostRefused: notices do not go to this host.
        OSError: the name cannot be resolved.
    """
    require_permitted(target, allowed)
    addresses = [target.host] if _literal(target.host) is not None else list(lookup(target.host, target.port))
    if not addresses:
        raise OSError(f"{target.host} has no address")
    if not allowed.has_host(target.host):
        for text in addresses:
            address = _literal(text)
            if address is None:
                raise _refused(target, _NOT_PUBLIC)
            _require_address(target, address, allowed)
    return addresses[0]


def system_lookup(host: str, port: int) -> Sequence[str]:
    """Return the host's addresses by the system's resolver, in its order of preference."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(entry[4][0]) for entry in entries]


def is_public(address: IpAddress) -> bool:
    """Return whether an address is one of the internet's hosts, and leads to no other address."""
    is_v6 = isinstance(address, ipaddress.IPv6Address)
    special: tuple[IpNetwork, ...] = (*_EMBEDDING, *_SPECIAL_V6) if is_v6 else _SPECIAL
    if any(address in network for network in special) or (is_v6 and address not in _UNICAST):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _require_address(target: Target, address: IpAddress, allowed: AllowList) -> None:
    if allowed.has_address(address):
        return
    if not is_public(address):
        raise _refused(target, _NOT_PUBLIC)
    if allowed.only_listed:
        raise _refused(target, f"{target.host} is not listed")


def _require_port(target: Target, allowed: AllowList) -> None:
    """Refuse the ports of other protocols, such as mail, on hosts that are not listed."""
    if target.port in _PORTS.values() or target.port >= _FIRST_UNPRIVILEGED:
        return
    if (address := _literal(target.host)) is None or not allowed.has_address(address):
        raise _refused(target, f"port {target.port} belongs to another protocol")


def _literal(text: str) -> IpAddress | None:
    """Return the address that a text is; None for a name, and for an address with a scope, which names an interface."""
    if "%" in text:
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _refused(target: Target, why: str) -> HostRefused:
    return HostRefused(
        f"The server sends no notices to {target.origin}: {why}.",
        f"An admin can list the host: `etfarm serve --webhook-allow {target.host}`.",
        host=target.host,
    )


NO_HOSTS: Final = AllowList()
"""The default list: public hosts only."""
