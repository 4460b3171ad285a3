"""Compile nodes that lie, and what a hostile model may reach on an honest one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.server.workers.child_pool import ChildPool
from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.cluster.nodes import MAX_CPUS, Node, NodeState, no_compile_node
from etfarm.server.workers.cluster.pool import ClusterPool
from etfarm.server.workers.cluster.relay import NodeGone, RayNode, relay
from etfarm.server.workers.cluster.relay_frames import CHANNEL, END, LOG, STATUS
from etfarm.server.workers.errors import BadAnswer, ChildDied, ChildTimedOut
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.ordered_process import Ends
from etfarm.wire import digest as digests
from etfarm.wire.errors import EtfarmError, Fault, UserError
from tests.support import attack_tasks, ray_attacks
from tests.support.node_pools import running_node as running_node
from tests.support.ray_cluster import RayCluster
from tests.support.ray_cluster import RayNode as Started
from tests.support.refusals import refuses

pytestmark = [
    pytest.mark.slow(reason="launches a Ray cluster, one of whose nodes lies"),
]
pytest.importorskip("ray", reason="pip install 'etfarm[scale]'")

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1, processes=64, file_bytes=1 << 30)
END_S = 60.0
FILE = b"a child's file"
REPORT = {
    "exit": 0, "peak_rss_bytes": 1 << 20, "cpu_s": 0.5, "out_of_memory": False, "too_many_processes": False, "disk_full": False,
}  # fmt: skip

Method = Callable[[Any, bytes], object]
"""Function that takes a call's arguments and data, and returns what the node answers."""


# Nodes whose answers a test chooses, behind the real relay and the daemon's real side of a child


@dataclass
class Reference:
    """What Ray returns for a call."""

    answer: Future[object]

    def future(self) -> Future[object]:
        return self.answer


class Actor:
    """A node's actor, which does one small task, except where it lies."""

    def __init__(self, **lies: Method) -> None:
        self._methods: dict[str, Method] = {
            "open": lambda arguments, data: ok(b"[]"),
            "begin": lambda arguments, data: ok(),
            "poll": lambda arguments, data: poll(result(b"done"), (STATUS, json.dumps(REPORT).encode()), listed(row())),
            "read": lambda arguments, data: ok(FILE[arguments["offset"] :]),
            "close": lambda arguments, data: ok(),
            **lies,
        }
        self.calls: list[str] = []

    @property
    def call(self) -> Actor:
        return self

    def remote(self, method: str, arguments: bytes, data: bytes) -> Reference:
        self.calls.append(method)
        answer = Future[object]()
        answer.set_result(self._methods[method](json.loads(arguments), data))
        return Reference(answer)


def ok(data: bytes = b"") -> bytes:
    return relay_frames.encode_result(data)


def poll(*pieces: tuple[bytes, bytes]) -> bytes:
    return ok(relay_frames.join(pieces))


def result(data: bytes) -> tuple[bytes, bytes]:
    return CHANNEL, frames.encode(frames.RESULT, data)


def listed(*rows: object) -> tuple[bytes, bytes]:
    return END, json.dumps(rows).encode()


def row(name: object = "file", size: object = len(FILE), digest: object = digests.of_bytes(FILE)) -> list[object]:
    return [name, size, digest]


class RelayPool(ChildPool):
    """A pool of scripted nodes; the relay is the connector's."""

    def __init__(self, folder: Path, *actors: Actor) -> None:
        super().__init__(limits=LIMITS, folder=folder, slots=FairSlots(8, reserved=1), gate=contextlib.nullcontext)
        self.nodes = []
        for number, actor in enumerate(actors):
            node = RayNode(Node(f"id-{number}", "host", "127.0.0.1", len(actors) - number, NodeState.READY), lambda _: None)
            node.actor = actor
            self.nodes.append(node)
        self._relays: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._folder.mkdir()
        self._is_started = True

    async def ready(self) -> None:
        pass

    async def _warm_up(self, light: bool) -> None:
        pass

    async def stop(self) -> None:
        await self._stop_running()
        if self._relays:
            await asyncio.wait(self._relays)

    @contextlib.contextmanager
    def place(self, task: str, folder: Path, *, light: bool = False) -> Iterator[Ends]:
        (channel, channel_child), (status, status_child), (log, log_child) = socket.socketpair(), socket.socketpair(), os.pipe()
        order = {"task": task, "folder": str(folder), "reserve_bytes": 0, "file_bytes": LIMITS.file_bytes}
        relayed = asyncio.create_task(relay(order, self._choose, (channel_child, log_child, status_child)))
        self._relays.add(relayed)
        relayed.add_done_callback(self._relays.discard)
        yield channel, log, status

    def _choose(self) -> RayNode:
        ready = [node for node in self.nodes if node.node.state is NodeState.READY]
        if not ready:
            raise NodeGone("", "no node is ready")
        return max(ready, key=lambda node: node.node.cpus)


@contextlib.asynccontextmanager
async def running(folder: Path, *actors: Actor) -> AsyncIterator[RelayPool]:
    pool = RelayPool(folder / "jobs", *actors)
    pool.start()
    try:
        async with asyncio.timeout(END_S):
            yield pool
    finally:
        await pool.stop()
    assert list((folder / "jobs").iterdir()) == [], "folders are left"


def deep(levels: int = 200_000) -> bytes:
    return b"[" * levels


def failed(error: EtfarmError) -> Method:
    return lambda arguments, data: relay_frames.encode_error(error)


def polled(*pieces: tuple[bytes, bytes]) -> Method:
    return lambda arguments, data: poll(*pieces)


def reported(**changes: object) -> Method:
    values = {name: value for name, value in (REPORT | changes).items() if value is not ...}
    return polled(result(b"lie"), (STATUS, json.dumps(values).encode()), listed())


def ended(*rows: object) -> Method:
    return polled(result(b"lie"), (STATUS, json.dumps(REPORT).encode()), listed(*rows))


LIES: dict[str, dict[str, Method]] = {
    "None": {"open": lambda *_: None},
    "a text": {"begin": lambda *_: "+"},
    "an object": {"poll": lambda *_: {"a": 1}},
    "too many bytes": {"poll": lambda *_: ok(bytes(40 << 20))},
    "no error": {"poll": lambda *_: b"-{}"},
    "a nested error": {"poll": lambda *_: b"-" + deep()},
    "a user's error": {"poll": failed(UserError("The model is bad."))},
    "missing files that are no JSON": {"open": lambda *_: ok(b"\xff")},
    "missing files in a nest": {"open": lambda *_: ok(deep())},
    "missing files that are numbers": {"open": lambda *_: ok(b"[1, {}, []]")},
    "missing files that are an object": {"open": lambda *_: ok(b'{"a": 1}')},
    "a truncated piece": {"poll": lambda *_: ok(relay_frames.join([(LOG, b"x" * 100)])[:-1])},
    "a piece of 4 GiB": {"poll": lambda *_: ok(LOG + b"\xff\xff\xff\xff" + b"x")},
    "a kind that there is not": {"poll": polled((b"?", b""))},
    "a million tiny pieces": {"poll": lambda *_: ok((LOG + b"\0\0\0\0") * 1_000_000)},
    "a report that is no JSON": {"poll": polled((STATUS, b"{"))},
    "a report that is a list": {"poll": polled((STATUS, b"[]"))},
    "a report of 1 MB": {"poll": reported(more="x" * 1_000_000)},
    "a report with more": {"poll": reported(error='{"fault": "USER"}')},
    "a report of a loss": {"poll": polled((STATUS, b'{"lost": "another node", "why": "so"}'))},
    "a report without memory": {"poll": reported(peak_rss_bytes=...)},
    "negative memory": {"poll": reported(peak_rss_bytes=-1)},
    "endless memory": {"poll": reported(peak_rss_bytes=10**30)},
    "endless time": {"poll": reported(cpu_s=float("inf"))},
    "no time": {"poll": reported(cpu_s=float("nan"))},
    "an exit that is a text": {"poll": reported(exit="0")},
    "a flag that is a number": {"poll": reported(disk_full=7)},
    "files that are no list": {"poll": polled((STATUS, json.dumps(REPORT).encode()), (END, b'{"a": 1}'))},
    "files in a nest": {"poll": polled((STATUS, json.dumps(REPORT).encode()), (END, deep()))},
    "too many files": {"poll": ended(*(row(str(number), 0) for number in range(10_001)))},
    "one name twice": {"poll": ended(row(), row())},
    "a size that is negative": {"poll": ended(row(size=-1))},
    "a size beyond a child's": {"poll": ended(row(size=10**15))},
    "a size that is a text": {"poll": ended(row(size="5"))},
    "a digest that is none": {"poll": ended(row(digest="../" * 20))},
    "a row of two": {"poll": ended(["file", 1])},
    "fewer bytes of a file": {"read": lambda *_: ok(FILE[:-1])},
    "more bytes of a file": {"read": lambda *_: ok(FILE + b"!")},
    "no bytes of a file": {"read": lambda *_: ok()},
    "other bytes of a file": {"read": lambda *_: ok(FILE[::-1])},
    **{
        f"a file named {name[:20]!r}": {"poll": ended(row(name))}
        for name in ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", "x" * 300, "\u00e9" * 200, "\ud800")
    },
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_node_that_lies_is_refused_and_its_task_is_done_elsewhere(tmp_path: Path, lie: str) -> None:
    restarts: list[None] = []
    with capture_logs() as logged:
        async with running(tmp_path, Actor(**LIES[lie]), Actor()) as pool:
            run = await pool.run("m:f", None, deadline_s=30, on_restart=lambda: restarts.append(None))
            async with run as finished:
                assert finished.result == b"done"
                assert [path.name for path in finished.folder.iterdir()] == ["file"]
                assert (finished.folder / "file").read_bytes() == FILE
    liar, honest = pool.nodes
    assert (liar.node.state, honest.node.state) == (NodeState.REFUSED, NodeState.READY)
    assert liar.lost.is_set() and len(restarts) == 1
    assert len(json.dumps(liar.node.to_message(), ensure_ascii=False).encode()) < 1 << 16
    assert [line["event"] for line in logged] == ["what starts children was lost, starting its task again"]
    assert list(tmp_path.iterdir()) == [tmp_path / "jobs"]


@pytest.mark.remedy("COMPILE_NODE_LOST")
async def test_a_farm_of_liars_is_the_farms_fault(tmp_path: Path) -> None:
    async with running(tmp_path, *(Actor(**LIES["one name twice"]) for _ in range(3))) as pool:
        with pytest.raises(EtfarmError) as raised:
            await pool.run("m:f", None, deadline_s=30)
    assert (raised.value.fault, raised.value.reason) == (Fault.FARM, "COMPILE_NODE_LOST")
    (again := tmp_path / "again").mkdir()
    async with running(again, Actor()) as pool, await pool.run("m:f", None, deadline_s=30) as finished:
        assert finished.result == b"done", "it is tried again once there are other nodes"


CHANNELS: dict[str, list[tuple[bytes, bytes]]] = {
    "a frame of 4 GiB": [(CHANNEL, frames.RESULT + b"\xff\xff\xff\xff")],
    "a kind that there is not": [(CHANNEL, frames.encode(b"?", b""))],
    "a million events": [(CHANNEL, frames.encode(frames.EVENT, b"") * 800_000)],
    "an event of 1 MB": [(CHANNEL, frames.encode(frames.EVENT, b"x" * 1_000_000))],
}


@pytest.mark.parametrize("lie", CHANNELS)
async def test_what_is_no_childs_answer_is_the_farms_fault(tmp_path: Path, lie: str) -> None:
    async with running(tmp_path, Actor(poll=polled(*CHANNELS[lie]))) as pool:
        with pytest.raises(BadAnswer) as raised:
            await pool.run("m:f", None, deadline_s=30)
    assert raised.value.fault is Fault.FARM


async def test_success_without_a_result_is_the_farms_fault(tmp_path: Path) -> None:
    done = polled((STATUS, json.dumps(REPORT).encode()), listed())
    async with running(tmp_path, Actor(poll=done)) as pool:
        with pytest.raises(ChildDied) as raised:
            await pool.run("m:f", None, deadline_s=30)
    assert raised.value.fault is Fault.FARM


async def test_an_end_without_a_report_is_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path, Actor(poll=polled(result(b"lie"), listed()))) as pool:
        with pytest.raises(errors.SupervisorKilled) as raised:
            await pool.run("m:f", None, deadline_s=30)
    assert raised.value.fault is Fault.FARM


async def test_what_follows_the_end_is_not_read(tmp_path: Path) -> None:
    late = [(LOG, b"late\n"), result(b"late"), (STATUS, b"late"), (END, b"late")]
    pieces = [result(b"done"), (STATUS, json.dumps(REPORT).encode()), listed(row()), *late]
    lines: list[str] = []
    async with running(tmp_path, Actor(poll=polled(*pieces))) as pool:
        finished = await pool.run("m:f", None, deadline_s=30, on_log=lines.append)
        async with finished:
            assert finished.result == b"done"
    assert lines == []


@pytest.mark.parametrize("lie", ["nothing", "a log", "a slow file"])
async def test_a_node_that_never_ends_is_ended_by_the_deadline(tmp_path: Path, lie: str) -> None:
    """Also while it sends as much as it can; other children have their turns meanwhile."""
    line = b"x" * 65536 + b"\n"
    lines: list[str] = []
    polls: dict[str, Method] = {
        "nothing": polled(),
        "a log": polled((LOG, line * 16)),
        "a slow file": ended(row(size=1 << 29)),
    }

    class Waiting(Actor):
        def remote(self, method: str, arguments: bytes, data: bytes) -> Reference:
            reference = super().remote(method, arguments, data)
            answer = Future[object]()
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, lambda: None if answer.cancelled() else answer.set_result(reference.answer.result()))
            return Reference(answer)

    actor = Waiting(poll=polls[lie], read=lambda arguments, data: ok(bytes(relay_frames.PIECE_BYTES)))
    async with running(tmp_path, actor) as pool:
        with pytest.raises(ChildTimedOut):
            await pool.run("m:f", None, deadline_s=1.0, on_log=lines.append)
    assert sum(map(len, lines)) <= 17 << 20
    assert "close" in actor.calls


HOSTILE_TEXT = "\x1b[2J\r\n\u202e\ud800\0" * 100_000


def test_a_nodes_texts_are_bounded_and_control_no_terminal() -> None:
    node = Node(*(HOSTILE_TEXT,) * 3, 10**30, NodeState.REFUSED, HOSTILE_TEXT, False, (HOSTILE_TEXT,) * 1000)
    message = json.dumps(node.to_message(), ensure_ascii=False).encode()
    assert len(message) < 1 << 16, "larger ones do not reach the daemon"
    for seen in (Node.from_message(json.loads(message)), Node.from_message(node.to_message() | {"detail": HOSTILE_TEXT})):
        assert seen.cpus == MAX_CPUS
        assert not set("\x1b\r\n\u202e\0\t") & set(seen.text + seen.name)
        assert not set("\x1b\r\n\u202e\0\t") & set(no_compile_node("ray://host:1", [seen]).message)
        seen.text.encode()


async def test_claimed_cpus_do_not_take_the_daemons_descriptors(tmp_path: Path) -> None:
    pool = ClusterPool(address="ray://127.0.0.1:1", preload=[], limits=LIMITS, folder=tmp_path / "jobs", report=lambda _: None)
    for number in range(20):
        pool._on_node(Node(str(number), "host", "127.0.0.1", 10**9, NodeState.READY).bounded())
    assert pool.measure().slots == 1024


# A real cluster: an honest node, and one whose actor lies


@pytest.fixture(autouse=True)
def _credentials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if "cluster" in request.fixturenames:
        for name, value in request.getfixturevalue("cluster").credentials.items():
            monkeypatch.setenv(name, value)


@contextlib.asynccontextmanager
async def real_pool(cluster: RayCluster, folder: Path, nodes: int) -> AsyncIterator[ClusterPool]:
    """Yield a pool once so many nodes are ready."""
    pool = ClusterPool(address=cluster.address, preload=["tests.support.ray_attacks"], limits=LIMITS, folder=folder / "jobs")
    pool.start()
    try:
        async with asyncio.timeout(120):
            while sum(node.state is NodeState.READY for node in pool.nodes) < nodes:
                await pool.changed()
        yield pool
    finally:
        await pool.stop()


async def test_a_model_on_a_node_reaches_nothing_of_ray_or_of_others(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "other").write_text("s3cret of another job")
    (node,) = cluster.nodes[1:]
    async with real_pool(cluster, tmp_path, 1) as pool:
        await (await pool.run("tests.support.ray_attacks:read", tmp_path / "other", deadline_s=60)).__aexit__(None, None, None)
        targets = ray_attacks.targets_of(cluster.folder, node.pids, cluster.credentials["RAY_AUTH_TOKEN"])
        request = attack_tasks.Request(json.dumps(targets), tmp_path / "mine")
        async with await pool.run("tests.support.ray_attacks:attack", request, deadline_s=120) as finished:
            outcomes = json.loads(finished.result)
        with refuses("CHILD_TOO_MANY_PROCESSES"):
            await pool.run("tests.support.attack_tasks:fork_a_lot", None, deadline_s=120)
    assert {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("refused: ")} == {}
    assert outcomes.keys() == ray_attacks.ATTACKS.keys()
    assert node.pids.keys() >= {"raylet"}, "the node lives"


@contextlib.contextmanager
def lying_node(cluster: RayCluster, folder: Path) -> Iterator[Started]:
    """A node with more cpus than the honest one, whose actor answers with other bytes than a child has written."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("from tests.support import lying_node\nlying_node.install()\n")
    node = cluster.add_node(cpus=4, variables={"PYTHONPATH": f"{site}:{ROOT}"})
    try:
        yield node
    finally:
        node.end()


async def test_a_real_node_that_lies_is_refused_and_its_task_is_done_on_another(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    restarts: list[None] = []
    with lying_node(cluster, tmp_path):
        async with real_pool(cluster, tmp_path, 2) as pool:
            run = await pool.run(
                "tests.support.ray_attacks:read", tmp_path / "mine", deadline_s=60, on_restart=lambda: restarts.append(None)
            )
            async with run as finished:
                assert finished.result == b"mine"
            states = {node.cpus: node for node in pool.nodes if node.state is not NodeState.LOST}
    assert len(restarts) == 1
    assert {cpus: node.state for cpus, node in states.items()} == {1: NodeState.READY, 4: NodeState.REFUSED}
    assert "arrived with another digest" in states[4].detail
