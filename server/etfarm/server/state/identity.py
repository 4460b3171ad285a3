"""The farm's identity, which is made with its data and stays with them: in backups, and on moves to other engines."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, delete, insert, select

from etfarm.server.state import schema

FARM_ID: Final = select(schema.farm.c.id).order_by(schema.farm.c.created_at.desc(), schema.farm.c.id).limit(1)
"""The query of the farm's id."""


def farm_id(connection: Connection) -> str:
    """Return the farm's id."""
    return str(connection.execute(FARM_ID).scalar_one())


def new_farm_id() -> str:
    """Return an id for a farm."""
    return str(uuid.uuid4())


def renew(connection: Connection, farm_id: str = "") -> None:
    """Give the farm another id, in the transaction of the connection: agents of the former one do not take it for theirs.

    Args:
        farm_id: the id; empty to make one.
    """
    connection.execute(delete(schema.farm))
    connection.execute(insert(schema.farm).values(id=farm_id or new_farm_id(), created_at=datetime.now(UTC)))
