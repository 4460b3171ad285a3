"""The option that names a PostgreSQL database, of the commands that work on a farm's data themselves."""

from __future__ import annotations

import argparse
import os
from typing import Final

from etfarm.server.state.database_url import DatabaseUrl
from etfarm.wire.names import SETTING_PREFIX

_VARIABLE: Final = f"{SETTING_PREFIX}DATABASE"


def add_database_option(parser: argparse.ArgumentParser, purpose: str = "the server's PostgreSQL database") -> None:
    """Add the option to a command.

    Args:
        purpose: what the command does with the database, as help.
    """
    parser.add_argument(
        "--database", type=DatabaseUrl.parse, metavar="URL",
        help=f"{purpose} (default: {_VARIABLE}, else the SQLite file in --data)",
    )  # fmt: skip


def database_of(arguments: argparse.Namespace) -> DatabaseUrl | None:
    """Return the database that a parsed option or the server's own variable names; None for SQLite.

    Raises:
        BadDatabaseUrl: the variable is not valid.
    """
    if arguments.database is not None:
        url: DatabaseUrl = arguments.database
        return url
    text = os.environ.get(_VARIABLE)
    return DatabaseUrl.parse(text) if text else None
