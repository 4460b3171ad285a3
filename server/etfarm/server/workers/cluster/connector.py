"""The connector: the daemon's process that speaks with Ray, which blocks and unpickles what nodes answer.

Run as `python -m etfarm.server.workers.cluster.connector CONTROL ALIVE SETTINGS`, with the descriptors of `OrderedProcess` and
SETTINGS as JSON: the cluster's `address`, the server's `versions` and `tenure`, the nodes' `python`, and what each node's service
takes. It sends `{"failed": {}}` once it is connected, then `{"node": {...}}` whenever a node's state changes, and
`{"defect": {...}}` for each error that is a defect of etfarm. When the daemon ends, however it does, the connector ends the
children on the nodes before itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from etfarm.server.workers.cluster import actor, versions
from etfarm.server.workers.cluster.node import boot_id
from etfarm.server.workers.cluster.nodes import MAX_CPUS, Node, NodeState
from etfarm.server.workers.cluster.relay import NodeGone, RayNode, answer_of, explain, relay
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.server.workers.errors import Defect
from etfarm.server.workers.jail.measures import NETWORK, JailReport
from etfarm.wire.errors import EtfarmError
from etfarm.wire.escapes import in_a_line, printable

_CONNECTIONS: Final = 4
"""Number of attempts to connect to a cluster whose proxy aborts them."""
_CONNECT_S: Final = 180.0
"""Time that all of these attempts may take; a proxy on a busy machine takes tens of seconds."""
_POLL_S: Final = 1.0
"""Interval at which the cluster's nodes are listed; Ray's client does not announce changes."""
_LIST_S: Final = 60.0
"""Time after which a cluster that does not list its nodes counts as lost."""
_PULSE_S: Final = 10.0
"""Interval at which a ready node is asked for a sign of life, also while nothing runs there."""
_RETRY_S: Final = 10.0
"""Pause before a refused or lost node is tried again."""
_COSTLY_RETRY_S: Final = 60.0
"""The same for a node that was refused after its service had started, which loads the toolchain."""
_PROBE_S: Final = 60.0
_START_S: Final = 300.0
"""Time that a node's service may take to load the toolchain."""
_STOP_S: Final = 3.0
_MAX_ORDER_BYTES: Final = 1 << 16
_MAX_TEXT: Final = 4000
"""Maximum number of characters of a text to the daemon, which may be a node's: larger messages would not arrive."""
_KILLED_FIRST: Final = "500"
"""What nodes send is in this process's memory before its size is known: if the host's memory ends, the daemon stays."""


class Connector:
    """The nodes of a cluster, and the children on them."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._settings = settings
        self._tenure = Tenure(**settings["tenure"])
        self._nodes: dict[str, RayNode] = {}
        self._admissions: dict[str, asyncio.Task[None]] = {}
        self._relays: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the daemon closes its end, or ends."""
        ended = asyncio.create_task(self._take_orders(), name="orders")
        connected = asyncio.create_task(asyncio.to_thread(self._connect), name="connection")
        await asyncio.wait({ended, connected}, timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return
        error = connected.exception() if connected.done() else TimeoutError(f"it did not answer for {_CONNECT_S:g} s")
        if error is not None:
            self._send({"failed": {self._settings["address"]: f"{type(error).__name__}: {str(error).strip()[:500]}"}})
            return
        self._send({"failed": {}})
        watch = asyncio.create_task(self._watch(), name="nodes")
        await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            print(f"etfarm: the connection to the Ray cluster was lost: {watch.exception()!r}", file=sys.stderr, flush=True)
            return
        watch.cancel()
        await self._stop()

    def _connect(self) -> None:
        cloudpickle.register_pickle_by_value(actor)
        cloudpickle.register_pickle_by_value(versions)
        for left in reversed(range(_CONNECTIONS)):
            try:
                ray.init(self._settings["address"], namespace=self._tenure.farm, log_to_driver=False, logging_level=logging.ERROR)
                break
            except ConnectionError as error:
                # The cluster's proxy forks a server for each client. One that is forked during calls of others may not start.
                is_aborted = isinstance(error, ConnectionAbortedError) or "already been disconnected" in str(error)
                if left == 0 or not is_aborted:
                    raise
                ray.shutdown()  # what is left of this client would be taken for the next one
                time.sleep(_POLL_S)
        python = self._settings["python"]
        self._probe = ray.remote(num_cpus=0, max_retries=0)(versions.describe_python if python else versions.describe)
        self._described = (python, Path(versions.__file__).read_text()) if python else ()
        environment = {"py_executable": shlex.quote(python)} if python else {}
        self._actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=1000, runtime_env=environment)(actor.NodeActor)

    async def _watch(self) -> None:
        """Admit the nodes that join, and forget those that leave."""
        while True:
            async with asyncio.timeout(_LIST_S):
                listing = await asyncio.to_thread(ray.nodes)
            alive = {each["NodeID"]: each for each in listing if each["Alive"]}
            for node_id, listed in alive.items():
                if (cpus := listed["Resources"].get("CPU", 0)) >= 1 and node_id not in self._nodes:
                    host, address = listed["NodeManagerHostname"], listed["NodeManagerAddress"]
                    node = Node(node_id, host, address, int(min(cpus, MAX_CPUS)), NodeState.PREPARING).bounded()
                    self._nodes[node_id] = RayNode(node, self._report, self._report_defect)
                    self._admissions[node_id] = asyncio.create_task(self._admit(self._nodes[node_id]), name=f"admit {node.name}")
            for node_id in self._nodes.keys() - alive.keys():
                self._nodes.pop(node_id).change(NodeState.LOST, "it left the cluster")
                self._admissions.pop(node_id).cancel()
            await asyncio.sleep(_POLL_S)

    async def _admit(self, node: RayNode) -> None:
        """Check a node, start its service and watch it; do so again after it was refused or lost."""
        while True:
            try:
                await self._start(node)
                await self._watch_over(node)
            except EtfarmError as error:
                node.change(NodeState.REFUSED, error.message)
            except TimeoutError:
                node.change(NodeState.LOST, f"It did not answer for {_PROBE_S:g} s.")
            except Exception as error:  # noqa: BLE001 - Ray raises many kinds
                is_new = node.change(*_judge(error))
                if is_new and not isinstance(error, NodeGone | RayError | ConnectionError):
                    self._report_defect(Defect(f"The admission of {node.node.name}", error))
            is_costly = node.node.state is NodeState.REFUSED and node.actor is not None
            node.actor = None  # Ray ends what has no handle
            await asyncio.sleep(_COSTLY_RETRY_S if is_costly else _RETRY_S)
            node.lost.clear()

    async def _watch_over(self, node: RayNode) -> None:
        """Return when a node that is ready has been lost."""
        while node.node.state is NodeState.READY:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PULSE_S):
                    await node.lost.wait()
            if not node.lost.is_set():
                await node.call("boot_id", {})

    async def _start(self, node: RayNode) -> None:
        affinity = NodeAffinitySchedulingStrategy(node.node.id, soft=False)
        async with asyncio.timeout(_PROBE_S):
            described = await answer_of(self._probe.options(scheduling_strategy=affinity).remote(*self._described))
        parsed = json.loads(described) if isinstance(described, str) else None
        difference = versions.find_difference(
            parsed if isinstance(parsed, dict) else {}, self._settings["versions"], self._settings["python"]
        )
        if difference:
            node.change(NodeState.REFUSED, difference)
            return
        service = {name: self._settings[name] for name in ("preload", "limits", "required")}
        settings = json.dumps(service | {"concurrency": node.node.cpus}).encode()
        name = self._tenure.name(node.node.id)
        node.actor = self._actor.options(scheduling_strategy=affinity, name=name).remote(settings)
        is_here = (await node.call("boot_id", {}, timeout_s=_PROBE_S)).decode() == boot_id()
        if not await asyncio.to_thread(self._take_over, name):
            node.change(NodeState.REFUSED, "a later leader of the farm compiles there")
            return
        if node.node.state is NodeState.LOST:
            node.change(NodeState.PREPARING)
        report = JailReport.from_json(await node.call("start", {}, timeout_s=_START_S))
        missing = tuple(f"{measure.name}: {measure.detail}" for measure in report.missing)
        if any(measure.name == NETWORK for measure in report.missing):
            node.change(NodeState.REFUSED, f"its children would have a network. {missing[0]}")
            return
        node.change(NodeState.READY, is_here=is_here, jail=missing)

    def _take_over(self, own: str) -> bool:
        """End the actors that earlier leaders of the farm, or earlier connectors of this one, have left on a node. Blocking.

        Both of two servers that start an actor at the same moment look here afterwards, so that the later leader's stays.

        Args:
            own: name of this connector's actor there.

        Returns:
            Whether no later leader is there.
        """
        former = self._tenure.list_former(ray.util.list_named_actors(), own)
        for name in former or ():
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name))
        return former is not None

    async def _take_orders(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            readable = asyncio.Event()
            loop.add_reader(self._control, readable.set)
            await readable.wait()
            loop.remove_reader(self._control)
            message, descriptors, _, _ = socket.recv_fds(self._control, _MAX_ORDER_BYTES, 3)
            if not message:
                return
            channel, log, status = descriptors
            task = asyncio.create_task(
                relay(json.loads(message), self._choose_node, (socket.socket(fileno=channel), log, socket.socket(fileno=status)))
            )
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    def _choose_node(self) -> RayNode:
        """Return the ready node with the most free cpus.

        Raises:
            NodeGone: no node is ready.
        """
        ready = [node for node in self._nodes.values() if node.node.state is NodeState.READY]
        if not ready:
            raise NodeGone("", "no node is ready")
        return max(ready, key=lambda node: node.node.cpus - node.running)

    def _report(self, node: Node) -> None:
        self._send({"node": node.to_message()})

    def _report_defect(self, error: EtfarmError) -> None:
        trace = error.metadata.get("traceback", "")
        self._send({"defect": {"error": in_a_line(error.message[:_MAX_TEXT]), "traceback": printable(trace[-_MAX_TEXT:])}})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the daemon has closed its end
            self._control.send(json.dumps(message, ensure_ascii=False).encode())

    async def _stop(self) -> None:
        for task in (*self._relays, *self._admissions.values()):
            task.cancel()
        if self._relays:
            await asyncio.wait(self._relays, timeout=_STOP_S)
        calls = [node.call("stop", {}, timeout_s=_STOP_S) for node in self._nodes.values() if node.node.state is NodeState.READY]
        await asyncio.gather(*calls, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(ray.shutdown), _STOP_S)


def _judge(error: Exception) -> tuple[NodeState, str]:
    """Return the state of a node that was not admitted because of an error, and why.

    What code raises it will raise again, until something changes on the node. All else is the end of the node or of a process,
    or a broken connection.
    """
    cause = error.__cause__ or error
    is_of_code = isinstance(cause, RayTaskError | RuntimeEnvSetupError) or getattr(cause, "actor_init_failed", False)
    if is_of_code or not isinstance(error, NodeGone | RayError | ConnectionError):
        last = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
        return NodeState.REFUSED, f"its service did not start: {last[:300]}"
    return NodeState.LOST, str(error) if isinstance(error, NodeGone) else explain(error)


async def run(arguments: list[str]) -> None:
    """Run the connector, and end this process."""
    Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST)
    try:
        await Connector(socket.socket(fileno=int(arguments[0])), json.loads(arguments[2])).run()
    except Exception:  # noqa: BLE001 - the daemon starts another one
        traceback.print_exc()
    finally:
        os._exit(0)  # Ray's threads may wait for a cluster that is gone


def main(arguments: list[str]) -> None:
    """Run the connector; see the module."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
