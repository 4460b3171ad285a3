"""One connection of an agent: what waits to be read."""

from __future__ import annotations

import asyncio

from etfarm.server.devices.session import MAX_UNREAD, AgentSession
from etfarm.v1 import agent_pb2


async def test_room_comes_once_the_agent_reads_or_the_session_ends() -> None:
    session = AgentSession("board", "", lambda: 0.0)
    for _ in range(MAX_UNREAD):
        await session.wait_read()
        session.send(agent_pb2.ServerMessage())
    reading = asyncio.create_task(session.wait_read())
    await asyncio.sleep(0)
    assert not reading.done()
    await anext(aiter(session.outgoing()))
    await reading
    session.send(agent_pb2.ServerMessage())
    waiting = asyncio.create_task(session.wait_read())
    await asyncio.sleep(0)
    session.end()
    await waiting
