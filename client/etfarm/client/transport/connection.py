"""The connection to a farm: to the server at an address, or to the embedded farm, which starts if it does not run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc

from etfarm.client.embedded.lease import Lease, join
from etfarm.client.transport.retry import Patience, repeat
from etfarm.client.transport.server_wait import BRIEF_S, SAY_AWAY, chosen_wait_s
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import farm_pb2
from etfarm.wire import names
from etfarm.wire.channel import Access, open_channel, socket_token
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.failover import settle
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION

CHOSEN_PROJECT: Final[ContextVar[str | None]] = ContextVar("chosen_project", default=None)
"""The project of `--project`, for every farm that a command connects to."""


class Connection:
    """The channel and stubs that `AsyncFarm` calls a farm through."""

    def __init__(
        self,
        address: str | None,
        token: str | None,
        tls_ca: str | Path | None,
        on_status: Callable[[str], None] | None,
        project: str | None = None,
        *,
        server_wait_s: float | None = None,
        prewarm: bool = True,
    ) -> None:
        """Take the arguments of `AsyncFarm`.

        Raises:
            BAD_ADDRESS: the file `tls_ca` does not exist, or there is no server address to use it for.
            BAD_SERVER_WAIT: `server_wait_s` or ETFARM_SERVER_WAIT is no time.
        """
        self._wait_s = chosen_wait_s(server_wait_s)
        self._address = address or os.environ.get(names.SERVER_VARIABLE) or None
        if tls_ca is not None and self._address is None:
            raise error_for(
                "BAD_ADDRESS",
                "--tls-ca requires a server's address; the embedded farm has no certificate.",
                f"Give --server (or {names.SERVER_VARIABLE}) too, or leave --tls-ca out.",
            )
        if tls_ca is not None and not Path(tls_ca).is_file():
            raise error_for("BAD_ADDRESS", f"There is no file {tls_ca}, which --tls-ca names.", "Check the path.", path=tls_ca)
        self._token = token
        self._tls_ca = tls_ca
        self._on_status = on_status
        self._project = project if project is not None else CHOSEN_PROJECT.get()
        self._prewarm = prewarm
        self._lease: Lease | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stubs: Stubs | None = None

    async def open(self) -> None:
        """Connect to the farm.

        Raises:
            EtfarmError: SERVER_UNREACHABLE, UNAUTHENTICATED, PROJECT_NOT_FOUND; BAD_ADDRESS, BAD_TLS_FILE, BAD_PROJECT;
                EMBEDDED_FARM_FAILED.
        """
        try:
            if self._address is None:
                self._lease = await join(on_status=self._on_status, prewarm=self._prewarm)
                # ETFARM_PROJECT is meant for a team's server; this farm has only `default` until its user creates another.
                access = Access(self._lease.address, socket_token(self._lease.address))
            else:
                access = Access.of(self._address, self._tls_ca)
                if self._token is not None:
                    access = replace(access, token=self._token)
            if self._project is not None:
                access = replace(access, project=self._project)
            self._channel = open_channel(access)
            say = self._on_status if self._on_status is not None else SAY_AWAY.get()
            # An embedded farm that has ended does not come back.
            wait_s = BRIEF_S if self._wait_s is None and self._lease is not None else self._wait_s
            patience = Patience.of(self._channel, access.server, wait_s, say)
            self._stubs = Stubs.of(self._channel, patience)
            await settle(self._channel)
            info = await repeat(patience.presence.ask, patience.backoff())
            require_common_version(info, server=access.server)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect from the farm; an embedded farm without other users stops."""
        channel, stubs, lease = self._channel, self._stubs, self._lease
        self._channel = self._stubs = self._lease = None
        if stubs is not None:
            stubs.patience.presence.close()
        if channel is not None:
            await channel.close()
        if lease is not None:
            await lease.leave()

    async def watch(self) -> AsyncIterator[bool]:
        """Yield whether the server answers, and then each change, until the connection is closed.

        Raises:
            NOT_CONNECTED: the connection is not open.
        """
        channel = self._channel
        if channel is None:
            raise self.not_open()
        last: bool | None = None
        while channel is self._channel:
            state = channel.get_state(try_to_connect=True)
            # Between the two, it is not known yet.
            is_up = {grpc.ChannelConnectivity.READY: True, grpc.ChannelConnectivity.TRANSIENT_FAILURE: False}.get(state, last)
            if is_up is not None and is_up is not last:
                last = is_up
                yield is_up
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return
            await channel.wait_for_state_change(state)

    @property
    def stubs(self) -> Stubs:
        """The farm's services.

        Raises:
            NOT_CONNECTED: the connection is not open.
        """
        if self._stubs is None:
            raise self.not_open()
        return self._stubs

    def not_open(self) -> EtfarmError:
        """Return the error of a use before the connection is open."""
        return error_for(
            "NOT_CONNECTED",
            "The farm is not connected.",
            "Use it inside `with Farm(...) as farm:` or `async with AsyncFarm(...) as farm:`.",
        )

    @property
    def lease(self) -> Lease | None:
        """The lease on the embedded farm; None for a server with an address."""
        return self._lease


@asynccontextmanager
async def open_stubs(server: str | None = None, tls_ca: str | Path | None = None) -> AsyncIterator[Stubs]:
    """Connect to a farm as AsyncFarm does, for calls that it has no method for.

    Raises:
        EtfarmError: as `Connection`.
    """
    connection = Connection(server, None, tls_ca, None)
    await connection.open()
    try:
        yield connection.stubs
    finally:
        await connection.close()


def require_common_version(info: farm_pb2.ServerInfo, *, server: str) -> None:
    """Check that a server and this client speak a common version of the contract.

    Raises:
        SERVER_TOO_OLD, CLIENT_TOO_OLD: they have none in common; the remedy names what to install.
    """
    if info.protocol_version < OLDEST_PROTOCOL_VERSION:
        raise error_for(
            "SERVER_TOO_OLD",
            f"The server at {server} is etfarm {info.version}, which this version cannot talk to.",
            "Update the server, or stop the `etfarm up` of the old version.",
            server=server,
            version=info.version,
        )
    if info.oldest_protocol_version > PROTOCOL_VERSION:
        raise error_for(
            "CLIENT_TOO_OLD",
            f"The server at {server} is etfarm {info.version}, which no longer serves etfarm {version('etfarm')}.",
            f"Install the server's version: pip install 'etfarm=={info.version}'.",
            server=server,
            version=info.version,
        )
