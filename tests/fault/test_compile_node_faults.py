"""Compilations on a Ray cluster whose node, or whose server, is lost in the middle: the job ends as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from etfarm.v1 import job_pb2
from etfarm.wire import recipes
from tests.support import models
from tests.support.databases import PostgresDatabases
from tests.support.farm import FarmProcess, wait_until
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.node_pools import running_node as running_node
from tests.support.ray_cluster import RayCluster, RayNode
from tests.support.servers import Servers

pytestmark = [
    pytest.mark.slow(reason="launches a Ray cluster whose nodes load the toolchain, and kills them"),
]
pytest.importorskip("ray", reason="pip install 'etfarm[scale]'")

RECIPE = recipes.parse("xnnpack_pt2e_int8_static_per_channel").json
PHASE = "TO_EDGE_TRANSFORM_AND_LOWER"
TAKEOVER_S = 60.0
"""Time within which another server leads, and has started its own actor on a node."""


@pytest.fixture
def node(cluster: RayCluster) -> RayNode:
    """The node, once the actors of another test have ended."""
    node = cluster.nodes[1]
    assert wait_until(lambda: not node.actors(), TAKEOVER_S)
    return node


def runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that nobody has waited for has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def submit(calls: FarmCalls, folder: Path) -> job_pb2.Job:
    """Submit a job that only compiles."""
    data = models.save(models.resnet8, folder / "resnet8.pt2").read_bytes()
    candidate = job_pb2.Candidate(name="resnet8", recipe=RECIPE)
    candidate.model.name = "resnet8"
    candidate.model.methods["forward"].exported_program.CopyFrom(await calls.put(data))
    return await calls.submit(job_pb2.JobSpec(candidates=[candidate]))


async def until_it_lowers(calls: FarmCalls, job: job_pb2.Job) -> None:
    async for event in calls.jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
        if event.progress.phase == PHASE:
            return
    raise AssertionError(f"the job ended before {PHASE}")


async def test_a_compilation_whose_node_is_killed_is_placed_again(
    cluster: RayCluster, node: RayNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.credentials.items():
        monkeypatch.setenv(name, value)
    first = cluster.add_node(cpus=2)  # the one with more free cpus
    with FarmProcess(tmp_path, bundle=False, prewarm=True, serve=("--compile-pool", cluster.address)) as farm:
        farm.start(agents=0)
        log = tmp_path / "serve.log"
        assert wait_until(lambda: log.read_text().count("state='ready'") == 2, 240), log.read_text()
        async with farm_calls(farm.address) as calls:
            job = await submit(calls, tmp_path)
            await until_it_lowers(calls, job)
            first.kill()
            events = await calls.watch(job.id)
    assert events[-1].job_state == job_pb2.JOB_STATE_SUCCEEDED, events[-1]
    assert "starting its task again" in log.read_text()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_another_leader_compiles_what_the_former_one_did_not_end(
    cluster: RayCluster, node: RayNode, tmp_path: Path, postgres_databases: PostgresDatabases, fault: signal.Signals
) -> None:
    with postgres_databases.server.new_database() as url, Servers(tmp_path, url) as servers:
        leader, other = (servers.add("--compile-pool", cluster.address, environment=dict(cluster.credentials)) for _ in range(2))
        async with farm_calls(servers.addresses) as calls:
            job = await submit(calls, tmp_path)
            await until_it_lowers(calls, job)
            (actor,) = node.actors()  # a server that stands by has none
            former = [actor, *actor.children(recursive=True)]
            leader.signal(fault)
            assert wait_until(lambda: not any(map(runs, former)), TAKEOVER_S)
            events = await calls.watch(job.id)
        assert events[-1].job_state == job_pb2.JOB_STATE_SUCCEEDED, events[-1]
        assert "this server leads the farm" in other.log
        if fault == signal.SIGSTOP:
            leader.signal(signal.SIGCONT)
            assert wait_until(lambda: "no longer leads" in leader.log, TAKEOVER_S)
        assert len(node.actors()) == 1
