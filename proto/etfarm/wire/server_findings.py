"""What `etfarm doctor` says of a server that a client or an agent uses: version, clock, token, certificate and disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Final

import grpc

from etfarm.v1 import common_pb2, farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access
from etfarm.wire.doctor import Finding, Status
from etfarm.wire.farm_channel import farm_channel
from etfarm.wire.status import from_proto, from_rpc_error

TIMEOUT_S: Final = 10.0
"""Time limit of each call."""
MAX_SKEW_S: Final = 5.0
"""Difference of the clocks beyond which instants of both machines are misleading."""
SOON: Final = timedelta(days=14)


@dataclass(frozen=True)
class Asked:
    """A server's answer."""

    info: farm_pb2.ServerInfo
    skew_s: float | None
    """How far the server's clock is ahead of this machine's, in seconds; None for a server that does not tell its time."""
    round_trip_s: float


async def ask(access: Access) -> Asked:
    """Call a server, and return its answer.

    Raises:
        EtfarmError: the server cannot be reached, or refuses the call.
    """
    async with farm_channel(access) as channel:
        stub = farm_pb2_grpc.FarmServiceStub(channel)
        request = farm_pb2.GetServerInfoRequest()
        try:
            await stub.GetServerInfo(request, timeout=TIMEOUT_S)
            # Only the second call is timed: the first one connects.
            before, began_s = time.time(), time.monotonic()
            info = await stub.GetServerInfo(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, server=access.server) from None
        round_trip_s = time.monotonic() - began_s
    skew_s = None
    if info.HasField("server_time"):
        skew_s = info.server_time.seconds + info.server_time.nanos / 1e9 - (before + round_trip_s / 2)
    return Asked(info, skew_s, round_trip_s)


def describe(name: str, address: str, asked: Asked, now: datetime | None = None) -> Iterator[Finding]:
    """Yield the findings about a server that answers.

    Args:
        name: of the first finding, and the prefix of the others.
        now: the current time in UTC; by the clock when None.
    """
    info, now = asked.info, now or datetime.now(UTC)
    role = common_pb2.Role.Name(info.principal.role).removeprefix("ROLE_").lower()
    caller = f"{info.principal.name or 'anonymous'}, {role}"
    yield Finding(
        name, Status.OK,
        f"{address}, etfarm {info.version}, you are {caller}; {info.devices_online} devices online; "
        f"answers in {asked.round_trip_s * 1e3:.0f} ms",
    )  # fmt: skip
    own = version("etfarm")
    if info.version != own:
        text = f"The server has etfarm {info.version}, this machine {own}."
        yield Finding(f"{name} version", Status.WARNING, text, "newer features may be refused.", "Install the server's version.")
    if info.HasField("bundle_error"):
        cost = "devices of the server's architecture use ExecuTorch's Python binding, or nothing."
        error = from_proto(info.bundle_error)
        yield Finding(f"{name}'s runner", Status.WARNING, error.message, cost, error.remedy)
    if asked.skew_s is not None:
        yield _clock(name, asked)
    if info.HasField("token_expire_time"):
        yield _expiry(f"{name} token", "The token", info.token_expire_time.ToDatetime(UTC), now, "`etfarm tokens rotate`.")
    if info.HasField("certificate_expire_time"):
        remedy = "Have the server's certificate renewed; the server reads the new files by itself."
        yield _expiry(f"{name} certificate", "The certificate", info.certificate_expire_time.ToDatetime(UTC), now, remedy)
    if info.servers:
        yield _servers(name, address, info)
    if info.stopping:
        remedy = "Wait until it has started again."
        yield Finding(f"{name} state", Status.WARNING, "The server is about to stop.", "new jobs are refused.", remedy)
    if info.HasField("disk"):
        text = f"{info.disk.free_bytes / 1e9:.1f} GB free; new work is refused below {info.disk.work_bytes / 1e9:.1f} GB"
        if info.disk.full:
            remedy = "Have disk space freed on the server."
            yield Finding(f"{name}'s disk", Status.WARNING, text, "new jobs, uploads and compilations are refused.", remedy)
        else:
            yield Finding(f"{name}'s disk", Status.OK, text)


def _servers(name: str, address: str, info: farm_pb2.ServerInfo) -> Finding:
    """Return which servers the farm has, and which one leads; with a warning if they are fewer than the addresses."""
    via = f"; {info.forwarded_by} forwarded the call" if info.forwarded_by else ""
    others = ", ".join(f"{server.address} (etfarm {server.version})" for server in info.servers if not server.leads)
    leader = next((server.address for server in info.servers if server.leads), "unknown")
    if others:
        text = f"{leader} leads; {others} stand{'s' if len(info.servers) == 2 else ''} by{via}"
    else:
        text = f"{leader} is the farm's only server."
    if (expected := address.count(",") + 1) <= len(info.servers):
        return Finding(f"{name}s", Status.OK, text)
    cost = "fewer servers can take over."
    remedy = f"Start the other of the {expected} servers in {address!r}, or leave it out there."
    return Finding(f"{name}s", Status.WARNING, text, cost, remedy)


def _clock(name: str, asked: Asked) -> Finding:
    assert asked.skew_s is not None
    uncertainty = f"±{asked.round_trip_s / 2:.2f} s"
    if abs(asked.skew_s) <= MAX_SKEW_S + asked.round_trip_s / 2:
        return Finding(f"{name} clock", Status.OK, f"differs by {asked.skew_s:+.2f} s {uncertainty}")
    text = f"The server's clock is {abs(asked.skew_s):.0f} s {'ahead of' if asked.skew_s > 0 else 'behind'} this machine's."
    cost = "tokens and certificates may count as expired, and times of reports mislead."
    return Finding(f"{name} clock", Status.WARNING, text, cost, "Synchronize both clocks (NTP).")


def _expiry(name: str, what: str, at: datetime, now: datetime, remedy: str) -> Finding:
    text = f"{what} is valid until {at:%Y-%m-%d %H:%M} UTC."
    if at - now > SOON:
        return Finding(name, Status.OK, text)
    cost = "afterwards every call is refused." if at > now else "calls are refused."
    return Finding(name, Status.WARNING, text, cost, f"Renew it: {remedy}" if remedy.startswith("`") else remedy)
