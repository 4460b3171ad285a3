"""Hosts and addresses of callers: one strict reading of HOST[:PORT] in HTTP requests, and what an IP address counts as."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

_AUTHORITY: Final = re.compile(
    r"(?P<host>\[[0-9a-f:.]{2,45}\]|[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?)(?::(?P<port>[0-9]{1,5}))?\Z", re.ASCII
)


def host_of(authority: str) -> str:
    """Return the host of HOST, HOST:PORT or [IPV6]:PORT in lower case; empty for anything else.

    Names with a user, a dot at the end, or letters beyond ASCII are something else: to a browser, they are other origins.
    """
    match = _AUTHORITY.match(authority.lower()) if authority.isascii() else None
    if match is None or ".." in authority or int(match["port"] or 0) > 65535:
        return ""
    host = match["host"]
    if not host.startswith("["):
        return host
    try:
        return f"[{ipaddress.IPv6Address(host[1:-1])}]"
    except ValueError:
        return ""


def network_of(address: str) -> str:
    """Return what a caller's address counts as: itself, or its /64 network, as one machine has all of that.

    Texts that are no addresses are returned as they are.
    """
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return str(known)
    return str(known.ipv4_mapped or ipaddress.ip_network((known, 64), strict=False))


def is_address(host: str) -> bool:
    """Return whether a host, as `host_of` returns it, is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
