"""The bytes of complete artifacts, named by digest: what every kind of storage does, and the layout of their files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.atomic_write import sync

if TYPE_CHECKING:
    from etfarm.server.artifacts.integrity import Integrity

ARTIFACTS: Final = "artifacts"
"""Name of the store's folder in the server's data folder."""

BLOBS: Final = "blobs"
"""Name of the folder of complete artifacts in the store's folder: `ab/abcdef...`."""

Verified = tuple[int, int, int, list[common_pb2.Artifact]]
"""Progress of a verification: artifacts done, all artifacts, bytes done, and damage detected since the last progress."""


@dataclass(frozen=True)
class Reading:
    """An open file with the bytes of an artifact, which may still be arriving."""

    file: BinaryIO
    size_bytes: int
    reach: Callable[[int], Awaitable[None]]
    """Waits until the file has the bytes up to a position; raises the error that keeps them from arriving."""
    verified: Awaitable[bool]
    """Whether all bytes are those of the digest. Cancel it when reading ends early."""


class Blobs(Protocol):
    """The bytes of complete artifacts. Where they are not files of this machine, files are copies that `bring` makes."""

    integrity: Integrity
    """What is known about the files of this process, and about damage."""
    batch: int
    """Number of digests that `sizes` looks up at a time."""

    def place(self, digest: str) -> Path:
        """Return the path of an artifact's file, whether or not it exists."""

    async def open(self) -> None:
        """Get ready; raise an error if the storage cannot be used."""

    async def sizes(self, digests: Sequence[str]) -> dict[str, int]:
        """Return the sizes of the artifacts that are stored completely.

        What the caller marks as used before its next await is not deleted.
        """

    async def find_damaged(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` that are known to be damaged, and, where that takes only this machine, all of them."""

    async def bring(self, wanted: Iterable[str]) -> list[str]:
        """Verify artifacts, and make their files readable; return those that are missing or damaged.

        The files stay until the current task ends.
        """

    async def settle(self, path: Path, digest: str) -> None:
        """Move a complete, verified file into the storage, so that it lasts. It replaces a damaged one.

        Raises:
            OSError: the disk cannot be written.
            BlobsUnavailable: the storage does not answer.
        """

    async def read(self, digest: str) -> Reading | None:
        """Open an artifact; None if it is missing or damaged."""

    async def link(self, digest: str) -> artifact_pb2.ArtifactLink | None:
        """Return a link by which everybody can read a stored artifact for a while; None if there is no way but this server."""

    def withdraw(self, digest: str) -> bool:
        """Hide an artifact until `delete` or `restore`; return False if it is in use."""

    def restore(self, digests: Collection[str]) -> None:
        """Show artifacts again that were withdrawn, since the database may still name them."""

    async def delete(self, digests: Collection[str]) -> None:
        """Delete artifacts that were withdrawn, once nothing in the database names them."""

    def verify(self) -> AsyncIterator[Verified]:
        """Read all artifacts, and yield the progress periodically and last."""

    def spare_bytes(self) -> int:
        """Return how much of this machine's disk can be freed at once without a loss."""

    async def tend(self) -> None:
        """Do what is due now and then, until the task is cancelled."""


CACHE: Final = "cache"
"""Name of the folder of copies in the store's folder, where a bucket has the artifacts."""


MARKS: Final = (BLOBS, CACHE, "uploads", "farm.id")
"""Names by which a store's folder is recognized."""


def place_of(blobs: Path, digest: str) -> Path:
    """Return the path of an artifact's file, whether or not it exists."""
    return blobs / digest[:2] / digest


def settle(path: Path, place: Path) -> None:
    """Move a complete file to its place, so that after a power failure every file there is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    path.chmod(0o444)
    # Sync the bytes before the rename.
    sync(path)
    path.replace(place)
    sync(place.parent)


def write_blob(data: Path, content: bytes) -> common_pb2.Artifact:
    """Store a file in a server's data folder while no store is open; a stored file with the same content stays.

    The caller adds its rows to the database.
    """
    artifact = common_pb2.Artifact(digest=digests.of_bytes(content), size_bytes=len(content))
    blobs = data / ARTIFACTS / BLOBS
    place = place_of(blobs, artifact.digest)
    if not place.exists():
        blobs.mkdir(parents=True, exist_ok=True)
        part = blobs / f"{artifact.digest}.part"
        try:
            try:
                part.write_bytes(content)
            except PermissionError:  # read-only: settled by a process that was killed before it renamed the file
                part.unlink()
                part.write_bytes(content)
            settle(part, place)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    return artifact
