"""The owner of the children on a cluster's nodes: the server that leads the farm, and no former leader."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_SEPARATOR: Final = ":"


@dataclass(frozen=True)
class Tenure:
    """The time for which a server leads its farm. On each node, it ends what earlier ones have left there."""

    farm: str
    """Identifies the farm to other users of the cluster."""
    term: int = 0
    """Number of the leader; a later one has a higher number."""

    @classmethod
    def of_lone_server(cls) -> Tenure:
        """Return the tenure of a server that shares its farm with none."""
        return cls(f"etfarm-{uuid.uuid4().hex}")

    @classmethod
    def of_leader(cls, secret: str, term: int) -> Tenure:
        """Return the tenure of a leader.

        Args:
            secret: what the farm's servers share, and nobody else knows.
        """
        return cls(f"etfarm-{hashlib.sha256(secret.encode()).hexdigest()[:32]}", term)

    def name(self, node: str) -> str:
        """Return a new name for what this server starts on a node."""
        return _SEPARATOR.join((node, str(self.term), uuid.uuid4().hex))

    def list_former(self, names: Iterable[str], own: str) -> list[str] | None:
        """Return those of the farm's names on the node of `own` whose owners are to end; None if a later leader is there."""
        node = own.partition(_SEPARATOR)[0]
        others = [name for name in names if name.partition(_SEPARATOR)[0] == node and name != own]
        return None if any(int(name.split(_SEPARATOR)[1]) > self.term for name in others) else others
