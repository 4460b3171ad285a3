"""Compilations and analyses on the nodes of a Ray cluster, which the tests launch on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from etfarm.server.workers.cluster import pool as cluster_pool
from etfarm.server.workers.cluster.node import LEASE_S
from etfarm.server.workers.cluster.nodes import NoCompileNode, Node, NodeState
from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.server.workers.errors import ChildDied, ChildTimedOut, WorkersDown
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError, FarmError, Fault
from etfarm.wire.names import CONFIG_VARIABLE
from tests.support import models
from tests.support.farm import FarmProcess, etfarm
from tests.support.ray_cluster import RayCluster, RayNode, running_cluster

pytestmark = [
    pytest.mark.slow(reason="launches a Ray cluster, and kills nodes of it"),
    pytest.mark.timeout(300),
]
pytest.importorskip("ray", reason="pip install 'etfarm[scale]'")

ROOT = Path(__file__).resolve().parents[2]
TASKS = "tests.support.worker_tasks"
LIMITS = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1)
WAIT_S = 90.0
POOL_METRICS = ("etfarm_compile_slots", "etfarm_compile_running", "etfarm_compile_waiting", "etfarm_compile_nodes")
REFUSED_S = 20.0
"""Time within which a node is refused, with a margin for a busy machine; Ray itself tries for 60 s."""
SOON_S = LEASE_S / 2
"""Time that only an orderly end keeps to."""


@dataclass(frozen=True)
class Lingering:
    """A task that lingers."""

    run: asyncio.Task[Any]
    tree: list[psutil.Process]
    """Its grandchildren."""
    events: asyncio.Queue[bytes]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head, and one node with one cpu."""
    with running_cluster() as cluster:
        cluster.start()
        cluster.add_node()
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def _credentials(cluster: RayCluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.credentials.items():
            patch.setenv(name, value)
        patch.setenv("ETFARM_TOKEN", "s3cret")
        yield


@contextlib.asynccontextmanager
async def running_pool(cluster: RayCluster, folder: Path, **more: Any) -> AsyncIterator[ClusterPool]:
    pool = ClusterPool(address=cluster.address, preload=[TASKS], limits=LIMITS, folder=folder / "jobs", **more)
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@pytest.fixture(scope="module")
def reported() -> list[Node]:
    """What the module's pool has reported."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_pool(
    cluster: RayCluster, _credentials: None, reported: list[Node], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ClusterPool]:
    """A pool with the settings of most tests: each connection to Ray starts five processes, which load Ray or the node's code."""
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


async def test_without_a_ready_node_a_task_fails_as_the_farms_fault(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_pool, "NODE_WAIT_S", 10.0)
    described = json.dumps({"torch": "1.0", "Python": "3.11"})
    monkeypatch.setattr(cluster_pool.versions, "describe", lambda: described)  # of a server with another torch
    async with running_pool(cluster, tmp_path) as pool:
        await until(pool, lambda node: node.state is NodeState.REFUSED)
        with pytest.raises(NoCompileNode) as none:
            await pool.run(f"{TASKS}:echo", 1, deadline_s=60)
    assert none.value.fault is Fault.FARM
    assert "the server has 1.0" in none.value.message


def write_metadata(site: Path, package: str, version: str) -> None:
    """Write what makes a package appear in another version, without its code."""
    metadata = site / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@contextlib.contextmanager
def other_torch(cluster: RayCluster, folder: Path) -> Iterator[RayNode]:
    """A node whose Python has another torch, by its metadata."""
    write_metadata(folder / "site", "torch", "9.9.9")
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


async def test_an_environment_with_other_versions_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    python = virtual_environment(tmp_path / "environment")
    write_metadata(next((tmp_path / "environment").glob("lib/python*/site-packages")), "executorch", "9.9.9")
    async with running_pool(cluster, tmp_path, python=str(python)) as pool:
        # The cluster may still list a node that another test has ended, which is refused, too.
        refused = await until(pool, lambda node: "executorch 9.9.9, and the server has 1." in node.detail)
    assert refused.state is NodeState.REFUSED


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
    before = {process.pid for process in lingering()}
    async with AsyncExitStack() as stack:

        async def lead(term: int) -> ClusterPool:
            tenure = Tenure.of_leader("secret", term)
            return await stack.enter_async_context(running_pool(cluster, tmp_path / str(term), tenure=tenure))

        former = await lead(1)
        lingers = asyncio.Event()
        run = asyncio.create_task(former.run(f"{TASKS}:linger", None, deadline_s=300, on_event=lambda _: lingers.set()))
        async with asyncio.timeout(WAIT_S):
            await lingers.wait()
        tree = [process for process in lingering() if process.pid not in before]
        assert tree
        leader = await lead(2)
        await until(leader, lambda node: node.state is NodeState.READY)
        _, alive = psutil.wait_procs(tree, timeout=SOON_S)
        assert not alive
        run.cancel()
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
        farm = FarmProcess(tmp_path / name, serve=options)
        try:
            farm.start()
            reports.append(bench(farm, tmp_path, model, name))
            assert read_pool(farm) == {"etfarm_compile_slots": 1, "etfarm_compile_running": 0, "etfarm_compile_waiting": 0} | (
                {'etfarm_compile_nodes{state="ready"}': 1} if name == "nodes" else {}
            )
        finally:
            farm.stop()
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


# One pool for all tests from here on. It starts after the others, since it would take the nodes that they add.

on_one_loop = pytest.mark.asyncio(loop_scope="module")


@on_one_loop
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


@on_one_loop
async def test_log_lines_arrive_while_the_child_runs(pool: ClusterPool) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    run = asyncio.create_task(pool.run(f"{TASKS}:print_and_wait", None, deadline_s=60, on_log=lines.put_nowait))
    async with asyncio.timeout(WAIT_S):
        assert await lines.get() == "while it runs"
    assert not run.done()
    run.cancel()
    await asyncio.wait({run})


@on_one_loop
async def test_a_large_file_arrives_whole_in_both_directions(pool: ClusterPool, tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(os.urandom(9_000_001))
    async with await pool.run(f"{TASKS}:copy_file", file, deadline_s=60) as finished:
        assert (finished.folder / "copy").read_bytes() == file.read_bytes()


@on_one_loop
async def test_a_child_on_a_node_sees_neither_tokens_nor_a_network(pool: ClusterPool) -> None:
    jail = await pool.describe_jail()
    assert not jail.missing
    async with await pool.run(f"{TASKS}:environment", None, deadline_s=60) as finished:
        assert not [name for name in json.loads(finished.result) if "TOKEN" in name or name.startswith("RAY_")]


@on_one_loop
async def test_cancelling_ends_the_child_on_its_node_within_a_second(pool: ClusterPool) -> None:
    lingers = asyncio.Event()
    before = {process.pid for process in lingering()}
    run = asyncio.create_task(pool.run(f"{TASKS}:linger", None, deadline_s=60, on_event=lambda _: lingers.set()))
    async with asyncio.timeout(WAIT_S):
        await lingers.wait()
    tree = [process for process in lingering() if process.pid not in before]
    assert tree
    start_s = time.monotonic()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    psutil.wait_procs(tree, timeout=5)
    assert time.monotonic() - start_s < 1
    assert not any(process.is_running() for process in tree)
    async with await pool.run(f"{TASKS}:echo", 1, deadline_s=60) as finished:  # its place is free again
        assert finished.result == b"1"


@on_one_loop
async def test_deadlines_end_a_child_and_name_the_stage(pool: ClusterPool) -> None:
    with pytest.raises(ChildTimedOut) as whole:
        await pool.run(f"{TASKS}:spin", None, deadline_s=1)
    assert whole.value.metadata["clock"] == "wall"
    with pytest.raises(ChildTimedOut) as stage:
        await pool.run(f"{TASKS}:hang_in_the_second_stage", None, deadline_s=60, stage_deadline_s=2)
    assert (stage.value.stage, stage.value.metadata["clock"]) == ("SECOND", "stage")


@on_one_loop
async def test_errors_and_deaths_are_those_of_a_local_child(pool: ClusterPool) -> None:
    with pytest.raises(EtfarmError) as refused:
        await pool.run(f"{TASKS}:refuse", None, deadline_s=60)
    assert (refused.value.fault, refused.value.reason, refused.value.stage) == (Fault.USER, "TOO_TALL", "MEASURE")
    with pytest.raises(ChildDied) as died:
        await pool.run(f"{TASKS}:crash", int(signal.SIGSEGV), deadline_s=60)
    assert died.value.metadata["signal"] == "SIGSEGV"
    assert died.value.stage == "TO_EXECUTORCH"
    assert "last words" in died.value.metadata["log"]


@on_one_loop
async def test_a_task_whose_node_is_killed_is_placed_on_another(pool: ClusterPool, cluster: RayCluster) -> None:
    (old,) = [node for node in pool.nodes if node.state is NodeState.READY]
    # Two cpus, so that the task goes to the new node.
    node = cluster.add_node(cpus=2)
    try:
        new = await until(pool, lambda node: node.id != old.id and node.state is NodeState.READY)
        lingers: asyncio.Queue[bytes] = asyncio.Queue()
        restarts: list[None] = []
        run = asyncio.create_task(
            pool.run(
                f"{TASKS}:linger", None, deadline_s=120, on_event=lingers.put_nowait, on_restart=lambda: restarts.append(None)
            )
        )
        async with asyncio.timeout(WAIT_S):
            await lingers.get()
            node.kill()
            await lingers.get()
        assert len(restarts) == 1
        assert {each.id: each.state for each in pool.nodes}[new.id] is NodeState.LOST
        run.cancel()
        await asyncio.wait({run})
    finally:
        node.end()


def actors(cluster: RayCluster) -> list[psutil.Process]:
    return [actor for node in cluster.nodes for actor in node.actors()]


async def start_lingering(pool: ClusterPool, on_restart: Callable[[], None] = lambda: None) -> Lingering:
    """Run `linger` until it lingers."""
    before, lingers = {process.pid for process in lingering()}, asyncio.Queue[bytes]()
    task = f"{TASKS}:linger"
    run = asyncio.create_task(pool.run(task, None, deadline_s=120, on_event=lingers.put_nowait, on_restart=on_restart))
    async with asyncio.timeout(WAIT_S):
        await lingers.get()
    tree = [process for process in lingering() if process.pid not in before]
    assert tree
    return Lingering(run, tree, lingers)


@on_one_loop
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


@on_one_loop
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


@on_one_loop
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


@on_one_loop
async def test_a_killed_connector_is_replaced(pool: ClusterPool) -> None:
    assert pool.connector_pid is not None
    lingers: asyncio.Queue[bytes] = asyncio.Queue()
    run = asyncio.create_task(pool.run(f"{TASKS}:linger", None, deadline_s=120, on_event=lingers.put_nowait))
    async with asyncio.timeout(WAIT_S):
        await lingers.get()
        first = pool.connector_pid
        os.kill(first, signal.SIGKILL)
        await lingers.get()
    assert pool.connector_pid != first
    run.cancel()
    await asyncio.wait({run})


@on_one_loop
async def test_an_idle_pool_loses_the_nodes_of_a_killed_connector_and_connects_again(pool: ClusterPool) -> None:
    assert pool.connector_pid is not None
    os.kill(pool.connector_pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while any(node.state is not NodeState.LOST for node in pool.nodes):
            await pool.changed()
        while not any(node.state is NodeState.READY for node in pool.nodes):
            await pool.changed()
