"""The farm's identity, which is made with its data and stays with them: in backups, and on moves to other engines."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from etfarm.server.state import schema

_NEWEST: Final = schema.farm.c.created_at.desc(), schema.farm.c.id
FARM_ID: Final = select(schema.farm.c.id).order_by(*_NEWEST).limit(1)
"""The query of the farm's id."""
SINCE: Final = select(schema.farm.c.created_at).order_by(*_NEWEST).limit(1)
"""The query of the time at which the farm was made, or restored as itself."""
NEVER: Final = datetime.min.replace(tzinfo=UTC)
_STEP: Final = timedelta(milliseconds=1)
_LAST: Final = datetime.max.replace(tzinfo=UTC) - _STEP
"""The latest time that somebody may have written which can be exceeded."""


class Identity(NamedTuple):
    """Which farm a database is of, and which of its databases it is: a restored one is newer than the one that was backed up."""

    farm_id: str
    since: datetime
    """When the farm was made, or restored with --keep-identity."""

    @property
    def text(self) -> str:
        """The identity as one line."""
        return f"{self.farm_id} {self.since.isoformat()}"

    @classmethod
    def of(cls, farm_id: str, since: str) -> Identity:
        """Return an identity from texts; a time that is none is the earliest."""
        try:
            at = datetime.fromisoformat(since)
            return cls(farm_id, at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC))
        except (ValueError, OverflowError):
            return cls(farm_id, NEVER)

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Return what `text` was made of; somebody may have changed it."""
        farm_id, _, since = text.strip().partition(" ")
        return cls.of(farm_id, since)

    def later_than(self, former: Identity | None) -> Identity:
        """Return this identity, with a time after that of a former database of the same farm, whatever the clock says."""
        if former is None or former.farm_id != self.farm_id or former.since < self.since:
            return self
        return self._replace(since=min(former.since, _LAST) + _STEP)


def read(connection: Connection) -> Identity:
    """Return the identity of the farm's database."""
    return Identity(farm_id(connection), connection.execute(SINCE).scalar_one())


def farm_id(connection: Connection) -> str:
    """Return the farm's id."""
    return str(connection.execute(FARM_ID).scalar_one())


def new_farm_id() -> str:
    """Return an id for a farm."""
    return str(uuid.uuid4())


def renew(connection: Connection, identity: Identity | None = None) -> None:
    """Give the farm another identity, in the transaction of the connection: agents do not take one of another id for theirs.

    Args:
        identity: the identity, which may have the same id; None to make one.
    """
    new = identity or Identity(new_farm_id(), datetime.now(UTC))
    own = update(schema.farm).where(schema.farm.c.id == new.farm_id).values(created_at=new.since)
    if connection.execute(own).rowcount:
        return
    connection.execute(delete(schema.farm))
    connection.execute(insert(schema.farm).values(id=new.farm_id, created_at=new.since))
