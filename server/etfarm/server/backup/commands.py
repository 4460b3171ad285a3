"""The commands `etfarm backup` and `etfarm restore`, which run on the server's machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from etfarm.server.backup.backup import back_up
from etfarm.server.backup.restore import restore
from etfarm.server.operation.blob_options import add_blob_options, location_of
from etfarm.server.state.folder import locked
from etfarm.wire.errors import UserError
from etfarm.wire.names import data_folder


def backup_main(argv: list[str]) -> int:
    """Run `etfarm backup`. Exit with 1 if artifacts are missing or damaged in the farm, which the backup then lacks."""
    parser = argparse.ArgumentParser(
        prog="etfarm backup",
        description="Copy a server's database, and every artifact that it has, to a folder. The server may run. An earlier "
        "backup in the folder is brought up to date: only new artifacts are copied. The backup has the hashes of tokens, so "
        "only its owner may read it. Token files and TLS files are not part of it.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the backup; created if it does not exist")
    _add_data(parser)
    parser.add_argument("--link", action="store_true",
                        help="link artifacts instead of copying them, where both folders are on one file system: takes no space, "
                        "and does not protect from a failing disk")  # fmt: skip
    add_blob_options(parser)
    arguments = parser.parse_args(argv)
    folder, blobs = _data(arguments), location_of(arguments)
    _require_owner(folder)
    done = back_up(folder, arguments.folder, link=arguments.link, blobs=blobs, on_progress=_show)
    manifest = done.manifest
    _end_progress()
    print(
        f"{arguments.folder}: the database ({_size(manifest.database_bytes)}) and {manifest.artifacts} artifacts "
        f"({_size(manifest.artifact_bytes)}), {done.copied} of them new ({_size(done.copied_bytes)})."
    )
    for digest in done.lost:
        print(f"missing or damaged in the farm: {digest}", file=sys.stderr)
    return 1 if done.lost else 0


def restore_main(argv: list[str]) -> int:
    """Run `etfarm restore`."""
    parser = argparse.ArgumentParser(
        prog="etfarm restore",
        description="Make a server's data folder from a backup, and compare every file with its sha256. The data folder must be "
        "empty or missing; an interrupted restore of the same backup continues. A backup of an older etfarm is converted.",
    )
    parser.add_argument("backup", type=Path, metavar="FOLDER", help="folder of the backup")
    _add_data(parser)
    add_blob_options(parser)
    arguments = parser.parse_args(argv)
    folder, blobs = _data(arguments), location_of(arguments)
    created = not folder.exists()
    if created and not (arguments.backup / "manifest.json").is_file():
        restore(arguments.backup, folder, blobs=blobs)  # refuses before anything is created
    with locked(folder):
        manifest = restore(arguments.backup, folder, blobs=blobs, on_progress=_show)
    _end_progress()
    print(
        f"{folder}: restored the backup of {manifest.created_at} by etfarm {manifest.version}, {manifest.artifacts} artifacts. "
        f"Start it: etfarm serve --data {folder}"
    )
    return 0


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help=f"the server's data folder (default: {data_folder() / 'server'})".replace("%", "%%"))  # fmt: skip


def _data(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.data or data_folder() / "server"
    return folder.absolute()


def _require_owner(folder: Path) -> None:
    if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
        raise UserError(f"The data folder {folder} belongs to user {owner}.", f"Run it as that user: `sudo -u '#{owner}' ...`.")


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty() and (done % 50 == 0 or done == total):
        print(f"\r{done} of {total} artifacts ", end="", file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr, flush=True)


def _size(size_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes} B"
