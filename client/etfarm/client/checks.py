"""The client's checks of `etfarm doctor`: the configured server, and the embedded farm of this user."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from etfarm.client.embedded.lease import Place, does_answer
from etfarm.wire.channel import Access
from etfarm.wire.doctor import Check, Finding, Status
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import SERVER_VARIABLE
from etfarm.wire.server_findings import ask, describe

PATIENCE_S: Final = 6.0
"""Seconds that an embedded farm may take to answer, and again to let a lock go; its last processes are killed after 5 s."""


def check_server() -> Iterable[Finding]:
    """Yield whether the server of ETFARM_SERVER answers, as whom it sees the caller, and what it says of itself."""
    address = os.environ.get(SERVER_VARIABLE)
    if not address:
        yield Finding("server", Status.OK, f"{SERVER_VARIABLE} is not set: commands start a farm of their own.")
        return
    try:
        asked = asyncio.run(ask(Access.of(address)))
    except EtfarmError as error:
        yield Finding("server", Status.MISSING, error.message, "no command that uses the farm works.", error.remedy)
        return
    yield from describe("server", address, asked)


def check_embedded_farm(place: Place | None = None, patience_s: float = PATIENCE_S) -> Iterable[Finding]:
    """Yield whether another process keeps the embedded farm of this user from starting.

    Args:
        place: the farm's files; those of the user when None.
        patience_s: seconds that a farm may take to answer, and to let a lock go.
    """
    name, place = "embedded farm", place or Place.of_user()
    if not place.data.exists():
        yield Finding(name, Status.OK, f"none has run in {place.data}")
        return
    answers = does_answer(place, patience_s)
    if answers:
        yield Finding(name, Status.OK, f"runs in {place.data}")
        return
    pids = _stuck_holders(place, patience_s)
    if pids:
        names = ", ".join(f"{pid} ({_name_of(pid)})" for pid in pids)
        detail = f"A lock of {place.data} is held, and no farm answers. Held by: {names}."
        remedy = f"End the holder, `kill -9 {' '.join(map(str, pids))}`, or set ETFARM_DATA to another folder."
        yield Finding(name, Status.MISSING, detail, "no command can start a farm.", remedy)
    else:
        yield Finding(name, Status.OK, f"not running; its folder is {place.data}")


def _stuck_holders(place: Place, patience_s: float) -> list[int]:
    """Return the processes that hold a lock of a farm all the time, and not only while a farm starts or ends."""
    holders, deadline = set(place.holders()), time.monotonic() + patience_s
    while holders and time.monotonic() < deadline:
        time.sleep(0.1)
        holders.intersection_update(place.holders())
    return sorted(holders)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


CHECKS: Final[Mapping[str, Check]] = {"server": check_server, "embedded farm": check_embedded_farm}
