"""A server of the farm that does not lead: it listens, and forwards every call to the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from etfarm.server.access.tokens import TOKENS_CHANGED
from etfarm.server.cluster.errors import NoLeader
from etfarm.server.cluster.forwarding import Forwarding
from etfarm.server.cluster.known_tokens import KnownTokens, StandbyAuthentication
from etfarm.server.cluster.leadership import Leadership
from etfarm.server.cluster.links import UNREAD, WAIT_S, Links
from etfarm.server.config import Config
from etfarm.server.rpc.contract import SERVICES, set_serving
from etfarm.server.rpc.door.calls import TooManyCalls
from etfarm.server.rpc.door.certificates import Certificates
from etfarm.server.rpc.door.connections import Connections
from etfarm.server.rpc.door.forwarded import Forwarded
from etfarm.server.rpc.door.interceptor import AuthErrorInterceptor
from etfarm.server.rpc.door.listening import bind, end_calls, guarded_server, port_of
from etfarm.server.rpc.door.proving import Prover
from etfarm.v1.farm_pb2 import ServerInfo

_GRACE_S: Final = 1.0
"""Time after which calls that wait for their callers are ended when this server stops forwarding."""
_LOAD_S: Final = 1.0
"""Time for which this server waits for the farm's tokens before it answers calls."""
_SERVER_INFO: Final = "/etfarm.v1.FarmService/GetServerInfo"


@asynccontextmanager
async def standing_by(
    config: Config,
    leadership: Leadership,
    on_forwarded: Callable[[str, str], None] = lambda method, code: None,
    wait_s: float = WAIT_S,
    page_key: str = "",
) -> AsyncIterator[str]:
    """Forward calls until the end of the block; yield the address that the server listens on.

    Health checks and reflection are answered here, so that load balancers and clients keep a server that forwards. While this one
    knows or reaches no leader, they choose another one.

    Args:
        on_forwarded: called at the end of each call with its method and the name of its code.
        wait_s: time for which a call waits for a leader.
        page_key: the secret of the process's web page; empty without one.

    Raises:
        CANNOT_LISTEN: the address cannot be used.
        BadTokenFile: the file of `--tokens` cannot be used.
    """
    certificates, known = Certificates(config), KnownTokens(config.database)
    authentication = StandbyAuthentication(config.tokens, known, config.data / TOKENS_CHANGED)
    links = Links(leadership, config.identity(), wait_s)
    connections = Connections(lambda: authentication.asks_for_tokens, time.monotonic)
    forwarded = Forwarded(page_key=page_key)
    forwarding = Forwarding(links, authentication, on_forwarded, known.note_refusal, forwarded)
    # Projects are the leader's matter.
    interceptor = AuthErrorInterceptor(
        authentication, lambda principal, _: principal, connections=connections, forwarded=forwarded, ask=forwarding.ask,
        prover=Prover(known, lambda: certificates.sha256),
    )  # fmt: skip
    server = guarded_server([interceptor], connections, interceptor.has_token, interceptor.is_urgent, options=UNREAD)
    checks = health.HealthServicer()
    _add_health(server, checks)
    reflection.enable_server_reflection([*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
    credentials = certificates.credentials()
    address = bind(server, config, credentials)
    _add_methods(server, forwarding, config.advertised_at(address))
    following = asyncio.create_task(known.follow(), name="known tokens")
    loaded = asyncio.ensure_future(known.loaded.wait())
    # Without the database, the leader is asked about every caller.
    await asyncio.wait({loaded, following}, timeout=_LOAD_S, return_when=asyncio.FIRST_COMPLETED)
    loaded.cancel()
    await server.start()
    tasks = [
        following,
        asyncio.create_task(authentication.watch(interceptor.calls.look), name="tokens"),
        asyncio.create_task(certificates.watch(), name="certificates"),
        asyncio.create_task(_report_health(checks, leadership, links, wait_s), name="health"),
    ]
    if (port := port_of(address)) is not None:
        connections.start(port, is_encrypted=credentials is not None)
    try:
        yield address
    finally:
        for task in tasks:
            task.cancel()
        await links.close()
        moved = NoLeader("This server forwards no more calls: it takes the lead or stops.", "Try again in a moment.")
        await end_calls(server, interceptor.calls, moved, _GRACE_S)
        connections.close()
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


def _add_health(server: grpc.aio.Server, checks: health.HealthServicer) -> None:
    """Register health checks, as streams of one message: it is received only once the caller is known."""
    service: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
    handlers = {}
    for method in service.methods:

        async def answer(behavior: Any, requests: AsyncIterator[Any], context: ServicerContext[Any, Any]) -> None:
            async for request in requests:
                if (response := await behavior(request, context)) is not None:
                    await context.write(response)
                return

        handlers[method.name] = grpc.stream_stream_rpc_method_handler(
            partial(answer, getattr(checks, method.name)),
            request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
            response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


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
                streams_requests=method.client_streaming,
                streams_responses=method.server_streaming,
                suffix=forwarded_by if path == _SERVER_INFO else b"",
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_registered_method_handlers(name, handlers)
