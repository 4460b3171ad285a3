"""Agent identities: the principals whose tokens may connect as each agent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, func, select

from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.common_pb2 import Principal, Role
from etfarm.wire.errors import Kind, UserError

MAX_REFUSED: Final = 1000
"""Number of refused identities that are kept for an admin to see; the oldest are dropped first."""

MAX_IDENTITIES: Final = 1_000
"""Maximum number of identities of one principal. A token that is not bound to an agent may connect as any new agent."""


class AgentNotYours(UserError):
    """An agent identity that is bound to another principal's token."""

    reason = "AGENT_NOT_YOURS"
    kind = Kind.PERMISSION_DENIED


class AgentUnbound(UserError):
    """An agent identity that predates the binding of identities, so an admin has to bind it."""

    reason = "AGENT_UNBOUND"
    kind = Kind.PERMISSION_DENIED


class TooManyAgents(UserError):
    """A principal with more identities than the maximum."""

    reason = "TOO_MANY_AGENTS"
    kind = Kind.RESOURCE_EXHAUSTED


class AgentNotFound(UserError):
    """An agent id that never connected or tried to."""

    reason = "AGENT_NOT_FOUND"
    kind = Kind.NOT_FOUND


@dataclass(frozen=True)
class Identity:
    """An agent identity and the principal that it is bound to."""

    agent_id: str
    principal: str
    """The principal's name; empty if the identity is not bound."""
    refused: str = ""
    """The last principal that was refused this unbound identity."""


class Identities:
    """Bindings of agent identities to principals.

    Args:
        is_known: returns whether a stored device belongs to an agent identity.
        now: returns the current time in UTC.
    """

    def __init__(self, database: Database, is_known: Callable[[str], bool], now: Callable[[], datetime]) -> None:
        self._database = database
        self._is_known = is_known
        self._now = now
        self._bound: dict[str, str] = {}
        self._refused: OrderedDict[str, str] = OrderedDict()

    async def load(self) -> None:
        """Load the bindings from the database."""
        table = schema.agents
        rows = await self._database.read(lambda connection: connection.execute(select(table.c.id, table.c.principal)).all())
        self._bound = {row.id: row.principal for row in rows}

    def principal_of(self, agent_id: str) -> str:
        """Return the principal that the identity is bound to; empty if it is not bound."""
        return self._bound.get(agent_id, "")

    async def admit(self, agent_id: str, caller: Principal) -> None:
        """Allow a caller to connect as an agent, and bind a new identity to the caller.

        Admins, including every caller of a server without tokens, may connect as any agent and bind no identity.

        Raises:
            AgentNotYours: the identity is bound to another principal, or the caller's token to another identity.
            AgentUnbound: the identity has devices from before it was bound.
            TooManyAgents: the caller has the maximum number of identities.
        """
        if caller.role == Role.ROLE_ADMIN:
            return
        if caller.agent_id not in ("", agent_id):
            raise AgentNotYours(
                f"The token belongs to agent {caller.agent_id} and cannot be used by agent {agent_id}.",
                "Give each agent a token of its own: `etfarm tokens create NAME --agent`.", agent_id=agent_id,
            )  # fmt: skip
        bound = self.principal_of(agent_id)
        if bound == caller.name:
            return
        if bound:
            raise _bound_to_another(agent_id)
        if self._is_known(agent_id) and not caller.agent_id:
            self._refused[agent_id] = caller.name
            self._refused.move_to_end(agent_id)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
            raise AgentUnbound(
                f"Agent {agent_id} was registered before agents had tokens and is not bound, so {caller.name} cannot claim it.",
                f"Ask an admin to run `etfarm agents bind {agent_id} {caller.name}`.", agent_id=agent_id,
            )  # fmt: skip
        await self._claim(agent_id, caller.name)

    async def bind(self, agent_id: str, principal: str, *, by: str) -> Identity:
        """Bind a known or refused identity to a principal, replacing an earlier binding.

        Raises:
            AgentNotFound: no agent with this id ever connected or tried to.
        """
        if agent_id not in self._bound and agent_id not in self._refused and not self._is_known(agent_id):
            raise AgentNotFound(f"There is no agent {agent_id[:80]!r}.", "See `etfarm agents list`.", agent_id=agent_id[:80])
        await self._bind(agent_id, principal, by=by)
        return Identity(agent_id, principal)

    def list(self, known: Mapping[str, object]) -> list[Identity]:
        """Return all identities sorted by id: bound ones, refused ones, and those of the agents in `known`."""
        ids = {*self._bound, *self._refused, *known}
        return [Identity(agent_id, self.principal_of(agent_id), self._refused.get(agent_id, "")) for agent_id in sorted(ids)]

    async def _claim(self, agent_id: str, principal: str) -> None:
        """Bind an unbound identity. An identity that was bound in the meantime keeps its principal.

        Raises:
            AgentNotYours: the identity is bound to another principal.
            TooManyAgents: the principal has the maximum number of identities.
        """
        table = schema.agents

        def write(connection: Connection) -> str:
            owner = connection.execute(select(table.c.principal).where(table.c.id == agent_id)).scalar()
            if owner is not None:
                return str(owner)
            count = select(func.count()).select_from(table).where(table.c.principal == principal)
            if connection.execute(count).scalar_one() >= MAX_IDENTITIES:
                raise TooManyAgents(
                    f"{principal} already has {MAX_IDENTITIES:,} agents, which is the limit.",
                    "Create a token with another name for further agents: `etfarm tokens create NAME "
                    "--agent`.", limit=MAX_IDENTITIES,
                )  # fmt: skip
            row = {"id": agent_id, "principal": principal, "bound_at": self._now(), "bound_by": principal}
            connection.execute(insert(table).values(**row))
            return principal

        owner = await self._database.write(write, durable=True)
        self._bound[agent_id] = owner
        if owner != principal:
            raise _bound_to_another(agent_id)
        self._refused.pop(agent_id, None)

    async def _bind(self, agent_id: str, principal: str, *, by: str) -> None:
        row = {"principal": principal, "bound_at": self._now(), "bound_by": by}

        def write(connection: Connection) -> None:
            new = insert(schema.agents).values(id=agent_id, **row)
            connection.execute(new.on_conflict_do_update(index_elements=["id"], set_=row))

        await self._database.write(write, durable=True)
        self._bound[agent_id] = principal
        self._refused.pop(agent_id, None)


def _bound_to_another(agent_id: str) -> AgentNotYours:
    return AgentNotYours(
        f"Agent {agent_id} is bound to another token.",
        "Connect with the token that it enrolled with, or ask an admin to run `etfarm agents bind`.", agent_id=agent_id,
    )  # fmt: skip
