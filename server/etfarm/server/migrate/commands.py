"""The command `etfarm migrate`, which runs on the server's machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from etfarm.server.arguments import parse_command, read_configuration
from etfarm.server.artifacts.s3.options import bucket_options, location_of
from etfarm.server.migrate.migration import Migration, Moved, Place
from etfarm.server.operation.data_option import add_data_option, add_database_option, data_of, require_owner
from etfarm.server.operation.progress import Progress, size_text
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.folder import locked, require_restored
from etfarm.wire.errors import UserError
from etfarm.wire.private import close_umask

_SQLITE: Final = "sqlite"
_FILES: Final = "files"


def main(argv: list[str]) -> int:
    """Run `etfarm migrate`. Exit with 1 if artifacts were left behind."""
    arguments, _ = parse_command(_parser(), argv)
    _require_one_place(arguments)
    data = data_of(arguments)
    require_owner(data)
    close_umask()
    source = Place(arguments.database, location_of(arguments))
    target = _target(arguments, source)
    if not data.is_dir() and source.database is None:
        raise UserError(f"{data} is not a server's data folder.", "Name the folder with --data.")
    with locked(data), Progress() as progress:
        require_restored(data)
        moved = Migration(data, source, target, progress.show, skip_lost=arguments.skip_damaged).run()
    print("\n".join(_lines(data, source, target, moved, _next_steps(arguments, data, source, target))))
    for digest in moved.artifacts.lost:
        print(f"left behind, missing or damaged in the farm: {digest}", file=sys.stderr)
    return 1 if moved.artifacts.lost else 0


def _require_one_place(arguments: argparse.Namespace) -> None:
    """Refuse a command that names no place to move to, or that says twice, or only in part, where the place is.

    Raises:
        UserError: it does.
    """
    named = [
        f"--{name.replace('_', '-')}" for name, value in vars(arguments).items() if name.startswith("to_") and value is not None
    ]
    if not named:
        raise UserError(
            "The command does not say where to move the farm.", "Give --to-config; or --to-database, --to-blobs or both."
        )
    if arguments.to_config is not None and len(named) > 1:
        others = ", ".join(name for name in named if name != "--to-config")
        raise UserError(
            f"--to-config cannot be combined with {others}: it says where both rows and artifacts go.", f"Leave out {others}."
        )
    if arguments.to_blobs in (None, _FILES) and (of_bucket := [name for name in named if name.startswith("--to-blobs-")]):
        raise UserError(f"A bucket is required for {', '.join(of_bucket)}.", "Name it with --to-blobs s3://BUCKET/PREFIX.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etfarm migrate",
        description="Move a farm to other engines: its rows between SQLite and PostgreSQL, its artifacts between files and S3. "
        "All servers of the farm must be stopped. Everything is copied and compared first; the former state is kept, so that "
        "you can return to it. If it is interrupted, run it again: it continues.",
    )
    add_data_option(parser)
    add_database_option(parser)
    parser.add_argument("--to-config", type=Path, metavar="FILE",
                        help="move rows and artifacts to where this TOML of `etfarm serve` has them: the farm's new "
                        "configuration")  # fmt: skip
    parser.add_argument("--to-database", metavar="URL",
                        help=f"move the rows to this empty PostgreSQL database, or, as {_SQLITE!r}, to a SQLite file in --data. "
                        "Keep a password out of the arguments: use passfile=FILE in the URL (default: they stay)")  # fmt: skip
    parser.add_argument("--skip-damaged", action="store_true",
                        help="leave behind artifacts that are missing or damaged in the farm, and exit with 1")  # fmt: skip
    group = parser.add_argument_group("where the artifacts are")
    group.add_argument("--blobs", metavar="URL", help="bucket that has them, as for `etfarm serve` (default: files in --data)")
    for each in bucket_options("--blobs"):
        each.add(group)
    group = parser.add_argument_group("where to move the artifacts", "S3 needs etfarm[scale].")
    group.add_argument("--to-blobs", metavar="URL",
                       help=f"move them to this empty folder of a bucket, as s3://BUCKET/PREFIX, or, as {_FILES!r}, to files "
                       "in --data (default: they stay)")  # fmt: skip
    for each in bucket_options("--to-blobs"):
        each.add(group)
    return parser


def _target(arguments: argparse.Namespace, source: Place) -> Place:
    if arguments.to_config is not None:
        new = read_configuration(arguments.to_config)
        return Place(new.database, location_of(new))
    database, blobs = source.database, source.blobs
    if arguments.to_database is not None:
        database = None if arguments.to_database == _SQLITE else DatabaseUrl.parse(arguments.to_database)
    if arguments.to_blobs is not None:
        blobs = None if arguments.to_blobs == _FILES else location_of(arguments, "to_blobs")
    return Place(database, blobs)


def _next_steps(arguments: argparse.Namespace, data: Path, source: Place, target: Place) -> list[str]:
    """Return how to start the server at the new place."""
    if arguments.to_config is None:
        settings = _settings(source, target, arguments.to_blobs_ca)
        return ["Before the server starts, change its configuration:", *(f"    {line}" for line in settings)]
    named = data_of(read_configuration(arguments.to_config))
    return [f"Start the server: etfarm serve --config {arguments.to_config}" + ("" if named == data else f" --data {data}")]


def _lines(data: Path, source: Place, target: Place, moved: Moved, next_steps: list[str]) -> list[str]:
    """Return what was done, how to go on, and what has the former state."""
    done = []
    if source.database != target.database:
        done.append(f"{moved.row_count:,} rows to {f'SQLite in {data}' if target.database is None else target.database}")
    if source.blobs_name != target.blobs_name:
        done.append(f"{moved.artifacts.count:,} artifacts ({size_text(moved.artifacts.size_bytes)}) to {target.blobs_name}")
    return [
        f"Moved and compared: {', '.join(done)}.",
        *next_steps,
        "The former state, which you may delete once the farm runs as it should:",
        *(f"    {each}" for each in moved.former),
    ]


def _settings(source: Place, target: Place, authorities: Path | None) -> list[str]:
    """Return what to change in the configuration.

    Args:
        authorities: file of the certificates of the target's bucket.
    """
    lines = []
    if source.database != target.database:
        hidden = "  # with the password instead of ***" if target.database is not None and target.database.has_password else ""
        lines.append("remove database" if target.database is None else f'database = "{target.database}"{hidden}')
    if source.blobs_name == target.blobs_name:
        return lines
    if target.blobs is None:
        return [*lines, "remove blobs, and the settings that begin with blobs-"]
    blobs = target.blobs
    lines.append(f'blobs = "{blobs.url}"')
    if blobs.endpoint:
        lines.append(f'blobs-endpoint = "{blobs.endpoint}"')
    lines.append(f'blobs-region = "{blobs.region}"')
    if blobs.credentials_file is not None:
        lines.append(f'blobs-credentials = "{blobs.credentials_file.absolute()}"')
    if authorities is not None:
        lines.append(f'blobs-ca = "{authorities.absolute()}"')
    return lines
