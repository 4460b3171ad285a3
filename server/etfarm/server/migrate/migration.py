"""The move of a stopped farm's rows and artifacts to other engines: copied, compared, and only then taken into use.

Up to the last step, the farm is where it was. Each step may be interrupted, and the command repeated: what is copied stays.

The farm's data folder holds what is on its way, and what stays as the way back, under names of their own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy import func, insert, inspect, select

from etfarm.server.artifacts.blobs import ARTIFACTS, BLOBS, CACHE
from etfarm.server.artifacts.s3.claim import claim, require_not_foreign
from etfarm.server.artifacts.s3.errors import checked
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.cluster.shared_blobs import identify_folder
from etfarm.server.config import DATABASE
from etfarm.server.migrate.errors import artifacts_lost, move_failed
from etfarm.server.state import copies, damage, identity, schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.revisions import HEAD, known_revisions
from etfarm.server.state.sqlite import LOGS, MOVED, merge_log
from etfarm.server.transfer import rows, untrusted
from etfarm.server.transfer.artifacts import Artifacts, BucketArtifacts, Copied, artifacts_of, copy_artifacts, count_missing_bytes
from etfarm.server.transfer.database import FarmDatabase, copy_rows, stopped
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire.atomic_write import sync
from etfarm.wire.errors import error_for

_PAGE_ROWS: Final = 1_000
"""Number of artifacts that are looked up at a time."""
_SCRATCH: Final = "migrating"
"""Folder of what is on its way; deleted with what a killed move has left there."""
_COPYING: Final = ".copying"
"""Suffix of what is not complete yet."""


@dataclass(frozen=True)
class Place:
    """Where a farm's rows and artifacts are."""

    database: DatabaseUrl | None
    """The PostgreSQL database; None for SQLite in the data folder."""
    blobs: BucketLocation | None
    """The bucket; None for files in the data folder."""

    @property
    def blobs_name(self) -> str:
        """The place of the artifacts, for people and for comparisons."""
        return "files" if self.blobs is None else self.blobs.place


@dataclass
class Moved:
    """What was moved."""

    row_count: int = 0
    artifacts: Copied = field(default_factory=Copied)
    former: list[str] = field(default_factory=list)
    """What has the farm's state before the move."""


class Migration:
    """The move of a farm.

    Args:
        data: the data folder, which the caller has locked.
        skip_lost: whether to go on without artifacts that are missing or damaged.
    """

    def __init__(self, data: Path, source: Place, target: Place, on_progress: OnProgress, *, skip_lost: bool = False) -> None:
        self._folder = DataFolder(data)
        self._scratch = self._folder.scratch
        self._source = source
        self._target = target
        self._on_progress = on_progress
        self._skip_lost = skip_lost
        self._moves_rows = source.database != target.database
        self._moves_artifacts = source.blobs_name != target.blobs_name
        self._name = str(self._folder.database if source.database is None else source.database)
        """The name of the source, by which an interrupted move is recognized."""
        self._target_name = str(self._folder.database if target.database is None else target.database)

    def run(self) -> Moved:
        """Move the farm.

        Raises:
            NOTHING_TO_MOVE: source and target are the same, or the source has no farm.
            TARGET_NOT_EMPTY, COPY_UNFINISHED: the target has something else.
            SERVERS_RUNNING: a server of the farm runs.
            ARTIFACTS_LOST: artifacts are missing or damaged.
            CopyDiffers, RowRefused: a copy failed.
            MOVE_FAILED: a file cannot be read or written.
            EtfarmError: a database or a bucket cannot be used.
        """
        try:
            return self._run()
        except OSError as error:
            raise move_failed(self._folder.path, error.strerror or str(error)) from error

    def _run(self) -> Moved:
        if not self._moves_rows and not self._moves_artifacts:
            raise error_for(
                "NOTHING_TO_MOVE",
                "The farm is already where it is to be moved.",
                "Name another place with --to-config, --to-database or --to-blobs.",
            )
        self._folder.require_plain()
        self._folder.require_free(
            database=self._moves_rows and self._source.database is None,
            blobs=self._moves_artifacts and self._source.blobs is None,
        )
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            holds = {url: stack.enter_context(stopped(url)) for url in self._urls()}
            is_taken = self._is_taken()
            moved = self._count() if is_taken else self._copy()
            for hold in holds.values():
                hold.require_none_waits()
            if self._moves_rows:
                self._leave_rows(moved)
            if self._target.database is not None and self._moves_artifacts:
                holds[self._target.database].name_blobs(self._claimed_blobs())
            if self._moves_artifacts:
                self._take_artifacts(moved)
            if self._moves_rows:
                self._take_rows(is_taken=is_taken)
            if self._moves_artifacts and self._target.blobs is not None:
                asyncio.run(BucketArtifacts(self._target.blobs, self._scratch).finish())
        return moved

    def _urls(self) -> list[DatabaseUrl]:
        return [url for url in dict.fromkeys([self._source.database, self._target.database]) if url is not None]

    def _copy(self) -> Moved:
        """Copy what the target lacks; the source is unchanged."""
        database, moved = self._open_source(), Moved()
        if self._moves_rows:
            if self._target.database is None:
                self._folder.require_no_database()
            with database.connected() as connection, connection.begin():
                moved.row_count = copy_rows(connection, self._target_database(), self._name, self._on_progress)
            if self._target.database is None and database.url is not None:
                # PostgreSQL's columns may have had other types.
                merge_log(self._folder.database_copy)
                self._validate(self._folder.database_copy)
        if self._moves_artifacts:
            moved.artifacts = asyncio.run(self._copy_artifacts(database))
            if moved.artifacts.lost and not self._skip_lost:
                raise artifacts_lost(moved.artifacts.lost)
        return moved

    def _open_source(self) -> FarmDatabase:
        """Return the source's database with the tables of this version."""
        database = FarmDatabase(self._folder.database, self._source.database)
        if self._is_nearly_moved():
            return FarmDatabase(self._folder.former_database, database.url)
        if not self._has_farm(database):
            raise error_for(
                "NOTHING_TO_MOVE",
                f"{database} has no farm.",
                "Name the farm's data folder with --data, its database with --database.",
            )
        if database.url is None and database.path.exists():
            damage.check(database.path, HEAD, known_revisions())
            merge_log(database.path)
            self._validate(database.path)
        database.open()
        return database

    def _validate(self, path: Path) -> None:
        """Refuse a file that somebody has changed: opening it would run its triggers.

        Raises:
            DATABASE_FOREIGN: it is not as etfarm wrote it.
        """
        revision = untrusted.revision_of(path)
        if revision is None:
            return  # opening it is refused
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        try:
            untrusted.validate(path, self._scratch / "schema", revision, self._on_progress)
        except untrusted.Malformed as error:
            raise damage.database_foreign(path, str(error)) from error

    def _has_farm(self, database: FarmDatabase) -> bool:
        if database.url is None:
            return self._folder.former_database.exists()
        with database.connected() as connection:
            return inspect(connection).has_table("alembic_version")

    def _is_nearly_moved(self) -> bool:
        """Return whether an earlier run has left the rows of the source, and ended before it took those of the target."""
        return self._moves_rows and self._target_database().source_of_copy() == self._name and self._is_left()

    def _is_left(self) -> bool:
        """Return whether an earlier run has left the rows of the source."""
        if self._source.database is None:
            return self._folder.former_database != self._folder.database
        with FarmDatabase(self._folder.database, self._source.database).connected() as connection, connection.begin():
            return copies.moved_to(connection) == self._target_name

    def _is_taken(self) -> bool:
        """Return whether an earlier run has taken the rows of the target, and ended before it took all marks away."""
        taken = self._taken_database()
        if not self._moves_rows or not self._is_left() or not (taken.url or taken.path.exists()):
            return False
        if taken.url is None and taken.source_of_copy() == self._name:
            return True
        return self._target.blobs is not None and taken.is_complete() and asyncio.run(self._is_bucket_begun(self._target.blobs))

    async def _is_bucket_begun(self, location: BucketLocation) -> bool:
        artifacts = BucketArtifacts(location, self._scratch)
        await artifacts.bucket.check()
        return self._moves_artifacts and await artifacts.is_begun(self._artifacts_name)

    def _taken_database(self) -> FarmDatabase:
        """Return the target's database under the name by which servers open it."""
        return FarmDatabase(self._folder.database, self._target.database)

    def _count(self) -> Moved:
        """Return what an earlier run has moved, and which artifacts it left behind: only its message named them."""
        database, target = self._taken_database(), self._target_artifacts()
        with database.connected() as connection, connection.begin():
            moved = Moved(rows.count_rows(connection))
        if self._moves_artifacts:
            copying = copy_artifacts(target, target, _wanted(database), _count_artifacts(database), self._on_progress)
            moved.artifacts = asyncio.run(copying)
        return moved

    def _target_database(self) -> FarmDatabase:
        return FarmDatabase(self._folder.database_copy, self._target.database)

    async def _copy_artifacts(self, database: FarmDatabase) -> Copied:
        source, target = artifacts_of(self._source.blobs, self._folder.former_blobs, self._scratch), self._target_artifacts()
        with database.connected() as connection, connection.begin():
            farm = identity.read(connection)
        for each in (source, target):
            if isinstance(each, BucketArtifacts):
                await each.bucket.check()
        is_resumed = isinstance(target, BucketArtifacts) and await target.is_begun(self._artifacts_name)
        if self._source.blobs is None and self._folder.is_in_bucket and not is_resumed:
            raise error_for("NOTHING_TO_MOVE", f"The artifacts of {self._folder.path} are in a bucket.", "Name it with --blobs.")
        if isinstance(target, BucketArtifacts):
            with checked():
                await require_not_foreign(target.bucket, farm)
                if not is_resumed:
                    await target.begin(self._artifacts_name)
                await claim(target.bucket, farm)
        if self._target.blobs is None:
            needed, free = await count_missing_bytes(target, _wanted(database)), shutil.disk_usage(self._folder.path).free
            if needed > free:
                raise move_failed(self._folder.path, f"the artifacts need {needed} bytes of disk, and {free} are free")
        return await copy_artifacts(source, target, _wanted(database), _count_artifacts(database), self._on_progress)

    def _target_artifacts(self) -> Artifacts:
        return artifacts_of(self._target.blobs, self._folder.blobs_copy, self._scratch)

    @property
    def _artifacts_name(self) -> str:
        return f"{self._name}, {self._source.blobs_name}"

    def _claimed_blobs(self) -> str:
        """Return the name that the farm's servers have for the artifacts' new place."""
        return identify_folder(self._folder.path / ARTIFACTS) if self._target.blobs is None else self._target.blobs.url

    def _leave_rows(self, moved: Moved) -> None:
        """Keep servers from opening the source's database."""
        if self._source.database is None:
            moved.former.append(str(self._folder.leave_database()))
            return
        with FarmDatabase(self._folder.database, self._source.database).connected() as connection, connection.begin():
            if copies.moved_to(connection) is None:
                copies.moved.create(connection)
                connection.execute(insert(copies.moved).values(place=self._target_name))
        moved.former.append(f"the database {self._source.database}, whose table `moved` keeps servers from opening it")

    def _take_artifacts(self, moved: Moved) -> None:
        """Let servers read the artifacts of the target."""
        if self._source.blobs is None:
            moved.former.append(str(self._folder.leave_blobs()))
        else:
            moved.former.append(f"the bucket {self._source.blobs.place}")
        if self._target.blobs is None:
            self._folder.settle_blobs()

    def _take_rows(self, *, is_taken: bool) -> None:
        """Let servers open the target's database.

        Args:
            is_taken: whether an earlier run has done so; it may not have taken the mark away.
        """
        if self._target.database is None and not is_taken:
            # Its name keeps servers from the file: from the next step on, the farm is there.
            self._folder.settle_database()
        target = self._taken_database()
        if target.source_of_copy() is not None:
            with target.connected() as connection:
                rows.finish(connection)


def _count_artifacts(database: FarmDatabase) -> int:
    with database.connected() as connection, connection.begin():
        return int(connection.execute(select(func.count()).select_from(schema.artifacts)).scalar_one())


def _wanted(database: FarmDatabase) -> Iterator[tuple[str, int]]:
    """Yield digest and size of each artifact. Between two reads, no transaction waits for transfers."""
    artifacts, after = schema.artifacts.c, ""
    while True:
        query = select(artifacts.digest, artifacts.size_bytes).where(artifacts.digest > after)
        with database.connected() as connection, connection.begin():
            page = connection.execute(query.order_by(artifacts.digest).limit(_PAGE_ROWS)).all()
        if not page:
            return
        yield from ((row.digest, row.size_bytes) for row in page)
        after = page[-1].digest


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
            sync(self.path)
        return self._database_moved

    def settle_database(self) -> None:
        """Give the copy of the rows the name of the farm's database."""
        merge_log(self.database_copy)
        self.database_copy.chmod(0o600)
        for suffix in LOGS:  # SQLite would apply what another database has left there
            self.database.with_name(f"{DATABASE}{suffix}").unlink(missing_ok=True)
        self.database_copy.replace(self.database)
        sync(self.path)

    def leave_blobs(self) -> Path:
        """Give the folder of artifacts another name, and return it. Servers then know that they are in a bucket."""
        self._cache.mkdir(parents=True, exist_ok=True)
        if self.former_blobs == self._blobs and self._blobs.exists():
            self._blobs.rename(self._blobs_moved)
            sync(self._artifacts)
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
