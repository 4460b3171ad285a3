"""The farm's identity, which is made with its data and stays with them: in backups, and on moves to other engines."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from sqlalchemy import Connection, delete, insert, select

from etfarm.server.state import schema


def farm_id(connection: Connection) -> str:
    """Return the farm's id."""
    table = schema.farm
    return str(connection.execute(select(table.c.id).order_by(table.c.created_at.desc(), table.c.id).limit(1)).scalar_one())


def renew(connection: Connection) -> None:
    """Give the farm a new id, in the transaction of the connection: agents of the former one do not take it for theirs."""
    connection.execute(delete(schema.farm))
    connection.execute(insert(schema.farm).values(id=str(uuid.uuid4()), created_at=datetime.now(UTC)))
