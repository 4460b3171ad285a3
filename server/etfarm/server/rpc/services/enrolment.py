"""AgentService.Enroll: the exchange of a one-time token for the token of one agent."""

from __future__ import annotations

from collections.abc import Callable

from etfarm.server.access.identities import Identities
from etfarm.server.access.tokens import TokenTable
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.session import AgentSession
from etfarm.server.rpc.door.caller import credential
from etfarm.server.rpc.services.protocol import require_common_version
from etfarm.v1 import agent_pb2
from etfarm.v1.device_pb2 import Device


class Enrolment:
    """Enrolment of agents, for AgentService.

    Args:
        clock: returns seconds on a monotonic clock.
        version: the server's version of etfarm.
    """

    def __init__(
        self, table: TokenTable, registry: Registry, identities: Identities, clock: Callable[[], float], version: str
    ) -> None:
        self._table = table
        self._registry = registry
        self._identities = identities
        self._clock = clock
        self._version = version

    async def enroll(self, request: agent_pb2.EnrollAgentRequest) -> agent_pb2.EnrollAgentResponse:
        """Handle AgentService.Enroll; see agent.proto for its errors."""
        caller = credential()
        # Before the token is used up: an agent that could not connect would need another one.
        require_common_version(request, self._version)
        session = AgentSession(request.agent_id, request.boot_id, self._clock, principal=caller.principal.name)
        await self._registry.accept(session, [Device(id=device_id) for device_id in request.device_ids])
        is_known = self._registry.is_agent_known(request.agent_id)
        secret = await self._table.enroll(caller, request.agent_id, is_known=is_known)
        self._identities.enrolled(request.agent_id, caller.principal.name)
        return agent_pb2.EnrollAgentResponse(token=secret, principal=caller.principal.name)
