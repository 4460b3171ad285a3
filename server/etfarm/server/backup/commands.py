"""The commands `etfarm backup` and `etfarm restore`, which run on the server's machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from etfarm.server.arguments import parse_command
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.artifacts.s3.options import add_blob_options, location_of
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.restore import restore
from etfarm.server.backup.revived import describe_revived
from etfarm.server.config import DATABASE
from etfarm.server.operation.data_option import add_data_option, add_database_option, data_of, require_owner
from etfarm.server.operation.progress import Progress, size_text
from etfarm.server.operation.settings import Setting
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.folder import locked
from etfarm.server.transfer.database import FarmDatabase
from etfarm.wire.escapes import printable
from etfarm.wire.private import close_umask

_OTHER_FARM: Final = (
    "It is a farm of its own with the tokens of the one that was backed up, whose boards do not follow it (with TLS); if it "
    "replaces that farm, restore it with --keep-identity. "
)


def backup_main(argv: list[str]) -> int:
    """Run `etfarm backup`. Exit with 1 if artifacts are missing or damaged in the farm, which the backup then lacks."""
    parser = argparse.ArgumentParser(
        prog="etfarm backup",
        description="Copy a server's database, and every artifact that it has, to a folder. The server may run. An earlier "
        "backup in the folder is brought up to date: only new artifacts are copied. The backup has the hashes of tokens, so "
        "only its owner may read it. Token files and TLS files are not part of it.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the backup; created if it does not exist")
    add_data_option(parser)
    add_database_option(parser)
    parser.add_argument("--link", action="store_true",
                        help="link artifacts instead of copying them, where both folders are on one file system: takes no space, "
                        "and does not protect from a failing disk")  # fmt: skip
    add_blob_options(parser, "bucket that has the artifacts, as for `etfarm serve`")
    arguments, _ = parse_command(parser, argv)
    folder, database, blobs = data_of(arguments), arguments.database, location_of(arguments)
    require_owner(folder)
    close_umask()
    with Progress() as progress:
        done = back_up(folder, arguments.folder, link=arguments.link, database=database, blobs=blobs, on_progress=progress.show)
    manifest = done.manifest
    print(
        f"{arguments.folder}: the database ({size_text(manifest.database_bytes)}) and {manifest.artifacts} artifacts "
        f"({size_text(manifest.artifact_bytes)}), {done.copied} of them new ({size_text(done.copied_bytes)})."
    )
    for digest in done.lost:
        print(f"missing or damaged in the farm: {digest}", file=sys.stderr)
    return 1 if done.lost else 0


def restore_main(argv: list[str]) -> int:
    """Run `etfarm restore`."""
    parser = argparse.ArgumentParser(
        prog="etfarm restore",
        description="Make a farm from a backup, and compare every file with its sha256. The data folder must be empty or "
        "missing, and a PostgreSQL database empty; an interrupted restore of the same backup continues. A backup of an older "
        "etfarm is converted.",
    )
    parser.add_argument("backup", type=Path, metavar="FOLDER", help="folder of the backup")
    add_data_option(parser)
    add_database_option(parser, "restore the rows to this PostgreSQL database, which is empty")
    add_blob_options(parser, "restore the artifacts to this bucket, as s3://BUCKET/PREFIX")
    parser.add_argument(
        "--keep-identity",
        action="store_true",
        help="the farm replaces the one that was backed up, which does not run any more: its agents follow. By default, it is "
        "another farm, and they stay with theirs",
    )
    parser.add_argument("--without-tokens", action="store_true",
                        help="revoke all tokens of the backup, such as those that were revoked since: people and agents need new "
                        "ones")  # fmt: skip
    arguments, sources = parse_command(parser, argv)
    folder, database, blobs = data_of(arguments), arguments.database, location_of(arguments)
    close_umask()
    created = not folder.exists()
    if created and not (arguments.backup / "manifest.json").is_file():
        restore(arguments.backup, folder, blobs=blobs)  # refuses before anything is created
    with locked(folder), Progress() as progress:
        manifest = restore(
            arguments.backup, folder, database=database, blobs=blobs, keep_identity=arguments.keep_identity,
            without_tokens=arguments.without_tokens, on_progress=progress.show,
        )  # fmt: skip
        with FarmDatabase(folder / DATABASE, database).connected() as connection, connection.begin():
            revived = list(describe_revived(connection, datetime.now(UTC)))
    options = _options(folder, database, blobs, arguments.blobs_ca, arguments.config, sources)
    print(
        f"{folder}: restored the backup of {manifest.created_at} by etfarm {manifest.version}, {manifest.artifacts} artifacts. "
        f"{'' if arguments.keep_identity else _OTHER_FARM}Start it: etfarm serve{options}"
    )
    for line in revived:
        print(printable(line))
    if arguments.without_tokens:
        places = _options(folder, database, None, None, None, ())
        print(f"Its tokens are revoked. Create an admin's: etfarm tokens init NAME{places}")
    return 0


def _options(
    folder: Path,
    database: DatabaseUrl | None,
    blobs: BucketLocation | None,
    authorities: Path | None,
    config: Path | None,
    sources: Sequence[Setting],
) -> str:
    """Return the options that name the farm's places, as a shell reads them; credentials stay where the command had them from.

    Args:
        config: the server's file, which names those that the command line does not.
    """
    options = [("data", str(folder)), ("database", str(database) if database else "")]
    if blobs is not None:
        options += [
            ("blobs", blobs.url), ("blobs-region", blobs.region), ("blobs-endpoint", blobs.endpoint),
            ("blobs-credentials", str(blobs.credentials_file.absolute()) if blobs.credentials_file else ""),
            ("blobs-ca", str(authorities.absolute()) if authorities else ""),
        ]  # fmt: skip
    if config is not None:
        typed = {each.name for each in sources if each.source == f"--{each.name}"}
        options = [("config", str(config)), *(option for option in options if option[0] in typed)]
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in options if value)
