"""AgentService.Enroll: the exchange of a one-time token for the token of one agent."""

from __future__ import annotations

from collections.abc import Callable

from etfarm.server.access.tokens import TokenTable
from etfarm.server.rpc.door.caller import credential
from etfarm.v1 import agent_pb2


class Enrolment:
    """Enrolment of agents, for AgentService.

    Args:
        is_known: returns whether the farm has devices of an agent identity.
    """

    def __init__(self, table: TokenTable, is_known: Callable[[str], bool]) -> None:
        self._table = table
        self._is_known = is_known

    async def enroll(self, request: agent_pb2.EnrollAgentRequest) -> agent_pb2.EnrollAgentResponse:
        """Handle AgentService.Enroll; see agent.proto for its errors."""
        caller = credential()
        secret = await self._table.enroll(caller, request.agent_id, is_known=self._is_known(request.agent_id))
        return agent_pb2.EnrollAgentResponse(token=secret, principal=caller.principal.name)
