"""Whose a folder of a bucket is: of two farms that share one, each would delete what the other needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import LOOK, BlobsUnavailable, Failure
from etfarm.wire.escapes import in_a_line

OWNER: Final = "owner/farm.id"
"""Key of the object that has the id of the farm; alone in its folder, which is listed."""
_MOST_BYTES: Final = 100
"""Maximum number of bytes that are read of it."""
_TRIES: Final = 3
"""Number of attempts to claim a folder whose claim disappears at that moment."""


async def owner_of(bucket: Bucket) -> str | None:
    """Return the id of the farm that has claimed a folder of a bucket; None if none has.

    Raises:
        BlobsUnavailable: the bucket's server failed.
    """
    return await bucket.text(OWNER, _MOST_BYTES) if await bucket.has(OWNER) else None


async def require_not_foreign(bucket: Bucket, farm_id: str | None) -> None:
    """Check that no other farm has claimed a folder of a bucket. One that is not claimed passes.

    Args:
        farm_id: the farm's id; None for a farm that is still to be made.

    Raises:
        BlobsUnavailable: another farm has claimed it, or the bucket's server failed.
    """
    _require(bucket, await owner_of(bucket), farm_id)


def _require(bucket: Bucket, owner: str | None, farm_id: str | None) -> None:
    if owner not in (None, farm_id):
        key = f"{bucket.location.url}/{OWNER}"
        failure = Failure(
            f"it has the artifacts of another farm, {in_a_line(str(owner))}, and this is {farm_id or 'a new one'}",
            f"name a folder of the farm's own in --blobs. If the other farm is gone for good, delete the object {key}",
            is_lasting=True,
        )  # fmt: skip
        raise BlobsUnavailable("Storing artifacts", bucket.location.place, failure)


class Claim:
    """A farm's claim on the folder of its artifacts.

    Args:
        farm_id: returns the farm's id.
    """

    def __init__(self, bucket: Bucket, farm_id: Callable[[], Awaitable[str]]) -> None:
        self._bucket = bucket
        self._farm_id = farm_id
        self._is_held = False

    async def require(self) -> None:
        """Claim the folder before it is changed, unless that was done.

        Raises:
            BlobsUnavailable: another farm has claimed it, or the bucket's server failed.
        """
        if not self._is_held:
            await self.renew()

    async def renew(self) -> None:
        """Claim the folder, or look whether the claim stands.

        Raises:
            BlobsUnavailable: another farm has claimed it, or the bucket's server failed.
        """
        farm_id = await self._farm_id()
        try:
            await claim(self._bucket, farm_id)
        except BlobsUnavailable as error:
            self._is_held = self._is_held and not error.failure.is_lasting
            raise
        self._is_held = True


async def claim(bucket: Bucket, farm_id: str) -> None:
    """Claim a folder of a bucket for a farm, whose server or command writes there next.

    Raises:
        BlobsUnavailable: another farm has claimed it, or the bucket's server failed.
    """
    for _ in range(_TRIES):
        if (owner := await owner_of(bucket)) is not None:
            _require(bucket, owner, farm_id)
            return
        await bucket.create(OWNER, farm_id.encode())  # of several at one moment, the server keeps one
    raise BlobsUnavailable("Storing artifacts", bucket.location.place, Failure(f"{OWNER} does not stay there", LOOK))
