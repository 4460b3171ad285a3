"""The tokens and agents that a restored farm admits, some of which may have been revoked since the backup."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, or_, select, update

from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, unseal
from etfarm.v1.device_pb2 import Device


def revoke_tokens(connection: Connection, now: datetime) -> None:
    """Revoke all tokens. Their rows stay, so that the server still asks for tokens."""
    tokens = schema.tokens
    connection.execute(update(tokens).where(tokens.c.revoked_at.is_(None)).values(revoked_at=now))


def describe_revived(connection: Connection, now: datetime) -> Iterator[str]:
    """Yield lines that list the tokens and agents which the farm admits."""
    tokens = _usable(connection, now)
    if tokens:
        yield f"{len(tokens)} token{'s are' if len(tokens) > 1 else ' is'} usable again; --without-tokens leaves them out:"
    for token in tokens:
        use = ", for one enrolment" if token.enrolment else f", of agent {token.agent_id}" if token.agent_id else ""
        until = f", until {token.expires_at:%Y-%m-%d}" if token.expires_at else ""
        yield f"  {token.id}  {token.principal} ({token.role}{use}{until})"
    agents = connection.execute(
        select(schema.agents).where(schema.agents.c.retired_at.is_(None)).order_by(schema.agents.c.principal, schema.agents.c.id)
    ).all()
    if agents:
        yield f"{len(agents)} agent{'s are' if len(agents) > 1 else ' is'} admitted with a token of the principal:"
    devices: dict[str, list[str]] = {}
    for row in connection.execute(select(schema.devices.c.body)):
        with suppress(ValueDamaged):  # the server says what is wrong with such a device
            device = unseal(Device, row.body, "", "")
            devices.setdefault(device.agent_id, []).append(device.name)
    for agent in agents:
        yield f"  {agent.id}  {agent.principal}, {', '.join(sorted(devices.get(agent.id, ()))) or 'without a device'}"


def _usable(connection: Connection, now: datetime) -> list[Row[Any]]:
    table = schema.tokens
    query = select(table).where(
        table.c.revoked_at.is_(None),
        or_(table.c.expires_at.is_(None), table.c.expires_at > now),
        or_(table.c.enrolment.is_(False), table.c.agent_id.is_(None)),
    )
    return list(connection.execute(query.order_by(table.c.principal, table.c.id)).all())
