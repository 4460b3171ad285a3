"""A server of the farm that does not lead: it listens, and forwards every call to the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from etfarm.server.cluster.errors import NoLeader
from etfarm.server.cluster.forwarding import Forwarding
from etfarm.server.cluster.leadership import Leadership
from etfarm.server.cluster.links import WAIT_S, Links
from etfarm.server.config import Config
from etfarm.server.rpc.contract import SERVICES, set_serving
from etfarm.server.rpc.door.accepting import new_server
from etfarm.server.rpc.door.calls import TooManyCalls
from etfarm.server.rpc.door.certificates import Certificates
from etfarm.server.rpc.door.connections import Connections, raise_file_limit, server_options
from etfarm.server.rpc.door.listening import bind, port_of
from etfarm.v1.farm_pb2 import ServerInfo
from etfarm.wire.channel import SERVER_OPTIONS

_GRACE_S: Final = 0.2
"""Time that calls have to end when this server stops forwarding."""
_SERVER_INFO: Final = "/etfarm.v1.FarmService/GetServerInfo"


@asynccontextmanager
async def standing_by(
    config: Config,
    leadership: Leadership,
    on_forwarded: Callable[[str, str], None] = lambda method, code: None,
    wait_s: float = WAIT_S,
) -> AsyncIterator[str]:
    """Forward calls until the end of the block; yield the address that the server listens on.

    Health checks and reflection are answered here, so that load balancers and clients keep a server that forwards. While this one
    knows or reaches no leader, they choose another one.

    Args:
        on_forwarded: called at the end of each call with its method and the name of its code.
        wait_s: time for which a call waits for a leader.

    Raises:
        CannotListen: the address cannot be used.
    """
    certificates = Certificates(config)
    links = Links(leadership, config.identity(), wait_s)
    connections = Connections(lambda: config.tokens is not None or forwarding.has_seen_refusal, time.monotonic)
    forwarding = Forwarding(links, connections.trust, on_forwarded)
    options = (dict(SERVER_OPTIONS) | dict(server_options(raise_file_limit()))).items()
    server = new_server([], list(options))
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
    address = bind(server, config, certificates.credentials())
    _add_methods(server, forwarding, config.advertised_at(address))
    await server.start()
    tasks = [
        asyncio.create_task(certificates.watch(), name="certificates"),
        asyncio.create_task(_report_health(checks, leadership, links, wait_s), name="health"),
    ]
    if (port := port_of(address)) is not None:
        connections.start(port)
    try:
        yield address
    finally:
        for task in tasks:
            task.cancel()
        connections.close()
        stopping = asyncio.ensure_future(server.stop(_GRACE_S))  # closes the port first
        await links.close()
        await stopping
        await asyncio.gather(*tasks, return_exceptions=True)


async def _report_health(checks: health.HealthServicer, leadership: Leadership, links: Links, wait_s: float) -> None:
    """Report whether calls can be forwarded. After a leader is lost, still report so while calls wait for the next one."""
    was_serving = False
    while True:
        is_serving = leadership.can_forward
        changed = asyncio.ensure_future(leadership.changed())
        try:
            if was_serving and not is_serving:
                await asyncio.wait({changed}, timeout=wait_s)
            if not changed.done():
                await set_serving(checks, is_serving=is_serving)
                # Nobody calls a server that is not serving, so it looks by itself whether the leader can be reached again.
                await asyncio.wait({changed}, timeout=wait_s if leadership.leader and not is_serving else None)
        finally:
            changed.cancel()
        if leadership.leader is not None and not leadership.can_forward:
            with contextlib.suppress(NoLeader, TooManyCalls):
                async with links.take():
                    pass
        was_serving = is_serving


def _add_methods(server: grpc.aio.Server, forwarding: Forwarding, advertised: str) -> None:
    """Register each method of the contract by its name, as generated code does."""
    # Encoded messages that are joined are merged, so that this field is added without decoding the leader's answer.
    forwarded_by = ServerInfo(forwarded_by=advertised).SerializeToString()
    for name in SERVICES:
        service: Any = descriptor_pool.Default().FindServiceByName(name)
        handlers = {}
        for method in service.methods:
            path = f"/{name}/{method.name}"
            handlers[method.name] = forwarding.handler(
                path,
                is_unary=not (method.client_streaming or method.server_streaming),
                suffix=forwarded_by if path == _SERVER_INFO else b"",
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_registered_method_handlers(name, handlers)
