"""AgentService: a stream for each connected agent, enrolment, and agent identities.

A program may print anything, and its errors quote it, so over-long texts are cut, lest one program's output affect other devices
and runs. A result that is still too large becomes a device error, since the agent would otherwise resend it forever. Other
messages that are too large are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from etfarm.server.access.identities import Identities, Identity
from etfarm.server.access.scope import agent_holder
from etfarm.server.access.tokens import TokenTable
from etfarm.server.artifacts.store import Store, artifact_missing
from etfarm.server.devices.errors import AgentConnected, DeviceNotYours, DeviceTooLarge, TooManyDevices
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.retirement import Retirement
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import HEARTBEAT_INTERVAL_S, AgentSession
from etfarm.server.devices.upgrades import Upgrades
from etfarm.server.devices.wheels import AgentWheel
from etfarm.server.rpc.door.caller import caller, credential
from etfarm.server.rpc.door.limits import LIMITS, LimitExceeded, check, shorten
from etfarm.server.rpc.door.roles import ADMIN
from etfarm.server.rpc.services.artifacts import holder_of
from etfarm.server.rpc.services.protocol import require_common_version, version_with
from etfarm.server.sessions.sessions import Sessions
from etfarm.server.state.paging import page_of
from etfarm.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import error_for
from etfarm.wire.status import to_proto

log = structlog.get_logger()


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The servicer of AgentService; see agent.proto."""

    def __init__(
        self,
        registry: Registry,
        identities: Identities,
        runs: Runs,
        sessions: Sessions,
        tokens: TokenTable,
        upgrades: Upgrades,
        retirement: Retirement,
        store: Store,
        agent_wheel: AgentWheel | None,
        read_version: Callable[[Path], Awaitable[str]],
        *,
        version: str,
        clock: Callable[[], float],
    ) -> None:
        self._tokens = tokens
        self._upgrades = upgrades
        self._retirement = retirement
        self._store = store
        self._agent_wheel = agent_wheel
        self._read_version = read_version
        self._registry = registry
        self._identities = identities
        self._runs = runs
        self._sessions = sessions
        self._version = version
        self._clock = clock

    async def Connect(
        self, request_iterator: AsyncIterator[agent_pb2.AgentMessage], context: object
    ) -> AsyncIterator[agent_pb2.ServerMessage]:
        request_iterator = Salvaged(request_iterator)
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise error_for("NO_HELLO", "The first message of an agent must be Hello.")
        hello = first.hello
        protocol_version = version_with(hello, self._version)
        principal = caller()
        await self._identities.admit(hello.agent_id, principal)
        session = AgentSession(
            hello.agent_id, hello.boot_id, self._clock, principal=principal.name, is_admin=principal.role == ADMIN,
            hello=hello, protocol_version=protocol_version,
        )  # fmt: skip
        if (task := asyncio.current_task()) is not None:
            session.on_overflow(task.cancel)
        session.send(
            agent_pb2.ServerMessage(
                welcome=agent_pb2.Welcome(
                    server_version=self._version, heartbeat_interval_s=HEARTBEAT_INTERVAL_S, protocol_version=protocol_version
                )
            )
        )
        # A stream that breaks while its devices are being registered must not leave them registered.
        try:
            await self._registry.connect(session, hello, partial(self._identities.require_not_retired, hello.agent_id))
            self._upgrades.connected(hello)
            log.info("agent connected", agent=hello.agent_id, host=hello.host, devices=[device.id for device in hello.devices])
            for attempt_id in hello.active_attempts:
                if not self._runs.knows(attempt_id):
                    cancel = agent_pb2.CancelRun(attempt_id=attempt_id, reason="the server no longer knows it")
                    session.send(agent_pb2.ServerMessage(cancel_run=cancel))
            # Up to 32 MiB, which would stay in memory for as long as the agent is connected.
            del first, hello
            listening = asyncio.create_task(self._listen(session, request_iterator), name=f"agent-{session.agent_id}")
            try:
                async for message in session.outgoing():
                    yield message
            finally:
                listening.cancel()
                await asyncio.wait([listening])
                log.info("agent disconnected", agent=session.agent_id)
        finally:
            session.end()
            await self._registry.disconnect(session)

    async def ServeSession(
        self, request_iterator: AsyncIterator[agent_pb2.SessionReply], context: object
    ) -> AsyncIterator[agent_pb2.SessionCall]:
        async for call in self._sessions.serve(Salvaged(request_iterator), caller().name, holder_of(caller())):
            yield call

    async def Enroll(self, request: agent_pb2.EnrollAgentRequest, context: object) -> agent_pb2.EnrollAgentResponse:
        caller = credential()
        # Before the token is used up: an agent that could not connect would need another one.
        require_common_version(request, self._version)
        session = AgentSession(request.agent_id, request.boot_id, self._clock, principal=caller.principal.name)
        await self._registry.accept(session, [Device(id=device_id) for device_id in request.device_ids])
        is_known = self._registry.is_agent_known(request.agent_id)
        secret = await self._tokens.enroll(caller, request.agent_id, is_known=is_known)
        self._identities.enrolled(request.agent_id, caller.principal.name)
        return agent_pb2.EnrollAgentResponse(token=secret, principal=caller.principal.name)

    async def ListAgents(self, request: agent_pb2.ListAgentsRequest, context: object) -> agent_pb2.ListAgentsResponse:
        devices = self._registry.agents()
        identities, following = page_of(self._identities.list(devices), request.page_size, request.page_token)
        agents = [self._agent(identity, devices) for identity in identities]
        return agent_pb2.ListAgentsResponse(agents=agents, next_page_token=following)

    async def BindAgent(self, request: agent_pb2.BindAgentRequest, context: object) -> agent_pb2.Agent:
        identity = await self._identities.bind(request.agent_id, request.principal, by=caller().name)
        self._registry.end_foreign_session(request.agent_id, request.principal)
        return self._agent(identity, self._registry.agents())

    async def RemoveAgent(self, request: agent_pb2.RemoveAgentRequest, context: object) -> agent_pb2.RemoveAgentResponse:
        identity, revoked = await self._retirement.remove_agent(request.agent_id)
        return agent_pb2.RemoveAgentResponse(agent=self._agent(identity, {}), revoked_token_ids=revoked)

    async def UpgradeAgent(
        self, request: agent_pb2.UpgradeAgentRequest, context: object
    ) -> AsyncIterator[agent_pb2.UpgradeAgentProgress]:
        drain_s = _in_range("drain_s", request.drain_s if request.HasField("drain_s") else 3600.0, 0.0, 86_400.0)
        limit_s = _in_range("time_limit_s", request.time_limit_s if request.HasField("time_limit_s") else 60.0, 5.0, 3600.0)
        if self._agent_wheel is not None and request.digest == self._agent_wheel.digest:
            await self._agent_wheel.put(self._store, caller().name, holder_of(caller()))
        if not await self._store.has(request.digest):
            raise artifact_missing(request.digest)
        await self._store.require_whole([request.digest])
        path = self._store.path(request.digest)
        version = await self._read_version(path)
        wheel = common_pb2.Artifact(digest=request.digest, size_bytes=path.stat().st_size)
        progress = self._upgrades.upgrade(
            request.agent_id, wheel, version, drain_s=drain_s, limit_s=limit_s, principal=caller().name
        )  # fmt: skip
        async with aclosing(progress):
            async for message in progress:
                yield message

    def _agent(self, identity: Identity, devices: Mapping[str, Sequence[str]]) -> agent_pb2.Agent:
        session = self._registry.session_of_agent(identity.agent_id)
        return agent_pb2.Agent(
            agent_id=identity.agent_id,
            principal=identity.principal,
            refused_principal=identity.refused,
            connected=self._registry.is_agent_connected(identity.agent_id),
            device_ids=sorted(devices.get(identity.agent_id, ())),
            version=self._registry.version_of_agent(identity.agent_id),
            host="" if session is None else session.host,
            allows_upgrade=session is not None and session.allows_upgrade,
            retired=identity.is_retired,
            outdated=session is not None and session.is_outdated,
        )

    async def _listen(self, session: AgentSession, messages: AsyncIterator[agent_pb2.AgentMessage]) -> None:
        """Process an agent's messages until Goodbye, a timeout, or the end of the stream."""
        try:
            reader = aiter(messages)
            while True:
                async with asyncio.timeout(session.silence_left_s()):
                    await session.wait_read()
                    message = await anext(reader, None)
                if message is None:
                    return
                if message.WhichOneof("message") == "goodbye":
                    self._registry.farewell(session)
                    return
                session.mark_alive()
                await self._take(session, message)
                del message  # up to 32 MiB, until the next one comes
        except TimeoutError:
            log.warning("an agent stopped responding", agent=session.agent_id)
            # The stream of an agent that does not read waits to send, and ends later.
            await self._registry.disconnect(session)
        except Exception:
            log.exception("an agent's message could not be handled", agent=session.agent_id)
        finally:
            session.end()

    async def _take(self, session: AgentSession, message: agent_pb2.AgentMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            await self._registry.heartbeat(session, message.heartbeat)
        elif kind == "run_progress" and self._registry.serves(session, message.run_progress.device_id):
            self._runs.progressed(message.run_progress)
        elif kind == "run_result":
            result = message.run_result
            # A project holds an admin's uploads; the agent's principal holds all others.
            holder = "" if session.is_admin else agent_holder(session.principal)
            is_awaited = self._registry.serves(session, result.device_id) and self._runs.deliver(result, holder)
            if not is_awaited and not self._runs.knows(result.attempt_id):
                # The attempt was abandoned or cancelled: no cell reads the result, so the agent may delete it.
                ack = agent_pb2.Ack(attempt_id=result.attempt_id)
                session.send(agent_pb2.ServerMessage(ack=ack))
        elif kind == "device_update":
            try:
                await self._registry.update(session, message.device_update.device)
            except (AgentConnected, DeviceNotYours, DeviceTooLarge, TooManyDevices) as error:
                # The agent's other devices are not affected.
                log.warning("a device was rejected", agent=session.agent_id, why=error.message)
        elif kind == "device_gone":
            self._registry.gone(session, message.device_gone.device_id, message.device_gone.reason)
        elif kind == "upgrade_progress":
            self._upgrades.progressed(session, message.upgrade_progress)


def _in_range(name: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise error_for("BAD_UPGRADE", f"`{name}` must be {least:g} to {most:g} seconds, got {value:g}.", field=name, got=value)
    return value


class Salvaged:
    """The messages of an agent, with refused ones shortened or replaced where possible; a refused Hello raises."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = aiter(messages)

    def __aiter__(self) -> Salvaged:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                return await anext(self._messages)
            except LimitExceeded as error:
                message = error.refused
                if message is None or (isinstance(message, agent_pb2.AgentMessage) and message.HasField("hello")):
                    raise
                log.warning("an agent's message is too large", kind=message.DESCRIPTOR.name, why=error.message)
                if (salvaged := _shortened(message, error)) is not None:
                    return salvaged


def _shortened(message: Any, error: LimitExceeded) -> Any:
    shorten(message)
    if message.WhichOneof("message" if isinstance(message, agent_pb2.AgentMessage) else "reply") == "run_progress":
        del message.run_progress.log_lines[LIMITS["RunProgress.log_lines"].most :]
    try:
        check(message)
    except LimitExceeded:
        return _failed_result(message, error)
    return message


def _failed_result(message: Any, error: LimitExceeded) -> Any:
    """Return a result with the reason of the refusal in place of the refused result; None for other messages."""
    if isinstance(message, agent_pb2.SessionReply):
        raise error
    if not message.HasField("run_result"):
        return None
    result = message.run_result
    why = error_for("RESULT_TOO_LARGE", f"The agent's result was refused: {error.message}", "Update the agent.", **error.metadata)
    failed = agent_pb2.RunResult(attempt_id=result.attempt_id, device_id=result.device_id, error=to_proto(why))
    return agent_pb2.AgentMessage(run_result=failed)
