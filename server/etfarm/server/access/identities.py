"""Agent identities: the principals whose tokens may connect as each agent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, delete, func, select

from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.common_pb2 import Principal, Role
from etfarm.wire.errors import EtfarmError, error_for

MAX_REFUSED: Final = 1000
"""Number of refused identities that are kept for an admin to see; the oldest are dropped first."""

MAX_IDENTITIES: Final = 1_000
"""Maximum number of identities of one principal. A token that is not bound to an agent may connect as any new agent."""


@dataclass(frozen=True)
class Identity:
    """An agent identity and the principal that it is bound to."""

    agent_id: str
    principal: str
    """The principal's name; empty if the identity is not bound."""
    refused: str = ""
    """The last principal that was refused this unbound identity."""
    is_retired: bool = False


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
        self._retired: set[str] = set()

    async def load(self) -> None:
        """Load the bindings from the database."""
        table = schema.agents
        rows = await self._database.read(lambda connection: connection.execute(select(table)).all())
        self._bound = {row.id: row.principal for row in rows}
        self._retired = {row.id for row in rows if row.retired_at is not None}

    def principal_of(self, agent_id: str) -> str:
        """Return the principal that the identity is bound to; empty if it is not bound."""
        return self._bound.get(agent_id, "")

    async def admit(self, agent_id: str, caller: Principal) -> None:
        """Allow a caller to connect as an agent, and bind a new identity to the caller.

        Admins, including every caller of a server without tokens, may connect as any agent and bind no identity.

        Raises:
            AGENT_RETIRED: the agent's last device was retired.
            AGENT_NOT_YOURS: the identity is bound to another principal, or the caller's token to another identity.
            AGENT_UNBOUND: the identity has devices from before it was bound.
            TOO_MANY_AGENTS: the caller has the maximum number of identities.
        """
        self.require_not_retired(agent_id)
        if caller.role == Role.ROLE_ADMIN:
            return
        if caller.agent_id not in ("", agent_id):
            raise error_for(
                "AGENT_NOT_YOURS",
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
            raise error_for(
                "AGENT_UNBOUND",
                f"Agent {agent_id} was registered before agents had tokens and is not bound, so {caller.name} cannot claim it.",
                f"Ask an admin to run `etfarm agents bind {agent_id} {caller.name}`.", agent_id=agent_id,
            )  # fmt: skip
        await self._claim(agent_id, caller.name)

    def require_not_retired(self, agent_id: str) -> None:
        """Raise an error if an agent's last device was retired, since when it has neither enrolled nor been bound.

        Raises:
            AGENT_RETIRED: it was.
        """
        if agent_id in self._retired:
            raise error_for(
                "AGENT_RETIRED",
                f"An admin has retired agent {agent_id} with its device.",
                "If it shall serve again, start it with a new one-time token: `etfarm tokens create NAME --agent`. If other "
                f"agents use its token, too, `etfarm agents bind {agent_id} {self.principal_of(agent_id) or 'NAME'}` is enough.",
                agent_id=agent_id,
            )  # fmt: skip

    async def bind(self, agent_id: str, principal: str, *, by: str) -> Identity:
        """Bind a known or refused identity to a principal, replacing an earlier binding, and admit it if it was retired.

        Return the identity, which says whether it was retired until now: then its own token stays revoked.

        Raises:
            AGENT_NOT_FOUND: no agent with this id ever connected or tried to.
        """
        if agent_id not in self._bound and agent_id not in self._refused and not self._is_known(agent_id):
            raise _not_found(agent_id)
        was_retired = agent_id in self._retired
        await self._bind(agent_id, principal, by=by)
        return Identity(agent_id, principal, is_retired=was_retired)

    def list(self, known: Mapping[str, object]) -> list[Identity]:
        """Return all identities sorted by id: bound ones, refused ones, and those of the agents in `known`."""
        return [self._identity(agent_id) for agent_id in sorted({*self._bound, *self._refused, *known})]

    def find(self, key: str, known: Collection[str]) -> Identity:
        """Return the identity with an id, or the only one of a principal.

        Args:
            known: ids of agents that are not bound, but have devices.

        Raises:
            AGENT_NOT_FOUND: there is none.
            AGENT_AMBIGUOUS: the principal has several.
        """
        if key in self._bound or key in self._refused or key in known:
            return self._identity(key)
        of_principal = sorted(agent_id for agent_id, principal in self._bound.items() if principal == key != "")
        if not of_principal:
            raise _not_found(key)
        if len(of_principal) > 1:
            shown = ", ".join(of_principal[:20]) + (f" and {len(of_principal) - 20} more" if len(of_principal) > 20 else "")
            raise error_for(
                "AGENT_AMBIGUOUS",
                f"{key} has {len(of_principal)} agents: {shown}.",
                "Give the id of one.",
                agents=" ".join(of_principal[:20]),
            )
        return self._identity(of_principal[0])

    def enrolled(self, agent_id: str, principal: str) -> None:
        """Record that the database binds an identity to the principal with whose token it enrolled."""
        self._bound[agent_id] = principal
        self._refused.pop(agent_id, None)
        self._retired.discard(agent_id)

    async def retire(self, agent_id: str, *, by: str) -> None:
        """Refuse an identity until it is bound again or enrols."""
        table, at = schema.agents, self._now()
        row = {"id": agent_id, "principal": self.principal_of(agent_id), "bound_at": at, "bound_by": by, "retired_at": at}

        def write(connection: Connection) -> None:
            new = insert(table).values(**row)
            connection.execute(new.on_conflict_do_update(index_elements=["id"], set_={"retired_at": at}))

        await self._database.write(write, durable=True)
        self._bound.setdefault(agent_id, "")
        self._retired.add(agent_id)

    async def remove(self, agent_id: str) -> None:
        """Forget an identity; an agent that has it is new the next time."""
        await self._database.write(
            lambda connection: connection.execute(delete(schema.agents).where(schema.agents.c.id == agent_id)), durable=True
        )
        self._bound.pop(agent_id, None)
        self._refused.pop(agent_id, None)
        self._retired.discard(agent_id)

    def _identity(self, agent_id: str) -> Identity:
        return Identity(agent_id, self.principal_of(agent_id), self._refused.get(agent_id, ""), agent_id in self._retired)

    async def _claim(self, agent_id: str, principal: str) -> None:
        """Bind an unbound identity. An identity that was bound in the meantime keeps its principal.

        Raises:
            AGENT_NOT_YOURS: the identity is bound to another principal.
            TOO_MANY_AGENTS: the principal has the maximum number of identities.
        """
        table = schema.agents

        def write(connection: Connection) -> str:
            owner = connection.execute(select(table.c.principal).where(table.c.id == agent_id)).scalar()
            if owner is not None:
                return str(owner)
            count = select(func.count()).select_from(table).where(table.c.principal == principal)
            if connection.execute(count).scalar_one() >= MAX_IDENTITIES:
                raise error_for(
                    "TOO_MANY_AGENTS",
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
        row = {"principal": principal, "bound_at": self._now(), "bound_by": by, "retired_at": None}

        def write(connection: Connection) -> None:
            new = insert(schema.agents).values(id=agent_id, **row)
            connection.execute(new.on_conflict_do_update(index_elements=["id"], set_=row))

        await self._database.write(write, durable=True)
        self.enrolled(agent_id, principal)


def _not_found(key: str) -> EtfarmError:
    return error_for("AGENT_NOT_FOUND", f"There is no agent {key[:80]!r}.", "See `etfarm agents list`.", agent_id=key[:80])


def _bound_to_another(agent_id: str) -> EtfarmError:
    return error_for(
        "AGENT_NOT_YOURS",
        f"Agent {agent_id} is bound to another token.",
        "Connect with the token that it enrolled with, or ask an admin to run `etfarm agents bind`.", agent_id=agent_id,
    )  # fmt: skip
