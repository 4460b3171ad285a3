"""What else happens in a random schedule of a farm that compiles on a Ray cluster: the ends of what compiles there."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

import psutil

from tests.fault.actions import Action, action, kill, submit_compilation
from tests.fault.shaken_farm import World
from tests.support.farm import wait_until
from tests.support.ray_cluster import RayCluster, RayNode

NODE_ACTIONS: Final[dict[Action, int]] = {}
"""The actions with their odds."""
BUSY_S: Final = 15.0
"""Within which a compilation that was submitted runs, if a node is ready."""


@action(8, NODE_ACTIONS)
async def kill_on_a_node(world: World) -> str:
    """Submit a compilation, and kill a process of a node that compiles, or all of them; start the node again if Ray has ended."""
    await submit_compilation(world)
    assert world.engines is not None
    assert world.engines.cluster is not None
    cluster = world.engines.cluster
    await asyncio.to_thread(wait_until, lambda: bool(_list_compiling(cluster)), BUSY_S)
    if not (busy := _list_compiling(cluster)):
        return "nothing compiles on a node"
    node, pids = world.draws.choice(busy)
    what = world.draws.choice(["a process below an actor", "an actor", "a raylet", "a node"])
    if what == "a process below an actor":
        return kill(world.draws.choice(pids), what)
    if what == "an actor":
        return "; ".join(kill(actor.pid, what) for actor in node.actors())
    if what == "a raylet":
        os.kill(node.pids["raylet"], signal.SIGKILL)
        await asyncio.sleep(world.draws.uniform(0.0, 3.0))
        await asyncio.to_thread(node.end)
    else:
        await asyncio.to_thread(node.kill)
    await asyncio.to_thread(cluster.add_node)
    return f"kill -9 of {what}, and another one"


def _list_compiling(cluster: RayCluster) -> list[tuple[RayNode, list[int]]]:
    """Return the nodes on which children run, with the processes below their actors."""
    return [(node, pids) for node in cluster.nodes for actor in node.actors() if (pids := _list_below(actor))]


def _list_below(actor: psutil.Process) -> list[int]:
    """Return the processes below an actor if children run there; none if there is only the forkserver."""
    try:
        below = {process.pid for process in actor.children(recursive=True)}
        return sorted(below) if below - {process.pid for process in actor.children()} else []
    except psutil.NoSuchProcess:
        return []
