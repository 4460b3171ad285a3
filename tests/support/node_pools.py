"""Pools of compile nodes on a Ray cluster of the tests' own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from etfarm.server.workers.cluster.node import LEASE_S
from etfarm.server.workers.cluster.nodes import Node
from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.limits import Limits
from tests.support.ray_cluster import RayCluster, running_cluster

TASKS: Final = "tests.support.worker_tasks"
LIMITS: Final = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1)
WAIT_S: Final = 90.0
SOON_S: Final = LEASE_S / 2
"""Time that only an orderly end keeps to."""


@pytest.fixture(scope="module", name="cluster")
def running_node() -> Iterator[RayCluster]:
    """A head, and one node with one cpu."""
    with running_cluster() as cluster:
        cluster.start()
        cluster.add_node()
        yield cluster


@pytest.fixture(scope="module", name="credentials", autouse=True)
def known_credentials(cluster: RayCluster) -> Iterator[None]:
    """The cluster's credentials, and a token, are variables of this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.credentials.items():
            patch.setenv(name, value)
        patch.setenv("ETFARM_TOKEN", "s3cret")
        yield


@contextlib.asynccontextmanager
async def running_pool(cluster: RayCluster, folder: Path, **more: Any) -> AsyncIterator[ClusterPool]:
    """A pool of the cluster's nodes."""
    pool = ClusterPool(address=cluster.address, preload=[TASKS], limits=LIMITS, folder=folder / "jobs", **more)
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


async def until(pool: ClusterPool, condition: Callable[[Node], bool]) -> Node:
    """Wait until a node of the pool meets a condition, and return it."""
    async with asyncio.timeout(WAIT_S):
        await pool.settled(WAIT_S)
        while not (nodes := [node for node in pool.nodes if condition(node)]):
            await pool.changed()
    return nodes[0]


def lingering() -> list[psutil.Process]:
    """Return the grandchildren that `linger` starts."""
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "600"]]


@dataclass(frozen=True)
class Lingering:
    """A task that lingers."""

    run: asyncio.Task[Any]
    tree: list[psutil.Process]
    """Its grandchildren."""
    events: asyncio.Queue[bytes]


async def start_lingering(pool: ClusterPool, on_restart: Callable[[], None] = lambda: None) -> Lingering:
    """Run `linger` until it lingers."""
    before, lingers = {process.pid for process in lingering()}, asyncio.Queue[bytes]()
    task = f"{TASKS}:linger"
    run = asyncio.create_task(pool.run(task, None, deadline_s=120, on_event=lingers.put_nowait, on_restart=on_restart))
    tree: list[psutil.Process] = []
    async with asyncio.timeout(WAIT_S):
        while not tree:  # on a busy machine, its node may be lost at once, and the child is started again
            await lingers.get()
            tree = [process for process in lingering() if process.pid not in before]
    return Lingering(run, tree, lingers)
