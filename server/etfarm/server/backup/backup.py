"""A backup of a farm while its server runs: first the database, then every artifact that it has a row of.

The database is copied as one snapshot, so each job in it is complete as far as it had come. SQLite copies its own file; the rows
of a PostgreSQL database go to a new one, so that either engine can restore them. Artifacts never change, and the server deletes
none while the backup holds the farm's locks, so those that the snapshot names are there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from sqlalchemy import select

from etfarm.server.artifacts.blobs import ARTIFACTS, BLOBS, CACHE
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.backup import manifest as manifests
from etfarm.server.backup.manifest import Manifest
from etfarm.server.config import DATABASE
from etfarm.server.state import damage, schema
from etfarm.server.state.backup_lock import BackupLock, BackupRunning
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import backing_up
from etfarm.server.state.revisions import HEAD, known_revisions
from etfarm.server.state.sqlite import merge_log
from etfarm.server.transfer import rows
from etfarm.server.transfer.artifacts import Artifacts, BucketArtifacts, Copied, FileArtifacts, copy_artifacts
from etfarm.server.transfer.database import FarmDatabase, copy_rows, require_this_version
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire import digest as digests
from etfarm.wire.atomic_write import sync
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.private import make_private

_LOCK_WAIT_S: Final = 120.0
"""Time for which a backup waits until the server has ended a deletion of artifacts."""

_LOCK_POLL_S: Final = 0.2

_FREE_DISK: Final = "Free disk there, and run it again: it continues."


def backup_failed(what: str, folder: Path, error: OSError) -> EtfarmError:
    """Return the error for a folder that cannot be written.

    Args:
        what: what fails, such as "The backup in /mnt/backup cannot be written".
    """
    remedy = _FREE_DISK
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        created = f"install -d -m 700 -o {os.geteuid()} {folder}"
        remedy = f"Create it for the user of this command, as root: `{created}`; or choose another folder."
    return error_for("BACKUP_FAILED", f"{what}: {error.strerror or error}.", remedy)


@dataclass(frozen=True)
class Done:
    """A complete backup."""

    manifest: Manifest
    copied: int
    """Number of artifacts that the folder did not have before."""
    copied_bytes: int
    lost: tuple[str, ...]
    """Digests that the farm has, and whose files are missing or damaged there."""


def back_up(
    data: Path,
    folder: Path,
    *,
    link: bool = False,
    database: DatabaseUrl | None = None,
    blobs: BucketLocation | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Done:
    """Make a backup of a farm, or bring an earlier one in `folder` up to date.

    Until the new manifest replaces the earlier one, the earlier backup stays complete.

    Args:
        data: the data folder of its server.
        link: whether to make hard links of artifacts where both folders are on one file system.
        database: the PostgreSQL database of the farm; None if it is a SQLite file in `data`.
        blobs: the bucket of the farm's artifacts; None if they are files in `data`.

    Raises:
        BACKUP_REFUSED: `data` is no data folder of a server, or `folder` has other files.
        BackupRunning: another backup of the data folder is running.
        BACKUP_FAILED: a file cannot be written.
        FolderNotPrivate: `folder` belongs to another user, or cannot be closed to others.
        DatabaseDamaged, DATABASE_TOO_NEW: the database cannot be backed up.
        EtfarmError: PostgreSQL or the bucket cannot be used.
    """
    source = FarmDatabase(data / DATABASE, database)
    _require_source(data, source, blobs)
    _require_target(data, folder)
    try:
        make_private(folder)
        with _lock(data, source):
            part = _copy_database(source, folder, on_progress)
            sha256 = digests.of_file(part)
            with closing(sqlite3.connect(part)) as connection:
                (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
                wanted = dict(connection.execute("SELECT digest, size_bytes FROM artifacts ORDER BY digest"))
            copied = asyncio.run(_copy_artifacts(data, folder, blobs, wanted, on_progress, link=link))
    except OSError as error:
        raise backup_failed(f"The backup in {folder} cannot be written", folder, error) from error
    name = f"farm-{sha256[:16]}.sqlite"
    part.replace(folder / name)
    missing = sorted(copied.lost)
    kept = {digest: size for digest, size in wanted.items() if digest not in missing}
    manifest = Manifest(
        version=version("etfarm"), revision=revision, created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        database=name, database_sha256=sha256, database_bytes=(folder / name).stat().st_size,
        artifacts=len(kept), artifact_bytes=sum(kept.values()), missing=tuple(missing),
    )  # fmt: skip
    sync(folder)
    manifest.write(folder)
    _remove_former(folder, name, kept)
    return Done(manifest, copied.new_count, copied.new_bytes, _still_listed(source, missing))


def _require_source(data: Path, source: FarmDatabase, blobs: BucketLocation | None) -> None:
    if source.url is None and not source.path.is_file():
        if (data / ARTIFACTS).is_dir():
            raise error_for(
                "BACKUP_REFUSED", f"{data} has no {DATABASE}: its server has a PostgreSQL database.", "Name it with --database."
            )
        raise error_for(
            "BACKUP_REFUSED", f"{data} has no {DATABASE}: it is not a server's data folder.", "Name the folder with --data."
        )
    if not (data / ARTIFACTS).is_dir() and source.url is not None:
        raise error_for(
            "BACKUP_REFUSED", f"{data} is not a server's data folder.", "Name the folder of the farm's server with --data."
        )
    if blobs is None and (data / ARTIFACTS / CACHE).is_dir():
        raise error_for(
            "BACKUP_REFUSED", f"The artifacts of {data} are in a bucket.", "Name it with --blobs, as for `etfarm serve`."
        )


def _still_listed(source: FarmDatabase, missing: list[str]) -> tuple[str, ...]:
    """Return those of the digests that the farm still has: tensors of a session that has ended since are no loss."""
    if not missing:
        return ()
    with source.connected() as connection:
        listed = select(schema.artifacts.c.digest)
        return tuple(
            digest
            for digest in missing
            if connection.execute(listed.where(schema.artifacts.c.digest == digest)).first() is not None
        )


def _connect(source: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=30)


def _require_target(data: Path, folder: Path) -> None:
    if folder.resolve().is_relative_to(data.resolve()) or data.resolve().is_relative_to(folder.resolve()):
        raise error_for(
            "BACKUP_REFUSED", f"{folder} is a part of the data folder {data}, or contains it.", "Choose a folder beside it."
        )
    if folder.exists() and not folder.is_dir():
        raise error_for("BACKUP_REFUSED", f"{folder} is not a folder.", "Name a folder; it is created.")
    if folder.is_dir():
        # Exactly what a backup writes: other files would be deleted at its end, such as the artifacts of another data folder.
        known = {manifests.NAME, f"{manifests.NAME}.part", ARTIFACTS}
        strange = [
            path.name for path in folder.iterdir()
            if path.name not in known and not manifests.is_database(path.name) and not path.name.startswith(manifests.PART)
        ]  # fmt: skip
        if strange:
            raise error_for(
                "BACKUP_REFUSED",
                f"{folder} has other files, such as {strange[0]!r}.",
                "Name an empty folder or an earlier backup.",
            )


@contextmanager
def _lock(data: Path, source: FarmDatabase) -> Iterator[None]:
    """Keep the servers from deleting artifacts; wait while one does."""
    ends_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        with ExitStack() as held:
            try:
                held.enter_context(BackupLock(data).backing_up())
                held.enter_context(backing_up(source.url))
            except BackupRunning:
                if time.monotonic() > ends_s:
                    raise
            else:
                yield
                return
        time.sleep(_LOCK_POLL_S)


def _copy_database(source: FarmDatabase, folder: Path, on_progress: OnProgress) -> Path:
    """Copy the database as one snapshot, and check the copy."""
    part = folder / manifests.PART
    FarmDatabase(part).clear()
    part.touch(mode=0o600)
    if source.url is None:
        _copy_pages(source.path, part, folder)
    else:
        _copy_rows(source, part, on_progress)
    damage.check(part, HEAD, known_revisions(), whole=True)
    sync(part)
    return part


def _copy_pages(source: Path, part: Path, folder: Path) -> None:
    try:
        with closing(_connect(source)) as reader, closing(sqlite3.connect(part)) as writer:
            # All pages in one step: with several, each write of the server would begin the copy again.
            reader.backup(writer, pages=-1)
            writer.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        if "full" in str(error):
            raise error_for("BACKUP_FAILED", f"The disk of {folder} is full.", _FREE_DISK) from error
        raise damage.error_of(source, error) or error from error


def _copy_rows(source: FarmDatabase, part: Path, on_progress: OnProgress) -> None:
    """Write the rows of a PostgreSQL database to a SQLite file, which is the same on each engine."""
    target = FarmDatabase(part)
    with source.connected() as connection, connection.begin():
        require_this_version(connection, source)
        copy_rows(connection, target, str(source), on_progress)
    with target.connected() as connection:
        rows.finish(connection)
    merge_log(part)


async def _copy_artifacts(
    data: Path, folder: Path, blobs: BucketLocation | None, wanted: dict[str, int], on_progress: OnProgress, *, link: bool
) -> Copied:
    """Copy what the backup lacks."""
    target = FileArtifacts(folder / ARTIFACTS / BLOBS)
    if blobs is None:
        source: Artifacts = FileArtifacts(data / ARTIFACTS / BLOBS, link=link)
    else:
        bucket = BucketArtifacts(blobs, folder)
        await bucket.bucket.check()
        source = bucket
    return await copy_artifacts(source, target, iter(wanted.items()), len(wanted), on_progress)


def _remove_former(folder: Path, database: str, kept: dict[str, int]) -> None:
    """Delete what only the former backup in the folder needed."""
    for path in folder.glob("farm-*.sqlite"):
        if path.name != database and manifests.is_database(path.name):
            path.unlink()
    for path in (folder / ARTIFACTS / BLOBS).glob("??/*"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
