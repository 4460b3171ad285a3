"""The Connect stream to the server, with Hello, heartbeats, runs and results, over as many connections as necessary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Final

import grpc

from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.daemon.agent import Agent
from etfarm.device_agents.daemon.device_choice import DeviceChoice
from etfarm.device_agents.daemon.upgrade import Upgrader, report_connected
from etfarm.v1 import agent_pb2, device_pb2
from etfarm.v1.agent_pb2_grpc import AgentServiceStub
from etfarm.wire.errors import EtfarmError, Fault, Kind, error_of
from etfarm.wire.farm_channel import NEW_TOKEN, farm_channel, refused_by_farm
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from etfarm.wire.shielding import end_tasks
from etfarm.wire.status import from_rpc_error

log = logging.getLogger(__name__)

PrintLine = Callable[[str], None]

_FINAL_KINDS: Final = frozenset({Kind.UNAUTHENTICATED, Kind.PERMISSION_DENIED})
"""Kinds of errors that further tries cannot resolve."""
_FINAL_AT_FIRST: Final = frozenset({Kind.ALREADY_EXISTS, Kind.UNIMPLEMENTED, Kind.INVALID_ARGUMENT})
"""Kinds of errors that end an agent before its first Welcome. Later, ALREADY_EXISTS only means that the server still considers
the agent's own broken stream alive."""
PROTOCOL_UNSUPPORTED: Final = "PROTOCOL_UNSUPPORTED"
"""The reason with which a server refuses the protocol of a Hello."""
_LEAST_HEARTBEAT_S: Final = 0.05
_GOODBYE_S: Final = 0.5
"""Seconds for sending a Goodbye."""
_RACE: Final = "Internal error from Core"
"""grpc.aio's message if the server refused the stream before Hello was sent; the next try gets the server's own error."""
_LOG_AGAIN_S: Final = 60.0
"""Seconds after which the same connection failure is logged again; a new one is logged at once."""


class Outgoing:
    """The messages for the server. They go to the current connection; without one they are dropped."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[agent_pb2.AgentMessage | None] | None = None

    def __call__(self, message: agent_pb2.AgentMessage) -> None:
        if self._queue is not None:
            self._queue.put_nowait(message)

    @property
    def is_behind(self) -> bool:
        """Whether messages accumulate because the link is not accepting any."""
        return self._queue is not None and self._queue.qsize() > 100

    def open(self, queue: asyncio.Queue[agent_pb2.AgentMessage | None]) -> None:
        """Put messages into `queue` from now on."""
        self._queue = queue

    def close(self) -> None:
        """Drop messages from now on."""
        self._queue = None


class ServerConnection:
    """The agent's connection to the server, reopened whenever it ends.

    Args:
        config: the agent's settings.
        agent: receives the server's messages.
        upgrader: receives the server's offers of new versions.
        agent_id: the agent's UUID.
        choice: the id of the device, which a refusal may change; None if the agent does not serve its machine.
        outgoing: receives the agent's messages.
        print_line: prints a line for people when a connection is established.
        version: the agent's version.
        host: this machine's name.
        boot: the id of this machine's boot; empty for phones.
        withheld: why the agent has no token to send, if it has one for another address.
    """

    def __init__(
        self,
        config: AgentConfig,
        agent: Agent,
        upgrader: Upgrader,
        agent_id: str,
        choice: DeviceChoice | None,
        outgoing: Outgoing,
        print_line: PrintLine,
        *,
        version: str,
        host: str,
        boot: str,
        withheld: EtfarmError | None = None,
    ) -> None:
        self._withheld = withheld
        self._config = config
        self._agent = agent
        self._upgrader = upgrader
        self._agent_id = agent_id
        self._choice = choice
        self._outgoing = outgoing
        self._print_line = print_line
        self._version = version
        self._host = host
        self._boot = boot
        self._was_welcome = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve the farm until `stop`, then send Goodbye.

        Raises:
            EtfarmError: the server refuses this agent for good.
        """
        server = self._config.access.server
        pauses = self._config.pauses()
        loop = asyncio.get_running_loop()
        logged, logged_s = "", 0.0
        while not stop.is_set():
            connection = _Connection()
            try:
                refusal = await self._connect(connection, stop)
            except EtfarmError as error:
                refusal = error
            if stop.is_set():
                return
            if refusal is not None and self._gives_way(refusal):
                continue
            if refusal is not None and self._is_final(refusal):
                raise await self._cause_of(refusal)
            why = str(refusal) if refusal is not None else f"The server at {server} closed the stream."
            if connection.welcomed:
                pauses, logged = self._config.pauses(), ""
            pause = next(pauses)
            if _RACE in why:
                log.debug("%s", why)
            elif why != logged or loop.time() - logged_s > _LOG_AGAIN_S:
                log.warning("%s Trying again.", why)
                logged, logged_s = why, loop.time()
            try:
                async with asyncio.timeout(pause):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _cause_of(self, refusal: EtfarmError) -> EtfarmError:
        """Return why the server refuses this agent for good: it does not know which farm the agent belongs to."""
        if refusal.kind is not Kind.UNAUTHENTICATED:
            return refusal
        error = self._withheld or await refused_by_farm(self._config.access, refusal)
        if error is refusal and error.reason == Kind.UNAUTHENTICATED.value and self._config.access.proofs is not None:
            why = "The server no longer knows this agent's own token: an admin has retired the board, or revoked the token."
            return error_of(
                Fault.USER,
                refusal.reason,
                why,
                f"To let it serve again, {NEW_TOKEN.removeprefix('otherwise ')}",
                kind=refusal.kind,
            )
        return error

    def _gives_way(self, refusal: EtfarmError) -> bool:
        """Return whether the device has another id now, under which the server may accept it."""
        if self._choice is None:
            return False
        former = self._choice.id
        if not self._choice.give_way(refusal):
            return False
        self._agent.rename(former, self._choice.id)
        return True

    def _is_final(self, error: EtfarmError) -> bool:
        if error.kind in _FINAL_KINDS or error.reason == PROTOCOL_UNSUPPORTED:
            return True
        return not self._was_welcome and error.kind in _FINAL_AT_FIRST

    async def _connect(self, connection: _Connection, stop: asyncio.Event) -> EtfarmError | None:
        """Keep one connection from Hello to its end or, after `stop`, to Goodbye; return the error that ended it, if any.

        Each connection has its own channel: an old channel would wait for its own back-off before it connects again.
        """
        async with AsyncExitStack() as opened:
            if (channel := await self._open(opened, stop)) is None:
                return None
            queue = connection.queue
            hello = self._hello()
            connection.announced = {device.id: device for device in hello.devices}
            queue.put_nowait(agent_pb2.AgentMessage(hello=hello))
            call = AgentServiceStub(channel).Connect(_messages(queue))
            reader = asyncio.create_task(self._read(call, connection), name="connection")
            stopped = asyncio.create_task(stop.wait(), name="stop")
            try:
                await asyncio.wait({reader, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not reader.done() and connection.welcomed:
                    queue.put_nowait(agent_pb2.AgentMessage(goodbye=agent_pb2.Goodbye(reason="the agent was stopped")))
                    queue.put_nowait(None)
                    await asyncio.wait({reader}, timeout=_GOODBYE_S)
                return reader.result() if reader.done() else None
            finally:
                self._outgoing.close()
                call.cancel()
                # Otherwise gRPC's task that takes the messages would wait for the next one forever.
                queue.put_nowait(None)
                tasks = [reader, stopped, *connection.tasks]
                await end_tasks(*tasks)

    async def _open(self, opened: AsyncExitStack, stop: asyncio.Event) -> grpc.aio.Channel | None:
        """Return a channel to the farm, which `opened` closes; None after `stop`."""
        opening = asyncio.create_task(opened.enter_async_context(farm_channel(self._config.access)), name="opening")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return opening.result() if opening.done() else None
        finally:
            await end_tasks(opening, stopped)

    def _hello(self) -> agent_pb2.Hello:
        return agent_pb2.Hello(
            agent_id=self._agent_id,
            protocol_version=PROTOCOL_VERSION,
            oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
            allows_upgrade=self._upgrader.is_allowed,
            upgrade=self._upgrader.outcome(),
            agent_version=self._version,
            host=self._host,
            devices=self._agent.devices,
            active_attempts=self._agent.active,
            unacknowledged_attempts=self._agent.outbox.waiting,
            boot_id=self._boot,
        )

    async def _read(self, call: _Call, connection: _Connection) -> EtfarmError | None:
        """Handle the server's messages until the stream ends; return the error that ended it, if any.

        The exception must not propagate: its traceback would keep the call in a reference cycle, and an uncollected call keeps
        its closed channel connecting and pinging.
        """
        try:
            async for message in call:
                self._take(message, connection)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, server=self._config.access.server)
        return None

    def _take(self, message: agent_pb2.ServerMessage, connection: _Connection) -> None:
        """Handle one message."""
        kind = message.WhichOneof("message")
        if kind == "welcome":
            self._welcome(message.welcome, connection)
        elif kind == "start_run":
            self._agent.start(message.start_run)
        elif kind == "cancel_run":
            self._agent.cancel(message.cancel_run.attempt_id, message.cancel_run.reason)
        elif kind == "ack":
            self._agent.acknowledge(message.ack.attempt_id)
        elif kind == "upgrade":
            self._upgrader.start(message.upgrade)
        elif kind == "drain":
            log.info("the server sends no new runs to %s", message.drain.device_id)
        else:
            log.warning("the server sent a message that this agent does not know; it may be newer")

    def _welcome(self, welcome: agent_pb2.Welcome, connection: _Connection) -> None:
        if connection.welcomed:
            return
        connection.welcomed = self._was_welcome = True
        if self._choice is not None:
            self._choice.keep()
        report_connected()
        names = ", ".join(f"{device.name} ({device.id})" for device in self._agent.devices)
        self._print_line(
            f"etfarm agent: connected to {self._config.access.server} {f'as {names}' if names else 'without a device yet'}"
        )
        self._outgoing.open(connection.queue)
        # Devices attached or detached since Hello, which the server does not know yet.
        now = {device.id: device for device in self._agent.devices}
        for device_id in connection.announced.keys() - now.keys():
            self._outgoing(agent_pb2.AgentMessage(device_gone=agent_pb2.DeviceGone(device_id=device_id)))
        for device_id, device in now.items():
            if connection.announced.get(device_id) != device:
                self._outgoing(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=device)))
        for result in self._agent.outbox.waiting.values():
            self._outgoing(agent_pb2.AgentMessage(run_result=result))
        interval_s = max(welcome.heartbeat_interval_s, _LEAST_HEARTBEAT_S)
        connection.tasks.append(asyncio.create_task(self._beat(interval_s), name="heartbeats"))

    async def _beat(self, interval_s: float) -> None:
        """Send a heartbeat every interval, the first one at once."""
        while True:
            # Unsent messages already prove that the agent is alive, and old telemetry is useless.
            if not self._outgoing.is_behind:
                try:
                    heartbeat = agent_pb2.Heartbeat(telemetry=self._agent.telemetry())
                    self._outgoing(agent_pb2.AgentMessage(heartbeat=heartbeat))
                except Exception:
                    # A faulty sensor must not make the farm consider the agent dead.
                    log.exception("telemetry cannot be read")
                    self._outgoing(agent_pb2.AgentMessage(heartbeat=agent_pb2.Heartbeat()))
            await asyncio.sleep(interval_s)


_Call = grpc.aio.StreamStreamCall[agent_pb2.AgentMessage, agent_pb2.ServerMessage]


class _Connection:
    """The state of one connection."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[agent_pb2.AgentMessage | None] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        self.welcomed = False
        self.announced: dict[str, device_pb2.Device] = {}
        """The devices in the connection's Hello."""


async def _messages(queue: asyncio.Queue[agent_pb2.AgentMessage | None]) -> AsyncIterator[agent_pb2.AgentMessage]:
    """Yield the queue's messages until None."""
    while (message := await queue.get()) is not None:
        yield message
