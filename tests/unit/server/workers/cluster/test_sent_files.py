"""Files that several children of a node need: sent once, while those that wait for them keep their places."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.workers.cluster import node as nodes
from etfarm.server.workers.cluster import relay, relay_frames
from etfarm.server.workers.cluster.node import NodeService
from etfarm.server.workers.cluster.nodes import Node, NodeState
from etfarm.server.workers.cluster.relay import RayNode
from etfarm.server.workers.limits import Limits

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()
PIECE_BYTES = 1024


@dataclass
class Reference:
    """What Ray returns for a call."""

    answer: Future[bytes]

    def future(self) -> Future[bytes]:
        return self.answer


@dataclass
class Actor:
    """A node's service without Ray between."""

    service: NodeService
    pause_s: float = 0.0
    calls: list[str] = field(default_factory=list)
    writing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def call(self) -> Actor:
        return self

    def remote(self, method: str, arguments: bytes, data: bytes) -> Reference:
        self.calls.append(method)

        async def answer() -> bytes:
            if method == "write":
                self.writing.set()
                await asyncio.sleep(self.pause_s)
            return await self.service.call(method, arguments, data)

        return Reference(asyncio.run_coroutine_threadsafe(answer(), asyncio.get_running_loop()))


@pytest.fixture
async def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Actor]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(relay_frames, "PIECE_BYTES", PIECE_BYTES)
    settings = {"preload": [], "limits": asdict(Limits()), "concurrency": 4, "required": False}
    yield Actor(NodeService(json.dumps(settings).encode()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / DIGEST
    path.write_bytes(DATA)
    return path


async def opened(actor: Actor, *children: str) -> RayNode:
    node = RayNode(Node("a", "a", "127.0.0.1", 4, NodeState.READY), lambda _: None)
    node.actor = actor
    for child in children:
        assert json.loads(await node.call("open", {"child": child, "task": "t", "files": {DIGEST: len(DATA)}})) == [DIGEST]
    return node


async def send(node: RayNode, child: str, file: Path) -> Any:
    await relay._send_file(node, child, DIGEST, len(DATA), file)


async def test_a_file_that_several_children_need_is_sent_once(actor: Actor, file: Path) -> None:
    node = await opened(actor, "a", "b", "c")
    await asyncio.gather(*(send(node, child, file) for child in "abc"))
    assert actor.calls.count("write") == len(DATA) // PIECE_BYTES
    assert json.loads(await node.call("open", {"child": "d", "task": "t", "files": {DIGEST: len(DATA)}})) == []


async def test_a_file_whose_sender_was_cancelled_is_sent_by_the_next_child(actor: Actor, file: Path) -> None:
    node = await opened(actor, "a", "b")
    actor.pause_s = 0.05
    first, second = (asyncio.create_task(send(node, child, file)) for child in "ab")
    await actor.writing.wait()
    first.cancel()
    await second
    assert json.loads(await node.call("open", {"child": "c", "task": "t", "files": {DIGEST: len(DATA)}})) == []


async def test_a_child_that_waits_for_a_file_is_not_abandoned(actor: Actor, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await opened(actor, "a", "b")
    monkeypatch.setattr(nodes, "LEASE_S", 2.0)
    actor.pause_s = 0.25  # ten pieces take longer than the lease
    watch = asyncio.create_task(actor.service._end_abandoned())
    try:
        await asyncio.gather(send(node, "a", file), send(node, "b", file))
        for child in "ab":
            where = {"child": child, "digest": DIGEST, "offset": 0, "size": len(DATA)}
            await node.call("write", where, DATA)  # refused for a child that was ended
    finally:
        watch.cancel()
    assert actor.calls.count("write") == len(DATA) // PIECE_BYTES + 2
