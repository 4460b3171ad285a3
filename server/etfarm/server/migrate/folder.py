"""The data folder of a farm that is moved: names of what is on its way, and of what stays as the way back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.blobs import ARTIFACTS, BLOBS, CACHE
from etfarm.server.config import DATABASE
from etfarm.server.migrate.errors import move_failed
from etfarm.server.state.sqlite import LOGS, MOVED, merge_log
from etfarm.server.transfer.files import sync_folder
from etfarm.wire.errors import error_for

_SCRATCH: Final = "migrating"
"""Folder of what is on its way; deleted with what a killed move has left there."""
_COPYING: Final = ".copying"
"""Suffix of what is not complete yet."""


class DataFolder:
    """The data folder of a farm. Each step may be repeated after one that was interrupted.

    Args:
        path: the folder, which this process has locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / DATABASE
        self.database_copy = path / f"{DATABASE}{_COPYING}"
        self._database_moved = path / f"{DATABASE}{MOVED}"
        self._artifacts = path / ARTIFACTS
        self._blobs = self._artifacts / BLOBS
        self._blobs_moved = self._artifacts / f"{BLOBS}{MOVED}"
        self._blobs_copy = self._artifacts / f"{BLOBS}{_COPYING}"
        self._cache = self._artifacts / CACHE
        self.scratch = path / _SCRATCH

    @property
    def former_database(self) -> Path:
        """The file of a farm that is moved to PostgreSQL: under its former name if its move has nearly ended."""
        return self._database_moved if self._database_moved.exists() and not self.database.exists() else self.database

    @property
    def is_in_bucket(self) -> bool:
        """Whether the farm's artifacts are in a bucket already."""
        return self._cache.is_dir()

    @property
    def former_blobs(self) -> Path:
        """The folder of artifacts that are moved to a bucket."""
        return self._blobs_moved if self._blobs_moved.exists() and not _has_files(self._blobs) else self._blobs

    @property
    def blobs_copy(self) -> Path:
        """The folder of artifacts on their way from a bucket."""
        return self._blobs if _has_files(self._blobs) else self._blobs_copy

    def require_plain(self) -> None:
        """Refuse links where a move writes or renames; only `artifacts` and its `blobs` may be on another disk by links.

        Raises:
            MOVE_FAILED: there is one.
        """
        databases = [self.database, self.database_copy, self._database_moved]
        for path in (
            *(each.with_name(each.name + suffix) for each in databases for suffix in ("", *LOGS)),
            self.scratch, self._blobs_moved, self._blobs_copy, self._cache,
        ):  # fmt: skip
            if path.is_symlink():
                raise move_failed(self.path, f"{path} is a link; put what it leads to in its place")

    def require_free(self, *, database: bool, blobs: bool) -> None:
        """Refuse a move while the files of an earlier one take the place of those that it leaves.

        Args:
            database: whether the SQLite file is moved away.
            blobs: whether the artifacts are.

        Raises:
            TARGET_NOT_EMPTY: such files are there.
        """
        for moves, here, moved in (
            (database, self.database, self._database_moved), (blobs, self._blobs, self._blobs_moved),
        ):  # fmt: skip
            if moves and moved.exists() and (here.is_file() or _has_files(here)):
                raise error_for(
                    "TARGET_NOT_EMPTY", f"{moved} is left over from an earlier move.", "Delete it, or move it elsewhere."
                )

    def require_no_database(self) -> None:
        """Refuse to replace the database of another farm.

        Raises:
            TARGET_NOT_EMPTY: the folder has one.
        """
        if self.database.exists():
            raise error_for(
                "TARGET_NOT_EMPTY", f"{self.database} is there already.", "Move it elsewhere, or name another folder with --data."
            )

    def leave_database(self) -> Path:
        """Give the SQLite file another name, and return it."""
        if self.database.exists():
            merge_log(self.database)
            self.database.replace(self._database_moved)
            sync_folder(self.path)
        return self._database_moved

    def settle_database(self) -> None:
        """Give the copy of the rows the name of the farm's database."""
        merge_log(self.database_copy)
        self.database_copy.chmod(0o600)
        for suffix in LOGS:  # SQLite would apply what another database has left there
            self.database.with_name(f"{DATABASE}{suffix}").unlink(missing_ok=True)
        self.database_copy.replace(self.database)
        sync_folder(self.path)

    def leave_blobs(self) -> Path:
        """Give the folder of artifacts another name, and return it. Servers then know that they are in a bucket."""
        self._cache.mkdir(parents=True, exist_ok=True)
        if self.former_blobs == self._blobs and self._blobs.exists():
            self._blobs.rename(self._blobs_moved)
            sync_folder(self._artifacts)
        return self._blobs_moved

    def settle_blobs(self) -> None:
        """Give the artifacts from a bucket the name of the farm's folder, and delete copies of those in use."""
        if self._blobs_copy.exists():
            self._blobs_copy.replace(self._blobs)
        self._blobs.mkdir(parents=True, exist_ok=True)
        os.sync()  # the files are on the disk, and now also their names
        shutil.rmtree(self._cache, ignore_errors=True)


def _has_files(folder: Path) -> bool:
    return next(folder.glob("??/*"), None) is not None
