"""A farm from a backup: artifacts first, each compared with its digest; the database last, when all are there."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.artifacts.blobs import ARTIFACTS, BLOBS, CACHE
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER, claim, owner_of
from etfarm.server.artifacts.s3.errors import BlobsUnavailable, checked
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.backup import manifest as manifests
from etfarm.server.backup.backup import backup_failed
from etfarm.server.backup.errors import BackupDamaged
from etfarm.server.backup.manifest import Manifest
from etfarm.server.backup.revived import revoke_tokens
from etfarm.server.cluster.shared_blobs import identify_folder
from etfarm.server.config import DATABASE
from etfarm.server.state import damage, identity
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.folder import LOCK, RESTORING
from etfarm.server.state.identity import Identity
from etfarm.server.state.revisions import HEAD, OLDEST, known_revisions
from etfarm.server.state.sqlite import LOGS, merge_log
from etfarm.server.transfer import rows, untrusted
from etfarm.server.transfer.artifacts import BucketArtifacts, FileArtifacts, artifacts_of, copy_artifacts, count_missing_bytes
from etfarm.server.transfer.database import FarmDatabase, begin_copy, copy_rows, stopped
from etfarm.server.transfer.files import Differs, copy_verified, open_plain
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire.atomic_write import sync
from etfarm.wire.errors import error_for

log = structlog.get_logger()

_MARKER: Final = re.compile(r"(?P<backup>\w*)( with (?P<options>.*?))?( as (?P<farm_id>[\w-]+))?( copied to (?P<database>.+))?")


def restore(
    backup: Path,
    data: Path,
    *,
    database: DatabaseUrl | None = None,
    blobs: BucketLocation | None = None,
    keep_identity: bool = False,
    without_tokens: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Manifest:
    """Make a data folder from a backup, and migrate its database to this version. Return the backup's manifest.

    A restore that was interrupted continues: artifacts that have their names are complete. Until it has ended, no server opens
    the data folder or the PostgreSQL database, nor leads the farm of the database.

    Args:
        data: a folder that does not exist, is empty, or has an interrupted restore of the same backup.
        database: the PostgreSQL database that the rows are for, which is empty; None to restore them as a SQLite file.
        blobs: the bucket that the artifacts are for; None to restore them as files.
        keep_identity: whether the farm replaces the one that was backed up, so that its agents follow. Otherwise it is another
            farm, to which they do not send their tokens.
        without_tokens: whether to revoke all tokens of the backup.

    Raises:
        TARGET_NOT_EMPTY, COPY_UNFINISHED: the PostgreSQL database has something else.
        SERVERS_RUNNING: a server of the PostgreSQL database runs.
        BACKUP_REFUSED: the backup is incomplete or of a newer etfarm, or the data folder has other files.
        BackupDamaged: a file of the backup is missing or has other contents.
        BACKUP_FAILED: a file cannot be written.
        DatabaseDamaged: the database in the backup is damaged.
    """
    manifest = manifests.read(backup)
    if manifest.revision < OLDEST:
        raise error_for(
            "BACKUP_REFUSED",
            f"The backup is of etfarm {manifest.version}, with revision {manifest.revision} of the database: of before 0.3.0.",
            "Convert the farm's data folder, with docs/upgrade/convert.py in a checkout of etfarm, and make a backup of that.",
        )
    if manifest.revision not in known_revisions():
        raise error_for(
            "BACKUP_REFUSED",
            f"The backup is of etfarm {manifest.version}, with revision {manifest.revision} of the database; this is etfarm "
            f"{version('etfarm')}, which knows {HEAD} at most.",
            f"Install etfarm {manifest.version} or newer: pip install 'etfarm[server]>={manifest.version}'.",
        )
    target = None if database is None else FarmDatabase(data / DATABASE, database)
    options = [*["--keep-identity"] * keep_identity, *["--without-tokens"] * without_tokens]
    try:
        marker = _prepare(data, manifest.database_sha256, " ".join(options) or "no option")
        new_id = "" if keep_identity else marker.farm_id
        if target is None:
            part, farm = _convert(backup, data, manifest, blobs, new_id, on_progress, without_tokens=without_tokens)
            _renew_identity(FarmDatabase(part), farm)
            merge_log(part)
            sync(part)
            _remove_logs(data)
            part.replace(data / DATABASE)
        elif not (marker.database == str(database) and target.is_complete()):
            copied = replace(marker, database=str(database))
            _restore_rows(target, backup, data, manifest, blobs, new_id, copied, on_progress, without_tokens=without_tokens)
        FarmDatabase(_part_of(data)).clear()
        sync(data)
        (data / RESTORING).unlink()
        sync(data)
    except (BackupDamaged, damage.DatabaseDamaged):
        if blobs is not None and not keep_identity:
            asyncio.run(_leave_bucket(BucketArtifacts(blobs, data), marker.farm_id))
        raise
    except OSError as error:
        raise backup_failed(f"{data} cannot be restored", data, error) from error
    return manifest


async def _leave_bucket(target: BucketArtifacts, new_id: str) -> None:
    """Leave a bucket's folder as this restore came upon it, so that another backup can be restored to it.

    Args:
        new_id: the id that this restore has made, under which it claims only an empty folder.
    """
    try:
        owner = await owner_of(target.bucket)
        if owner is not None and owner.farm_id == new_id:
            await target.clear()
            await target.bucket.delete(OWNER)
    except BlobsUnavailable as error:
        log.warning("what was copied to the bucket stays there", error=error.message, remedy=error.remedy)


async def _return_bucket(bucket: Bucket, owner: Identity | None) -> None:
    """Let the farm that was backed up go on with its bucket's folder, which has no artifact less than before.

    Args:
        owner: who had claimed the folder before; None if nobody had.
    """
    try:
        if owner is None:
            await bucket.delete(OWNER)
        else:
            await bucket.put(OWNER, owner.text.encode())
    except BlobsUnavailable as error:
        log.warning("the claim of the bucket's folder stays", error=error.message, remedy=error.remedy)


def _restore_rows(
    target: FarmDatabase,
    backup: Path,
    data: Path,
    manifest: Manifest,
    blobs: BucketLocation | None,
    new_id: str,
    copied: _Marker,
    on_progress: OnProgress,
    *,
    without_tokens: bool,
) -> None:
    """Restore to a PostgreSQL database, of which no server runs.

    Args:
        copied: what to record once all rows are there.
    """
    assert target.url is not None
    name = f"the backup {manifest.database_sha256}"
    with stopped(target.url) as hold:
        # From here on, the mark keeps servers from the database, also after this process was killed.
        begin_copy(target, name)
        hold.name_blobs(identify_folder(data / ARTIFACTS) if blobs is None else blobs.url)
        try:
            part, farm = _convert(backup, data, manifest, blobs, new_id, on_progress, without_tokens=without_tokens)
        except (BackupDamaged, damage.DatabaseDamaged):
            target.clear()  # so that another backup can be restored to it
            hold.name_blobs("")
            raise
        with FarmDatabase(part).connected() as connection, connection.begin():
            copy_rows(connection, target, name, on_progress)
        hold.require_held()
        _renew_identity(target, farm)  # of the whole copy: one that continues is compared with the backup's rows
        copied.write(data)
        with target.connected() as connection:
            rows.finish(connection)


def _convert(
    backup: Path,
    data: Path,
    manifest: Manifest,
    blobs: BucketLocation | None,
    new_id: str,
    on_progress: OnProgress,
    *,
    without_tokens: bool,
) -> tuple[Path, Identity]:
    """Restore the artifacts. Return a copy of the backup's database with the tables of this version, and the farm's identity.

    Args:
        new_id: the id that the farm is to have; empty for that of the one that was backed up.
    """
    source, part, copy = backup / manifest.database, _part_of(data), data / f"{DATABASE}.backup"
    for each in (part, copy):
        FarmDatabase(each).clear()
    _require_room(data, 2 * manifest.database_bytes)
    try:
        with open_plain(backup, manifest.database) as file:
            copy_verified(file, copy, manifest.database_sha256, manifest.database_bytes)
    except (FileNotFoundError, Differs):
        raise BackupDamaged(
            f"The database {source} is missing or has other contents than the manifest says.", "Use another backup."
        ) from None
    # Whoever can change the backup can change the manifest's sha256, too: the file itself is never opened as the farm's.
    try:
        untrusted.rebuild(copy, part, manifest.revision, on_progress)
    except untrusted.Malformed as error:
        raise BackupDamaged(f"The database {source} is not one that etfarm wrote: {error}.", "Use another backup.") from error
    copy.unlink()
    farm = asyncio.run(_copy_artifacts(backup, data, part, manifest, blobs, new_id, on_progress))
    # It may store artifacts as files of the data folder.
    FarmDatabase(part).open()
    if without_tokens:
        with FarmDatabase(part).connected() as connection, connection.begin():
            revoke_tokens(connection, datetime.now(UTC))
    merge_log(part)
    part.chmod(0o600)
    asyncio.run(_move_artifacts(data, blobs))
    return part, farm


def _renew_identity(database: FarmDatabase, farm: Identity) -> None:
    with database.connected() as connection, connection.begin():
        identity.renew(connection, farm)


def _require_room(data: Path, size_bytes: int) -> None:
    """Require disk space before anything is written: a full disk stops what else is on it.

    Raises:
        BACKUP_FAILED: there is less.
    """
    free_bytes = shutil.disk_usage(data).free
    if size_bytes > free_bytes:
        raise error_for(
            "BACKUP_FAILED",
            f"{data} cannot be restored: it needs {size_bytes} bytes of disk, and {free_bytes} are free.",
            "Free disk there, and run it again: it continues.",
        )


def _part_of(data: Path) -> Path:
    return data / f"{DATABASE}.part"


@dataclass(frozen=True)
class _Marker:
    """What an unfinished restore has recorded in its data folder, on which no server starts before it has ended."""

    backup: str
    """The sha256 of the backup's database; empty if the restore was killed before it copied anything."""
    options: str
    """The options that the farm depends on; empty if an earlier release did not record them."""
    farm_id: str
    """The id of the farm, if it is not that of the one that was backed up."""
    database: str = ""
    """The PostgreSQL database that all rows were copied to; empty before that."""

    @classmethod
    def read(cls, data: Path) -> _Marker:
        """Return the marker of a data folder; an empty one if it has none."""
        path = data / RESTORING
        match = _MARKER.fullmatch(path.read_text()) if path.exists() else None
        return cls("", "", "") if match is None else cls(**{name: text or "" for name, text in match.groupdict().items()})

    def write(self, data: Path) -> None:
        """Record it durably."""
        path = data / RESTORING
        copied = f" copied to {self.database}" if self.database else ""
        path.write_text(f"{self.backup} with {self.options} as {self.farm_id}{copied}")
        sync(path)


def _prepare(data: Path, backup: str, options: str) -> _Marker:
    """Create the data folder with a marker, or return that of an interrupted restore of the same backup."""
    path = data / RESTORING
    if path.is_symlink():
        raise error_for("BACKUP_REFUSED", f"{path} is a link, which no restore leaves.", "Delete it, or choose another --data.")
    if data.exists() and not data.is_dir():
        raise error_for("BACKUP_REFUSED", f"{data} is not a folder.", "Choose another --data.")
    if data.is_dir() and not path.exists() and [each for each in data.iterdir() if each.name != LOCK]:
        raise error_for("BACKUP_REFUSED", f"{data} is not empty.", "Move it aside, or choose another --data.")
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    former = _Marker.read(data)
    if former.backup not in ("", backup):
        raise error_for(
            "BACKUP_REFUSED", f"{data} has an interrupted restore of another backup.", "Delete it, or choose another --data."
        )
    if former.options not in ("", options):
        raise error_for(
            "BACKUP_REFUSED",
            f"{data} has an interrupted restore with {former.options}.",
            "Run it again like that. To begin anew, delete the folder, and empty the PostgreSQL database if it is for one.",
        )
    marker = replace(former, backup=backup, options=options, farm_id=former.farm_id or identity.new_farm_id())
    marker.write(data)
    return marker


def _remove_logs(data: Path) -> None:
    """Delete the logs of a database whose migration was killed, which SQLite would apply to the database that replaces it."""
    for suffix in LOGS:
        (data / f"{DATABASE}{suffix}").unlink(missing_ok=True)


async def _copy_artifacts(
    backup: Path,
    data: Path,
    database: Path,
    manifest: Manifest,
    blobs: BucketLocation | None,
    new_id: str,
    on_progress: OnProgress,
) -> Identity:
    """Copy the artifacts; return the identity that the farm is to have, with which a bucket's folder is claimed."""
    with closing(sqlite3.connect(database)) as connection:
        wanted = dict(connection.execute("SELECT digest, size_bytes FROM artifacts ORDER BY digest"))
    with FarmDatabase(database).connected() as rows_of, rows_of.begin():
        if rows_of.execute(identity.FARM_ID).first() is None:
            raise BackupDamaged("The backup's database does not say of which farm it is.", "Use another backup.")
        former = identity.read(rows_of)
    farm = Identity(new_id or former.farm_id, datetime.now(UTC)).later_than(former)
    for digest in manifest.missing:
        wanted.pop(digest, None)
    if (len(wanted), sum(wanted.values())) != (manifest.artifacts, manifest.artifact_bytes):
        raise BackupDamaged("The backup's database has other artifacts than its manifest.", "Use another backup.")
    for folder in (backup / ARTIFACTS, backup / ARTIFACTS / BLOBS):
        if folder.is_symlink():
            raise BackupDamaged(f"{folder} is a link, which no backup has.", "Use another backup.")
    source, target = FileArtifacts(backup / ARTIFACTS / BLOBS), artifacts_of(blobs, data / ARTIFACTS / BLOBS, data)
    if blobs is None:
        _require_room(data, await count_missing_bytes(target, iter(wanted.items())))
    owner = None
    if isinstance(target, BucketArtifacts):
        await target.bucket.check()
        with checked():
            # The folder of the one that was backed up is not for another farm, whichever release it was claimed by, if any.
            if (owner := await owner_of(target.bucket)) is None and new_id:
                await target.require_empty()
            farm = farm.later_than(owner)
            await claim(target.bucket, farm)
    copied = await copy_artifacts(source, target, iter(wanted.items()), len(wanted), on_progress)
    if copied.lost:
        if isinstance(target, BucketArtifacts) and not new_id:
            await _return_bucket(target.bucket, owner)
        digest = min(copied.lost)
        raise BackupDamaged(
            f"The backup's artifact {digest[:12]} is missing or has other contents.",
            "Use another backup; or back up the farm to an empty folder, if it still runs.", digest=digest,
        )  # fmt: skip
    return farm


async def _move_artifacts(data: Path, blobs: BucketLocation | None) -> None:
    """Move the artifacts that the conversion stored to the bucket that has the others."""
    if blobs is None:
        return
    (data / ARTIFACTS / CACHE).mkdir(parents=True, exist_ok=True)  # as in the folder of each server with a bucket
    folder = data / ARTIFACTS / BLOBS
    if not folder.is_dir():
        return
    source, target = FileArtifacts(folder), BucketArtifacts(blobs, data)
    for path in folder.glob("??/*"):
        await target.write(path.name, path.stat().st_size, source)
    shutil.rmtree(folder)
