"""The option that names a PostgreSQL database, of the commands that work on a farm's data themselves."""

from __future__ import annotations

import argparse

from etfarm.server.state.database_url import DatabaseUrl


def add_database_option(parser: argparse.ArgumentParser, purpose: str = "the server's PostgreSQL database") -> None:
    """Add the option to a command.

    Args:
        purpose: what the command does with the database, as help.
    """
    parser.add_argument(
        "--database", type=DatabaseUrl.parse, metavar="URL", help=f"{purpose} (default: the SQLite file in --data)"
    )
