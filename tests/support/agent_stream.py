"""The agent's end of one Connect stream, for agents that do only what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from etfarm.v1 import agent_pb2, agent_pb2_grpc

BEAT_S = 3.0
"""After which an agent with nothing to say tells that it lives: whoever is silent for 15 s is taken for dead."""


class AgentStream:
    """A stream that has sent its Hello. Messages are put into `outgoing`; None closes the agent's side.

    Args:
        channel: a connection with an agent's token.
        beat: returns the heartbeat to send where no other message was sent for `beat_s`; None to stay silent.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        hello: agent_pb2.Hello,
        *,
        beat: Callable[[], agent_pb2.Heartbeat | None] = agent_pb2.Heartbeat,
        beat_s: float = BEAT_S,
    ) -> None:
        self.stub = agent_pb2_grpc.AgentServiceStub(channel)
        self.outgoing: asyncio.Queue[agent_pb2.AgentMessage | None] = asyncio.Queue()
        self.outgoing.put_nowait(agent_pb2.AgentMessage(hello=hello))
        self.stream = self.stub.Connect(self._messages(beat, beat_s))

    def send(self, message: agent_pb2.AgentMessage) -> None:
        """Send a message."""
        self.outgoing.put_nowait(message)

    def close(self) -> None:
        """Break the stream, as the end of the agent's process does."""
        self.stream.cancel()
        # Otherwise gRPC's task that takes the messages would wait for the next one.
        self.outgoing.put_nowait(None)

    async def _messages(
        self, beat: Callable[[], agent_pb2.Heartbeat | None], beat_s: float
    ) -> AsyncIterator[agent_pb2.AgentMessage]:
        while True:
            try:
                message = await asyncio.wait_for(self.outgoing.get(), beat_s)
            except TimeoutError:
                if (heartbeat := beat()) is not None:
                    yield agent_pb2.AgentMessage(heartbeat=heartbeat)
                continue
            if message is None:
                return
            yield message
