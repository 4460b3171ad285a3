"""The manifest of a backup, which is written last: a folder without one holds no complete backup."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from etfarm.server.backup.errors import BackupDamaged
from etfarm.server.transfer.files import Differs, open_plain
from etfarm.wire import digest as digests
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.errors import error_for

NAME: Final = "manifest.json"
SCHEMA: Final = "etfarm.backup/1"
_MAX_BYTES: Final = 64 << 20
_SHOWN: Final = re.compile(r"[0-9A-Za-z.:+!_-]{1,64}\Z")
"""What a command may contain that somebody copies from a message."""
_DATABASE: Final = re.compile(r"farm-[0-9a-f]{16}\.sqlite\Z")
PART: Final = "farm.sqlite.part"
"""File name of the copy of a database that is not complete yet."""


@dataclass(frozen=True)
class Manifest:
    """What a backup contains."""

    version: str
    """The etfarm that wrote the backup."""
    revision: str
    """Revision of the database."""
    created_at: str
    database: str
    """File name of the database in the backup; its name has the beginning of its sha256."""
    database_sha256: str
    database_bytes: int
    artifacts: int
    artifact_bytes: int
    missing: tuple[str, ...]
    """Digests that the database has, and whose files were missing or damaged in the farm, or deleted during the backup."""

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest."""
        text = json.dumps({"schema": SCHEMA} | asdict(self), indent=1)
        write_atomically(folder / NAME, text.encode(), durable=True, mode=0o600)


def _validate(manifest: Manifest) -> None:
    """Require values that may be shown in messages, and computed with."""
    for text in (manifest.version, manifest.revision, manifest.created_at):
        if not (isinstance(text, str) and _SHOWN.match(text)):
            raise ValueError("it has no version, revision or time")
    for number in (manifest.database_bytes, manifest.artifacts, manifest.artifact_bytes):
        if type(number) is not int or number < 0:
            raise ValueError("it has no sizes")
    if not all(map(digests.is_digest, (manifest.database_sha256, *manifest.missing))):
        raise ValueError("it names what is no sha256")


def is_database(name: str) -> bool:
    """Return whether a backup's database may have a file name."""
    return _DATABASE.match(name) is not None


def read(folder: Path) -> Manifest:
    """Return the manifest of a backup.

    Raises:
        BACKUP_REFUSED: the folder has no manifest: it is no backup, or its backup did not end.
        BackupDamaged: the manifest cannot be read.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        raise error_for(
            "BACKUP_REFUSED",
            f"{folder} has no {NAME}, so it holds no complete backup.",
            "Run `etfarm backup` on it again, or choose another folder.",
        )
    try:
        with open_plain(folder, NAME) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError("it is too large")
        values = json.loads(text)
        if values.pop("schema") != SCHEMA:
            raise ValueError("it has another schema")
        manifest = Manifest(**values | {"missing": tuple(map(str, values["missing"]))})
        if not is_database(manifest.database):
            raise ValueError("it names no database")
        _validate(manifest)
    except (Differs, ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise BackupDamaged(f"The manifest {path} cannot be read: {error}.", "Use another backup.") from None
    return manifest
