"""Compilations and analyses on the nodes of a Ray cluster, which the tests launch on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from etfarm.server.workers.cluster import pool as cluster_pool
from etfarm.server.workers.cluster.node import LEASE_S
from etfarm.server.workers.cluster.nodes import Node, NodeState
from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.server.workers.errors import WorkersDown
from etfarm.wire.errors import Fault
from etfarm.wire.names import CONFIG_VARIABLE
from tests.support import models
from tests.support.farm import FarmProcess, etfarm
from tests.support.node_pools import (  # noqa: F401 - fixtures
    LIMITS,
    SOON_S,
    TASKS,
    WAIT_S,
    known_credentials,
    lingering,
    running_node,
    running_pool,
    start_lingering,
    until,
)
from tests.support.ray_cluster import RayCluster, RayNode
from tests.support.refusals import refuses

pytestmark = [
    pytest.mark.slow(reason="launches a Ray cluster, and kills nodes of it"),
]
pytest.importorskip("ray", reason="pip install 'etfarm[scale]'")

ROOT = Path(__file__).resolve().parents[2]
POOL_METRICS = ("etfarm_compile_slots", "etfarm_compile_running", "etfarm_compile_waiting", "etfarm_compile_nodes")
REFUSED_S = 20.0
"""Time within which a node is refused, with a margin for a busy machine; Ray itself tries for 60 s."""


@pytest.mark.remedy("NO_COMPILE_NODE")
async def test_without_a_ready_node_a_task_fails_as_the_farms_fault(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_pool, "NODE_WAIT_S", 10.0)
    described = json.dumps({"torch": "1.0", "Python": "3.11"})
    monkeypatch.setattr(cluster_pool.versions, "describe", lambda: described)  # of a server with another torch
    async with running_pool(cluster, tmp_path) as pool:
        await until(pool, lambda node: node.state is NodeState.REFUSED)
        with refuses("NO_COMPILE_NODE") as none:
            await pool.run(f"{TASKS}:echo", 1, deadline_s=60)
    assert none.value.fault is Fault.FARM
    assert "the server has 1.0" in none.value.message
    monkeypatch.undo()  # the node has the server's versions
    async with running_pool(cluster, tmp_path / "again") as pool, await pool.run(f"{TASKS}:echo", 1, deadline_s=60) as finished:
        assert finished.result


@contextlib.contextmanager
def other_torch(cluster: RayCluster, folder: Path) -> Iterator[RayNode]:
    """A node whose Python has another torch, by its metadata."""
    metadata = folder / "site" / "torch-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    python_path = f"{folder / 'site'}:{ROOT}"
    node = cluster.add_node(variables={"PYTHONPATH": python_path})
    try:
        yield node
    finally:
        node.end()


async def test_a_node_with_another_torch_is_refused_by_name(cluster: RayCluster, tmp_path: Path) -> None:
    with other_torch(cluster, tmp_path):
        async with running_pool(cluster, tmp_path) as pool:
            refused = await until(pool, lambda node: "torch 9.9.9, and the server has 2." in node.detail)
            assert refused.state is NodeState.REFUSED
            async with await pool.run(f"{TASKS}:echo", 1, deadline_s=60):
                pass  # on the other node


def bare_environment(folder: Path) -> Path:
    """Create an environment without packages. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def virtual_environment(folder: Path) -> Path:
    """Create an environment with this one's packages. Return its Python."""
    python = bare_environment(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths))
    return python


async def test_a_node_compiles_in_the_environment_that_the_server_names(cluster: RayCluster, tmp_path: Path) -> None:
    python = virtual_environment(tmp_path / "environment")
    async with (
        running_pool(cluster, tmp_path, python=str(python)) as pool,
        asyncio.timeout(WAIT_S),
        await pool.run(f"{TASKS}:prefix", None, deadline_s=60) as finished,
    ):
        assert finished.result.decode() == str(tmp_path / "environment")


async def until_known(pool: ClusterPool) -> None:
    """Wait until the cluster has listed a node."""
    async with asyncio.timeout(WAIT_S):
        while not pool.nodes:
            await pool.changed()


async def refused_soon(pool: ClusterPool) -> Node:
    """Return the node that is refused within REFUSED_S of its being known."""
    await until_known(pool)
    start_s = time.monotonic()
    refused = await until(pool, lambda node: node.state is NodeState.REFUSED)
    assert time.monotonic() - start_s < REFUSED_S
    return refused


async def test_a_python_that_is_not_there_is_refused_soon_and_used_once_it_is(cluster: RayCluster, tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    async with running_pool(cluster, tmp_path, python=str(python)) as pool:
        refused = await refused_soon(pool)
        assert refused.detail.startswith(f"It has no {python} that it can execute. Create the environment")
        virtual_environment(tmp_path / "environment")
        await until(pool, lambda node: node.state is NodeState.READY)


async def test_a_python_without_etfarm_is_refused_soon(cluster: RayCluster, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "bare")
    async with running_pool(cluster, tmp_path, python=str(python)) as pool:
        refused = await refused_soon(pool)
    assert refused.detail.startswith(f"Its {python} has torch (not installed), and the server has 2.")
    assert "etfarm (not installed)" in refused.detail


async def test_a_node_that_lacks_a_measure_is_refused_where_the_jail_is_required(cluster: RayCluster, tmp_path: Path) -> None:
    node = cluster.add_node(refused=["mount"])
    try:
        async with running_pool(cluster, tmp_path, required=True) as pool:
            refused = await until(pool, lambda node: "mounts" in node.detail)
            assert refused.state is NodeState.REFUSED
        async with running_pool(cluster, tmp_path, required=False) as pool:
            accepted = await until(pool, lambda node: node.state is NodeState.READY and bool(node.jail))
            assert [text.partition(":")[0] for text in accepted.jail] == ["mounts"]
    finally:
        node.end()


async def test_a_wrong_token_is_a_clear_error(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    async with running_pool(cluster, tmp_path) as pool:
        with pytest.raises(WorkersDown) as refused:
            async with asyncio.timeout(WAIT_S):
                await pool.run(f"{TASKS}:echo", 1, deadline_s=60)
    assert cluster.address in refused.value.message
    assert "RAY_AUTH_TOKEN" in refused.value.remedy


async def test_a_later_leader_ends_the_children_of_a_former_one(cluster: RayCluster, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:

        async def lead(term: int) -> ClusterPool:
            tenure = Tenure.of_leader("secret", term)
            return await stack.enter_async_context(running_pool(cluster, tmp_path / str(term), tenure=tenure))

        former = await lead(1)
        lingers = await start_lingering(former)
        leader = await lead(2)
        await until(leader, lambda node: node.state is NodeState.READY)
        _, alive = psutil.wait_procs(lingers.tree, timeout=SOON_S)
        assert not alive
        lingers.run.cancel()
        again = await lead(1)  # as a former leader whose process stood still
        refused = await until(again, lambda node: node.state is NodeState.REFUSED)
        assert "a later leader" in refused.detail
        async with await leader.run(f"{TASKS}:echo", 1, deadline_s=60) as finished:
            assert finished.result == b"1"


@pytest.mark.parametrize(("lost", "within_s"), [("server", SOON_S), ("machine", 2 * LEASE_S)])
def test_children_end_on_their_nodes_when_the_server_is_killed(
    cluster: RayCluster, tmp_path: Path, lost: str, within_s: float
) -> None:
    """A connector whose server is killed ends the children; where it is killed as well, their node does."""
    before = {process.pid for process in lingering()}
    command = [sys.executable, "-m", "tests.support.cluster_daemon", cluster.address, str(tmp_path / "jobs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"lingers\n"
        tree = [process for process in lingering() if process.pid not in before]
        assert tree
        connectors = psutil.Process(daemon.pid).children() if lost == "machine" else []
        for process in (daemon, *connectors):
            process.kill()
    _, alive = psutil.wait_procs(tree, timeout=within_s)
    assert not alive


def bench(farm: FarmProcess, folder: Path, model: Path, name: str) -> dict[str, Any]:
    """Return the report of a model that was measured on a farm."""
    done = etfarm("bench", str(model), "--server", farm.address, "--json", f"{name}.json", cwd=folder, environment={})
    assert done.returncode == 0, done.stderr + done.stdout
    (report,) = json.loads((folder / f"{name}.json").read_text())["reports"]
    assert isinstance(report, dict)
    return report


def read_pool(farm: FarmProcess) -> dict[str, float]:
    """Return the metrics of the pool that are not of an empty state of nodes."""
    assert farm.server is not None
    line = next(line for line in farm.server.lines if "metrics on" in line)
    with urllib.request.urlopen(f"http://{line.rpartition(' ')[2]}/metrics", timeout=30) as answer:
        samples = [each.rsplit(" ", 1) for each in answer.read().decode().splitlines() if not each.startswith("#")]
    shown = {name: float(value) for name, value in samples if name.startswith(POOL_METRICS)}
    return {name: value for name, value in shown.items() if value or "{" not in name}


def test_a_model_compiles_and_is_analyzed_as_on_the_servers_machine(cluster: RayCluster, tmp_path: Path) -> None:
    model = models.save(models.resnet8, tmp_path / "resnet8.pt2")
    reports = []
    metrics = ("--metrics", "127.0.0.1:0")
    for name, options in (("local", metrics), ("nodes", (*metrics, "--compile-pool", cluster.address))):
        (tmp_path / name).mkdir()
        with FarmProcess(tmp_path / name, serve=options) as farm:
            farm.start()
            reports.append(bench(farm, tmp_path, model, name))
            assert read_pool(farm) == {"etfarm_compile_slots": 1, "etfarm_compile_running": 0, "etfarm_compile_waiting": 0} | (
                {'etfarm_compile_nodes{state="ready"}': 1} if name == "nodes" else {}
            )
    local, nodes = reports
    assert nodes["state"] == "SUCCEEDED"
    assert nodes["compile"]["program"] == local["compile"]["program"]
    assert nodes["compile"]["cached"] is False
    assert [row["name"] for row in nodes["operators"]] == [row["name"] for row in local["operators"]]
    assert nodes["accuracy"] and nodes["accuracy"][0]["sqnr_db"] > 60


def check(address: str, folder: Path) -> dict[str, Any]:
    """Return the document of `serve --check` with a compile pool."""
    arguments = ("serve", "--check", "--json", "--data", str(folder / "data"), "--compile-pool", address)
    document = json.loads(etfarm(*arguments, cwd=folder).stdout)
    assert isinstance(document, dict)
    return document


def test_a_check_lists_the_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    checked = check(cluster.address, tmp_path)
    assert checked["ok"], checked
    assert any(fact["name"] == "compile node" and ", ready" in fact["text"] for fact in checked["facts"])


PATIENT_DOCTOR = """
from etfarm.server import checks
from etfarm.wire import command, doctor
checks._NODES_S, doctor.run_checks.__defaults__ = 90.0, (120.0,)
raise SystemExit(command.main())
"""
"""`etfarm` whose doctor waits longer than people do: a node of a busy machine is not checked within its time limit."""


def test_doctor_lists_the_nodes_of_the_servers_configuration(cluster: RayCluster, tmp_path: Path) -> None:
    config = tmp_path / "farm.toml"
    config.write_text(f'data = "{tmp_path / "data"}"\ncompile-pool = "{cluster.address}"\n')

    command = [sys.executable, "-c", PATIENT_DOCTOR, "doctor", "--json"]
    variables = os.environ | {CONFIG_VARIABLE: str(config)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, check=False)
    nodes = [each for each in json.loads(done.stdout)["findings"] if each["name"] == "compile node"]
    assert [(node["status"], "1 cpus, ready" in node["detail"]) for node in nodes] == [("OK", True)]


def test_a_check_fails_where_there_is_no_cluster(cluster: RayCluster, tmp_path: Path) -> None:
    (problem,) = check("ray://127.0.0.1:1", tmp_path)["problems"]
    assert problem["reason"] == "WORKERS_DOWN"
    assert "ray://127.0.0.1:1" in problem["message"]
