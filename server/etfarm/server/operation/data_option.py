"""The options --data, --database and --config of the commands that work on a farm's data themselves."""

from __future__ import annotations

import argparse
from pathlib import Path

from etfarm.server.state.database_url import DatabaseUrl
from etfarm.wire.names import SETTING_PREFIX, data_folder
from etfarm.wire.private import require_own


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="the server's TOML, as of `etfarm serve`: options of the command line win, then "
                        f"{SETTING_PREFIX} variables, then this file")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help=f"the server's data folder (default: {data_folder() / 'server'})".replace("%", "%%"))  # fmt: skip


def data_of(arguments: argparse.Namespace) -> Path:
    """Return the folder that a parsed option names."""
    folder: Path = arguments.data or data_folder() / "server"
    return folder.absolute()


def require_owner(folder: Path) -> None:
    """Refuse a folder of another user.

    Raises:
        FolderNotPrivate: the folder exists, and belongs to another user than that of this process.
    """
    if folder.exists():
        require_own(folder)


def add_database_option(parser: argparse.ArgumentParser, purpose: str = "the server's PostgreSQL database") -> None:
    """Add the option to a command.

    Args:
        purpose: what the command does with the database, as help.
    """
    parser.add_argument(
        "--database", type=DatabaseUrl.parse, metavar="URL", help=f"{purpose} (default: the SQLite file in --data)"
    )
