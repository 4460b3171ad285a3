"""What a pool of compile nodes keeps to, one pool for all tests: files, events, deadlines, errors, and nodes that end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from etfarm.server.workers.cluster.node import LEASE_S
from etfarm.server.workers.cluster.nodes import Node, NodeState
from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.errors import ChildDied, ChildTimedOut
from etfarm.wire.errors import EtfarmError, FarmError, Fault
from tests.support.node_pools import SOON_S, TASKS, WAIT_S, known_credentials, running_node, running_pool, start_lingering, until  # noqa: F401 - fixtures
from tests.support.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.slow(reason="launches a Ray cluster, and kills nodes of it"),
    pytest.mark.asyncio(loop_scope="module"),
]
pytest.importorskip("ray", reason="pip install 'etfarm[scale]'")


@pytest.fixture(scope="module")
def reported() -> list[Node]:
    """What the module's pool has reported."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_pool(
    cluster: RayCluster, credentials: None, reported: list[Node], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ClusterPool]:
    """A pool whose nodes are kept: each connection to Ray starts five processes, which load Ray or the node's code."""
    async with running_pool(cluster, tmp_path_factory.mktemp("pool"), report=reported.append) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def pool(module_pool: ClusterPool, reported: list[Node]) -> ClusterPool:
    """The module's pool, once the cluster's first node is ready, and none that another test has ended."""
    async with asyncio.timeout(WAIT_S):
        while sum(node.state is NodeState.READY for node in module_pool.nodes) != 1:
            await module_pool.changed()
    reported.clear()
    return module_pool


def actors(cluster: RayCluster) -> list[psutil.Process]:
    return [actor for node in cluster.nodes for actor in node.actors()]


async def test_files_events_log_and_result_are_those_of_a_local_child(pool: ClusterPool, tmp_path: Path) -> None:
    file = tmp_path / "input.txt"
    file.write_text("of the server")
    request = {"here": file, "absent": tmp_path / "absent"}
    for _ in range(2):  # the second time, the node has the file
        events: list[bytes] = []
        run = await pool.run(f"{TASKS}:read_files", request, deadline_s=60, on_event=events.append)
        async with run as finished:
            assert json.loads(finished.result) == {"here": "of the server", "absent": None}
            assert (finished.folder / "file.txt").read_text() == "kept"
            assert finished.peak_rss_bytes > 1 << 20
        assert events == [b'{"stage": "ONE", "phase": "START"}']
        assert not finished.folder.exists()
    log: list[str] = []
    async with await pool.run(f"{TASKS}:talk", None, deadline_s=60, on_log=log.append):
        assert sorted(log) == ["from C", "from Python", "from a raw write", "from a subprocess", "from stderr"]


async def test_log_lines_arrive_while_the_child_runs(pool: ClusterPool) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    run = asyncio.create_task(pool.run(f"{TASKS}:print_and_wait", None, deadline_s=60, on_log=lines.put_nowait))
    async with asyncio.timeout(WAIT_S):
        assert await lines.get() == "while it runs"
    assert not run.done()
    run.cancel()
    await asyncio.wait({run})


async def test_a_large_file_arrives_whole_in_both_directions(pool: ClusterPool, tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(os.urandom(9_000_001))
    async with await pool.run(f"{TASKS}:copy_file", file, deadline_s=60) as finished:
        assert (finished.folder / "copy").read_bytes() == file.read_bytes()


async def test_a_child_on_a_node_sees_neither_tokens_nor_a_network(pool: ClusterPool) -> None:
    jail = await pool.describe_jail()
    assert not jail.missing
    async with await pool.run(f"{TASKS}:environment", None, deadline_s=60) as finished:
        assert not [name for name in json.loads(finished.result) if "TOKEN" in name or name.startswith("RAY_")]


async def test_cancelling_ends_the_child_on_its_node_within_a_second(pool: ClusterPool) -> None:
    lingers = await start_lingering(pool)
    start_s = time.monotonic()
    lingers.run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lingers.run
    psutil.wait_procs(lingers.tree, timeout=5)
    assert time.monotonic() - start_s < 1
    assert not any(process.is_running() for process in lingers.tree)
    async with await pool.run(f"{TASKS}:echo", 1, deadline_s=60) as finished:  # its place is free again
        assert finished.result == b"1"


async def test_deadlines_end_a_child_and_name_the_stage(pool: ClusterPool) -> None:
    with pytest.raises(ChildTimedOut) as whole:
        await pool.run(f"{TASKS}:spin", None, deadline_s=1)
    assert whole.value.metadata["clock"] == "wall"
    with pytest.raises(ChildTimedOut) as stage:
        await pool.run(f"{TASKS}:hang_in_the_second_stage", None, deadline_s=60, stage_deadline_s=2)
    assert (stage.value.stage, stage.value.metadata["clock"]) == ("SECOND", "stage")


async def test_errors_and_deaths_are_those_of_a_local_child(pool: ClusterPool) -> None:
    with pytest.raises(EtfarmError) as refused:
        await pool.run(f"{TASKS}:refuse", None, deadline_s=60)
    assert (refused.value.fault, refused.value.reason, refused.value.stage) == (Fault.USER, "TOO_TALL", "MEASURE")
    with pytest.raises(ChildDied) as died:
        await pool.run(f"{TASKS}:crash", int(signal.SIGSEGV), deadline_s=60)
    assert died.value.metadata["signal"] == "SIGSEGV"
    assert died.value.stage == "TO_EXECUTORCH"
    assert "last words" in died.value.metadata["log"]


async def test_a_task_whose_node_is_killed_is_placed_on_another(pool: ClusterPool, cluster: RayCluster) -> None:
    (old,) = [node for node in pool.nodes if node.state is NodeState.READY]
    # Two cpus, so that the task goes to the new node.
    node = cluster.add_node(cpus=2)
    try:
        new = await until(pool, lambda node: node.id != old.id and node.state is NodeState.READY)
        restarts: list[None] = []
        lingers = await start_lingering(pool, lambda: restarts.append(None))
        node.kill()
        async with asyncio.timeout(WAIT_S):
            await lingers.events.get()
        assert len(restarts) == 1
        assert {each.id: each.state for each in pool.nodes}[new.id] is NodeState.LOST
        lingers.run.cancel()
        await asyncio.wait({lingers.run})
    finally:
        node.end()


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "its worker process has died|is unavailable"), (signal.SIGSTOP, "It did not answer for 30 s.")],
    ids=["killed", "stopped"],
)
async def test_a_node_whose_actor_fails_is_lost_for_that_reason_and_taken_again(
    cluster: RayCluster, pool: ClusterPool, reported: list[Node], number: signal.Signals, reason: str
) -> None:
    first = await until(pool, lambda node: node.state is NodeState.READY)
    lingers = await start_lingering(pool)
    for actor in actors(cluster):
        actor.send_signal(number)
    lost = await until(pool, lambda node: node.id == first.id and node.state is NodeState.LOST)
    assert re.search(reason, lost.detail)
    counted = pool.measure().nodes
    assert counted["ready"] == 0
    assert counted["lost"] >= 1  # the cluster may still list a node that another test has ended
    async with asyncio.timeout(WAIT_S):
        await lingers.events.get()  # of the child that was started again
    assert [node.id for node in pool.nodes if node.state is NodeState.READY] == [first.id]
    _, alive = psutil.wait_procs(lingers.tree, timeout=SOON_S)
    assert not alive
    lingers.run.cancel()
    await asyncio.wait({lingers.run})
    if number is signal.SIGKILL:  # again, while nothing runs there
        for actor in actors(cluster):
            actor.kill()
        await until(pool, lambda node: node.id == first.id and node.state is NodeState.LOST)
    assert NodeState.REFUSED not in {node.state for node in reported}


async def test_a_node_whose_raylet_is_killed_is_lost_without_remains_and_is_itself_again_when_it_returns(
    cluster: RayCluster, pool: ClusterPool, reported: list[Node]
) -> None:
    node = cluster.add_node(cpus=2)
    try:
        killed = await until(pool, lambda node: node.cpus == 2 and node.state is NodeState.READY)
        lingers = await start_lingering(pool)
        os.kill(node.pids["raylet"], signal.SIGKILL)
        _, alive = psutil.wait_procs(lingers.tree, timeout=LEASE_S)
        assert not alive
        await until(pool, lambda node: node.id == killed.id and node.state is NodeState.LOST)
        lingers.run.cancel()
        await asyncio.wait({lingers.run})
        node.end()
        node = cluster.add_node(cpus=2)
        back = await until(pool, lambda node: node.cpus == 2 and node.state is NodeState.READY)
        assert (back.host, back.address) == (killed.host, killed.address)
        assert killed.id not in {node.id for node in pool.nodes}
        assert pool.measure().nodes["lost"] == 0
    finally:
        node.end()
    assert {each.state for each in reported if each.id == killed.id} == {NodeState.PREPARING, NodeState.READY, NodeState.LOST}


async def test_a_bug_on_a_node_is_reported_once_and_costs_no_node(cluster: RayCluster, pool: ClusterPool) -> None:
    (ready,) = [node for node in pool.nodes if node.state is NodeState.READY]
    folders = list(cluster.folder.glob("etfarm-nodes-*/node-*/children"))
    assert folders
    for children in folders:
        children.rename(children.with_name("gone"))  # what no code expects
    restarts: list[None] = []
    try:
        with capture_logs() as logged, pytest.raises(FarmError, match="FileNotFoundError") as raised:
            await pool.run(f"{TASKS}:echo", 1, deadline_s=60, on_restart=lambda: restarts.append(None))
    finally:
        for children in folders:
            children.with_name("gone").rename(children)
    assert (raised.value.reason, restarts) == ("INTERNAL", [])
    (line,) = logged
    assert line["event"] == "a compile node failed because of a bug"
    assert "in begin" in line["traceback"]
    assert ready in pool.nodes


async def test_a_killed_connector_is_replaced(pool: ClusterPool) -> None:
    assert pool.connector_pid is not None
    lingers = await start_lingering(pool)
    first = pool.connector_pid
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await lingers.events.get()
    assert pool.connector_pid != first
    lingers.run.cancel()
    await asyncio.wait({lingers.run})


async def test_an_idle_pool_loses_the_nodes_of_a_killed_connector_and_connects_again(pool: ClusterPool) -> None:
    assert pool.connector_pid is not None
    os.kill(pool.connector_pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while any(node.state is not NodeState.LOST for node in pool.nodes):
            await pool.changed()
        while not any(node.state is NodeState.READY for node in pool.nodes):
            await pool.changed()
