"""The state of a cluster's nodes, as the connector reports it to the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from etfarm.wire.errors import FarmError, Kind

_MAX_TEXT = 1000


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
        """Return the node as JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Node:
        """Return the node that `to_message` wrote."""
        return cls(
            str(message["id"])[:100], str(message["host"])[:100], str(message["address"])[:100], int(message["cpus"]),
            NodeState(message["state"]), str(message["detail"])[:_MAX_TEXT], message["is_here"] is True,
            tuple(str(each)[:_MAX_TEXT] for each in message["jail"]),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Host name, address, and the beginning of the id."""
        return f"{self.host} ({self.address}, {self.id[:8]})"

    @property
    def text(self) -> str:
        """The node for people: name, cpus, state and why."""
        limits = f"; jail without {'; '.join(self.jail)}" if self.jail else ""
        return f"{self.name}, {self.cpus} cpus, {self.state}{f': {self.detail}' if self.detail else ''}{limits}"


class NoCompileNode(FarmError):
    """No node of the cluster takes work."""

    reason = "NO_COMPILE_NODE"
    kind = Kind.UNAVAILABLE

    def __init__(self, address: str, nodes: Iterable[Node]) -> None:
        states = " ".join(f"{node.text.rstrip('.')}." for node in nodes) or "It has no node with cpus."
        super().__init__(
            f"No node of the Ray cluster {address} can compile. {states}"[:4000],
            "Start nodes with the server's versions of torch, executorch, torchao, etfarm and Python.",
            address=address,
        )  # fmt: skip
