"""The revisions of the tables, and the migrations between them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, inspect, text

from etfarm.wire.errors import error_for

log = structlog.get_logger()

HEAD: Final = "0020"
"""The newest migration, to which older databases are upgraded when they are opened."""

OLDEST: Final = "0020"
"""The baseline: the revision of etfarm 0.3.0, the first release."""

_MIGRATIONS: Final = Path(__file__).parent / "migrations"


def known_revisions() -> list[str]:
    """Return the revisions of databases that this version can open."""
    return [path.name.partition("_")[0] for path in (_MIGRATIONS / "versions").glob("[0-9]*.py")]


def require_known(revision: str) -> None:
    """Check that this version opens a database whose revision is one of etfarm's; anything else passes.

    Raises:
        DATABASE_TOO_NEW, DATABASE_TOO_OLD: a newer etfarm has written it, or one of before 0.3.0.
    """
    if not (revision.isdigit() and len(revision) == len(HEAD)):
        return
    if revision > HEAD:
        raise error_for(
            "DATABASE_TOO_NEW",
            f"The database has revision {revision}, this etfarm knows {HEAD} at most.",
            "Update etfarm, or choose another --data or --database.",
        )
    if revision < OLDEST:
        raise error_for(
            "DATABASE_TOO_OLD",
            f"The database has revision {revision}, of an etfarm before 0.3.0; this one knows {OLDEST} and later ones.",
            "Copy the data folder, and convert it once, in a checkout of etfarm: python docs/upgrade/convert.py FOLDER.",
        )


def revision_of(connection: Connection) -> str | None:
    """Return the revision of a database; None if it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return revision


def upgrade(connection: Connection, data: Path, revision: str | None, to: str = HEAD) -> None:
    """Migrate a database from its revision to a newer one, in the transaction of the connection.

    Args:
        data: the data folder, where migrations store files.
    """
    if revision == to:
        return
    if revision is not None:
        log.info(
            "converting the database for this version of etfarm; older versions cannot open it afterwards",
            revision=revision,
            to=to,
        )
    # Imported only if there is something to migrate: the import costs 10 MB and 0.2 s.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    config.attributes["data"] = data
    command.upgrade(config, to)
    if revision is not None:
        log.info("the database is converted", revision=to)
