"""The pool of jailed children on a Ray cluster. The daemon's side, which imports nothing of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import structlog

from etfarm.server.extras import require_extra
from etfarm.server.workers import output_files
from etfarm.server.workers.child_pool import URGENT, ChildPool, PoolUse, delete
from etfarm.server.workers.cluster import versions
from etfarm.server.workers.cluster.nodes import Node, NodeState, no_compile_node
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.server.workers.errors import WorkersDown
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.ordered_process import Ends, OrderedProcess

log = structlog.get_logger()

PREFIX: Final = "ray://"
NODE_WAIT_S: Final = 60.0
"""Time that a task waits for a node while none is ready."""
PREPARING_WAIT_S: Final = 600.0
"""Time that it waits while nodes are preparing; loading the toolchain takes minutes on a slow one."""
_MAX_CHILDREN: Final = 1024
"""Maximum number of children at a time, each of which takes file descriptors of the daemon, however many cpus nodes claim."""
_KEPT_LOST: Final = 20
"""Number of lost nodes that are still listed."""
_RESTART_S: Final = 1.0
"""Pause before a connector that has ended is replaced, if a task waits for it."""
_IDLE_RESTART_S: Final = 10.0
"""The same if no task does."""
_STOP_S: Final = 10.0
_RECONNECT_S: Final = "10"
"""Time for which Ray keeps the actors of a connector whose connection broke."""


def require_ray() -> None:
    """Refuse a pool on a Ray cluster where Ray is not installed.

    Raises:
        ExtraMissing: it is not.
    """
    require_extra("A compile pool on a Ray cluster", "scale", "ray")


class ConnectorProcess(OrderedProcess):
    """A running connector.

    Args:
        folder: existing folder that contains the children's folders.
        settings: as of the module `connector`.
        on_node: called with each node whose state has changed.
        on_end: called when the connector has ended by itself.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], on_node: Callable[[Node], None], on_end: Callable[[], None]
    ) -> None:
        self._on_node = on_node
        self._on_own_end = on_end
        home = folder / "home"
        super().__init__(
            "connection to the Ray cluster",
            "etfarm.server.workers.cluster.connector",
            [json.dumps(settings)],
            home,
            _environment(isolation.clean_environment(home)),
        )

    async def end(self) -> None:
        """Let the connector end its children and its actors; kill it if it takes too long."""
        self._close_control()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self.process.wait, _STOP_S - 1), _STOP_S)
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def _on_end(self) -> None:
        self._on_own_end()

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "node" in message:
            self._on_node(Node.from_message(message["node"]))
        elif "defect" in message:
            log.error("a compile node failed because of a bug", **message["defect"])
        else:
            super()._on_message(message)


def log_node(node: Node) -> None:
    """Log a node whose state has changed."""
    write = log.warning if node.state in (NodeState.REFUSED, NodeState.LOST) else log.info
    write("compile node", node=node.name, state=node.state.value, why=node.detail, jail_missing=list(node.jail))


class ClusterPool(ChildPool):
    """Children on the nodes of a Ray cluster, at most as many on a node as it has cpus.

    Args:
        address: `ray://HOST:PORT` of the cluster's client server.
        preload: as of `Workers`, on each node.
        limits: limits of each child.
        folder: existing or new folder for the files that children leave; `start` deletes its contents.
        gate: entered for each child's lifetime while a ready node is on this machine.
        required: whether a node that lacks a measure of the jail is refused.
        python: path of the Python on each node that compiles; None for the one that started Ray there.
        tenure: whose the children are; None for a server that shares its farm with none.
        report: called with each node whose state has changed.

    Raises:
        ExtraMissing: Ray is not installed.
    """

    def __init__(
        self,
        *,
        address: str,
        preload: Sequence[str],
        limits: Limits,
        folder: Path,
        gate: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
        required: bool = False,
        python: str | None = None,
        tenure: Tenure | None = None,
        report: Callable[[Node], None] = log_node,
    ) -> None:
        require_ray()
        slots = FairSlots(URGENT, reserved=URGENT)
        super().__init__(limits=limits, folder=folder, slots=slots, gate=self._enter_gate)
        self._address = address
        self._settings = {
            "address": address, "versions": json.loads(versions.describe()), "preload": list(preload),
            "limits": asdict(limits), "required": required, "python": python, "tenure": asdict(tenure or Tenure.of_lone_server()),
        }  # fmt: skip
        self._gate_here = gate
        self._report = report
        self._connector: ConnectorProcess | None = None
        self._nodes: dict[str, Node] = {}
        self._changed = asyncio.Event()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that have joined, and those that were lost since the start and did not come back."""
        return tuple(self._nodes.values())

    @property
    def connector_pid(self) -> int | None:
        """The process id of the connector; None before the start and after `stop`."""
        return None if self._connector is None else self._connector.process.pid

    def measure(self) -> PoolUse:
        """Return the pool's use, with the numbers of nodes by state."""
        states = Counter(node.state for node in self._nodes.values())
        return replace(super().measure(), nodes={state.value: states[state] for state in NodeState})

    async def changed(self) -> None:
        """Wait until a node's state changes."""
        self._changed.clear()
        await self._changed.wait()

    def start(self) -> None:
        """Prepare the folder and start the connector; see `ChildPool.start`."""
        output_files.delete(self._folder)
        self._folder.mkdir(parents=True, mode=0o700)
        self._is_started = True
        self._current()

    async def ready(self) -> None:
        """Wait until a node is ready. A cluster that cannot be reached may be so later."""
        await self._wait_for(lambda: bool(self._ready_nodes()))

    async def settled(self, timeout_s: float) -> tuple[Node, ...]:
        """Return the nodes once there are some and each is ready or refused, or after a time.

        Raises:
            WorkersDown: the cluster cannot be reached, or does not answer within the time.
        """
        connector = self._current()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._connect()
                await self._wait_for(lambda: bool(self._nodes) and not self._has(NodeState.PREPARING))
        if not connector.warm.done():
            raise self._unusable(f"it did not answer for {timeout_s:g} s")
        return self.nodes

    async def stop(self) -> None:
        """End the children and the connector, and delete the folder."""
        await self._stop_running()
        if self._connector is not None:
            await self._connector.end()
            self._connector.close()
            self._connector = None
        await delete(self._folder)

    @contextlib.contextmanager
    def place(self, task: str, folder: Path, *, light: bool = False) -> Iterator[Ends]:
        """Order a child of the connector, which chooses its node; see `ChildPool.place`. Nodes are warm for all tasks."""
        limits = {"reserve_bytes": self._limits.reserve_bytes, "file_bytes": self._limits.file_bytes}
        order = {"task": task, "folder": str(folder), **limits}
        yield self._current().send_order(order)

    async def _warm_up(self, light: bool) -> None:
        await self._connect()
        until_s = time.monotonic() + PREPARING_WAIT_S
        while not self._ready_nodes():
            try:
                async with asyncio.timeout(NODE_WAIT_S):
                    await self._wait_for(lambda: bool(self._ready_nodes()))
            except TimeoutError:
                if not self._has(NodeState.PREPARING) or time.monotonic() > until_s:
                    raise no_compile_node(self._address, self.nodes) from None

    async def _connect(self) -> None:
        failed = await asyncio.shield(self._current().warm)
        for why in failed.values():
            raise self._unusable(why)

    def _unusable(self, why: str) -> WorkersDown:
        return WorkersDown(
            f"The Ray cluster {self._address} cannot be used: {why}.",
            "Check the address of its client server, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.",
            entry=self._address,
            why=why,
        )

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            if not self._current().has_ended:
                await self._changed.wait()
            if self._connector is not None and self._connector.has_ended:
                await asyncio.sleep(_RESTART_S)

    def _has(self, state: NodeState) -> bool:
        return any(node.state is state for node in self._nodes.values())

    def _ready_nodes(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.state is NodeState.READY]

    def _current(self) -> ConnectorProcess:
        if not self._is_started:
            raise WorkersDown("The compile workers are not running.", "Call start() first.")
        if self._connector is not None and self._connector.has_ended:
            self._connector.close()
            self._connector = None
            self._nodes.clear()
            self._slots.resize(URGENT)
        if self._connector is None:
            self._connector = ConnectorProcess(self._folder, self._settings, self._on_node, self._on_connector_end)
        return self._connector

    def _on_node(self, node: Node) -> None:
        is_new = node.id not in self._nodes
        self._nodes[node.id] = node
        lost = [each for each in self._nodes.values() if each.state is NodeState.LOST]
        back = [each.id for each in lost if is_new and (each.host, each.address) == (node.host, node.address)]
        for node_id in back or [each.id for each in lost[:-_KEPT_LOST]]:
            del self._nodes[node_id]
        self._report(node)
        self._slots.resize(min(sum(each.cpus for each in self._ready_nodes()), _MAX_CHILDREN) + URGENT)
        self._changed.set()

    def _on_connector_end(self) -> None:
        """Give up the nodes of a connector that has ended by itself; start another one, also while no task needs it."""
        assert self._connector is not None
        log.warning("the connection to the Ray cluster has ended", address=self._address, why=_reason_of(self._connector))
        for node in self.nodes:
            if node.state is not NodeState.LOST:
                self._on_node(replace(node, state=NodeState.LOST, detail="the connection to the Ray cluster has ended"))
        self._changed.set()
        asyncio.get_running_loop().call_later(_IDLE_RESTART_S, lambda: self._is_started and self._current())

    @contextlib.asynccontextmanager
    async def _enter_gate(self) -> AsyncIterator[None]:
        async with self._gate_here() if any(node.is_here for node in self._ready_nodes()) else contextlib.nullcontext():
            yield


def _reason_of(connector: ConnectorProcess) -> str:
    is_connected = connector.warm.done() and not connector.warm.cancelled() and connector.warm.exception() is None
    return "; ".join(connector.warm.result().values()) if is_connected else "the connector ended"


def _environment(clean: dict[str, str]) -> dict[str, str]:
    """Return the connector's environment: Ray's variables of the server, with token authentication unless they say otherwise."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    variables.setdefault("RAY_AUTH_MODE", "token")
    default = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_TOKEN" not in variables and default.exists():
        variables.setdefault("RAY_AUTH_TOKEN_PATH", str(default))
    return clean | variables | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_CLIENT_RECONNECT_GRACE_PERIOD": _RECONNECT_S}
