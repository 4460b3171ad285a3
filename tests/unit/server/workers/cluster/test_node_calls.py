"""Calls of a node: an error that the service answers is no loss of the node, and all that Ray raises is one."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.cluster.nodes import Node, NodeState
from etfarm.server.workers.cluster.relay import NodeGone, RayNode
from etfarm.server.workers.errors import Defect, child_disk_full
from etfarm.wire.errors import EtfarmError

DEAD = "The actor died unexpectedly before finishing this task.\n\tpid: 7\n\tip: 127.0.0.1\nIts node has died."


@dataclass
class Actor:
    """What Ray returns for an actor, its method and its calls, which a test answers."""

    answer: Future[bytes] = field(default_factory=Future)

    @property
    def call(self) -> Actor:
        return self

    def remote(self, method: str, arguments: bytes, data: bytes) -> Actor:
        return self

    def future(self) -> Future[bytes]:
        return self.answer


def ready_node(defects: list[EtfarmError], reported: list[Node]) -> RayNode:
    node = RayNode(Node("a", "a", "127.0.0.1", 1, NodeState.READY), reported.append, defects.append)
    node.actor = Actor()
    return node


@pytest.mark.parametrize(
    ("error", "is_defect"),
    [(Defect("It", KeyError("x")), True), (child_disk_full("t", "full"), False)],
    ids=["defect", "full disk"],
)
async def test_an_error_of_the_service_is_raised_and_the_node_stays(error: EtfarmError, is_defect: bool) -> None:
    defects: list[EtfarmError] = []
    node = ready_node(defects, [])
    node.actor.answer.set_result(relay_frames.encode_error(error))
    with pytest.raises(EtfarmError, match=error.message[:20]):
        await node.call("poll", {})
    assert node.node.state is NodeState.READY
    assert [defect.reason for defect in defects] == (["INTERNAL"] if is_defect else [])


async def test_what_ray_raises_is_the_loss_of_the_node_with_its_reason() -> None:
    reported: list[Node] = []
    node = ready_node([], reported)
    node.actor.answer.set_exception(RuntimeError(DEAD))
    with pytest.raises(NodeGone):
        await node.call("poll", {})
    assert [each.state for each in reported] == [NodeState.READY, NodeState.LOST]
    assert node.node.detail == "RuntimeError: The actor died unexpectedly before finishing this task. Its node has died."
    assert node.lost.is_set()


async def test_a_call_of_an_earlier_actor_does_not_lose_the_node_again() -> None:
    node = ready_node([], [])
    earlier = node.actor
    call = asyncio.create_task(node.call("poll", {}))
    await asyncio.sleep(0)  # it waits for the earlier actor
    node.actor = Actor()
    earlier.answer.set_exception(RuntimeError(DEAD))
    with pytest.raises(NodeGone):
        await call
    assert node.node.state is NodeState.READY


async def test_a_call_without_an_actor_is_refused_at_once() -> None:
    node = ready_node([], [])
    node.actor = None
    with pytest.raises(NodeGone, match="has ended"):
        await node.call("poll", {})
