"""The adb server's address, from the same environment variables that adb reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from etfarm.wire.errors import error_for

DEFAULT_ADDRESS: Final = "tcp:127.0.0.1:5037"


def server_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address that adb itself would use: ADB_SERVER_SOCKET, else ANDROID_ADB_SERVER_ADDRESS and _PORT."""
    if named := environment.get("ADB_SERVER_SOCKET"):
        return named
    _, host, port = DEFAULT_ADDRESS.split(":")
    return f"tcp:{environment.get('ANDROID_ADB_SERVER_ADDRESS') or host}:{environment.get('ANDROID_ADB_SERVER_PORT') or port}"


@dataclass(frozen=True)
class Endpoint:
    """The destination of a connection: a path, or a host and its port."""

    path: str = ""
    """Path of a unix domain socket; a name in the abstract namespace begins with a NUL. Empty for TCP."""
    host: str = ""
    port: int = 0


def parse(address: str) -> Endpoint:
    """Return the endpoint of `tcp:HOST:PORT`, `tcp:PORT` (this machine), `localfilesystem:PATH` or `localabstract:NAME`.

    Raises:
        ADB_ADDRESS_MALFORMED: the address has none of these forms.
    """
    kind, _, rest = address.partition(":")
    if kind == "localfilesystem" and rest:
        return Endpoint(path=rest)
    if kind == "localabstract" and rest:
        return Endpoint(path=f"\0{rest}")
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16:
        return Endpoint(host=host.removeprefix("[").removesuffix("]") or "127.0.0.1", port=int(port))
    raise error_for(
        "ADB_ADDRESS_MALFORMED",
        f"{address!r} is not an address of an adb server.",
        "Give tcp:HOST:PORT, tcp:PORT or localfilesystem:PATH in ADB_SERVER_SOCKET, or unset it.",
        address=address,
    )
