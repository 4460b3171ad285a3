"""What a server that leads a farm of several servers does differently from a server that is alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from etfarm.server.cluster.errors import NoLeader
from etfarm.server.cluster.leadership import Leader
from etfarm.server.cluster.member import Member
from etfarm.server.cluster.metrics import ClusterMetrics
from etfarm.server.workers.cluster.tenure import Tenure
from etfarm.v1.farm_pb2 import FarmServer


class Lead:
    """The lead of a farm by this server.

    Args:
        member: this server, which has the lease.
        leader: this server as the leader.
        take_address: ends the forwarding of calls, so that this server itself can listen on the address.
    """

    def __init__(
        self, member: Member, leader: Leader, take_address: Callable[[], Awaitable[None]], metrics: ClusterMetrics
    ) -> None:
        self._member = member
        self.metrics = metrics
        """The metrics that this server has had since it started."""
        self.secret = leader.secret
        """The secret by which calls of other servers are recognized."""
        self.tenure = Tenure.of_leader(leader.secret, leader.token)
        """The owner of the children on a compile cluster."""
        self.fence = member.fence()
        """The check of each write transaction."""
        self.take_address = take_address

    def ended(self) -> NoLeader:
        """Return the error of calls that are open when this server's lead ends."""
        return NoLeader("This server no longer leads the farm.", "Try again; another one takes over within seconds.")

    def servers(self) -> Sequence[FarmServer]:
        """Return the farm's servers, this one first."""
        own = self._member.id
        return [
            FarmServer(address=row.address, version=row.version, leads=row.id == own, start_time=row.started_at)
            for row in sorted(self._member.servers, key=lambda row: row.id != own)
        ]
