"""The state of a cluster's nodes, as the connector reports it to the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from etfarm.server.workers.jail.measures import NAMES
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.escapes import in_a_line

_MAX_TEXT = 1000
_MAX_NAME = 100
MAX_CPUS: Final = 512
"""Maximum number of children on a node at a time, however many cpus it claims."""


class NodeState(StrEnum):
    """The state of a node."""

    PREPARING = "preparing"
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    id: str
    """Ray's id of the node, which has another one after Ray was started again there."""
    host: str
    address: str
    cpus: int
    """The cpus that the node has according to Ray, and the number of children that run on it at a time."""
    state: NodeState
    detail: str = ""
    """Why the node is refused or lost."""
    is_here: bool = False
    """Whether the node's machine is the server's."""
    jail: tuple[str, ...] = ()
    """The measures of the children's jail that the node does not allow, with the reasons."""

    def to_message(self) -> dict[str, Any]:
        """Return the node as JSON, whose size is bounded: a node chooses its texts."""
        return asdict(self.bounded())

    def bounded(self) -> Node:
        """Return the node with texts of bounded length that control no terminal."""
        node_id, host, address = (in_a_line(name[:_MAX_NAME]) for name in (self.id, self.host, self.address))
        jail = tuple(in_a_line(each[:_MAX_TEXT]) for each in self.jail[: len(NAMES)])
        detail, cpus = in_a_line(self.detail[:_MAX_TEXT]), max(0, min(self.cpus, MAX_CPUS))
        return Node(node_id, host, address, cpus, self.state, detail, self.is_here, jail)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Node:
        """Return the node that `to_message` wrote."""
        return cls(
            str(message["id"]), str(message["host"]), str(message["address"]), int(message["cpus"]), NodeState(message["state"]),
            str(message["detail"]), message["is_here"] is True, tuple(str(each) for each in message["jail"]),
        ).bounded()  # fmt: skip

    @property
    def name(self) -> str:
        """Host name, address, and the beginning of the id."""
        return f"{self.host} ({self.address}, {self.id[:8]})"

    @property
    def text(self) -> str:
        """The node for people: name, cpus, state and why."""
        limits = f"; jail without {'; '.join(self.jail)}" if self.jail else ""
        return f"{self.name}, {self.cpus} cpus, {self.state}{f': {self.detail}' if self.detail else ''}{limits}"


def no_compile_node(address: str, nodes: Iterable[Node]) -> EtfarmError:
    """Return the error that no node of the cluster takes work."""
    states = " ".join(f"{node.text.rstrip('.')}." for node in nodes) or "It has no node with cpus."
    return error_for(
        "NO_COMPILE_NODE",
        f"No node of the Ray cluster {address} can compile. {states}"[:4000],
        "Start nodes with the server's versions of torch, executorch, torchao, etfarm and Python.",
        address=address,
    )  # fmt: skip
