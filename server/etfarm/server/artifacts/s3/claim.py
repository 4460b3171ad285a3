"""Whose a folder of a bucket is: of two farms that share one, each would delete what the other needs.

A farm that was restored as itself takes the folder over from the database that was backed up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from etfarm.server.artifacts.owners import objection
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import LOOK, BlobsUnavailable, Failure
from etfarm.server.state.identity import Identity

OWNER: Final = "owner/farm.id"
"""Key of the object that has the identity of the farm; alone in its folder, which is listed."""
_MOST_BYTES: Final = 100
"""Maximum number of bytes that are read of it."""
_TRIES: Final = 3
"""Number of attempts to claim a folder whose claim disappears at that moment."""


async def owner_of(bucket: Bucket) -> Identity | None:
    """Return the farm that has claimed a folder of a bucket; None if none has.

    Raises:
        BlobsUnavailable: the bucket's server failed.
    """
    text = await bucket.text(OWNER, _MOST_BYTES) if await bucket.has(OWNER) else None
    return None if text is None else Identity.parse(text)


async def require_not_foreign(bucket: Bucket, farm: Identity | None) -> None:
    """Check that no other farm has claimed a folder of a bucket, nor this one restored elsewhere. One that is not claimed passes.

    Args:
        farm: the farm; None for one that is still to be made.

    Raises:
        BlobsUnavailable: another farm has claimed it, or the bucket's server failed.
    """
    _require(bucket, await owner_of(bucket), farm)


def _require(bucket: Bucket, owner: Identity | None, farm: Identity | None) -> None:
    claim, own = f"the object {bucket.location.url}/{OWNER}", "name a folder of the farm's own in --blobs"
    if (refused := objection(owner, farm, claim, own)) is not None:
        why, remedy = refused
        raise BlobsUnavailable("Storing artifacts", bucket.location.place, Failure(why, remedy, is_lasting=True))


class Claim:
    """A farm's claim on the folder of its artifacts.

    Args:
        identity: returns the farm's identity.
    """

    def __init__(self, bucket: Bucket, identity: Callable[[], Awaitable[Identity]]) -> None:
        self._bucket = bucket
        self._identity = identity
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
        farm = await self._identity()
        try:
            await claim(self._bucket, farm)
        except BlobsUnavailable as error:
            self._is_held = self._is_held and not error.failure.is_lasting
            raise
        self._is_held = True


async def claim(bucket: Bucket, farm: Identity) -> None:
    """Claim a folder of a bucket for a farm, whose server or command writes there next.

    Raises:
        BlobsUnavailable: another farm has claimed it, or this one restored elsewhere, or the bucket's server failed.
    """
    for _ in range(_TRIES):
        owner = await owner_of(bucket)
        _require(bucket, owner, farm)
        if owner is None:
            await bucket.create(OWNER, farm.text.encode())  # of several at one moment, the server keeps one
        elif owner != farm:
            await bucket.put(OWNER, farm.text.encode())  # of the database that this one was restored from
        else:
            return
    raise BlobsUnavailable("Storing artifacts", bucket.location.place, Failure(f"{OWNER} does not stay there", LOOK))
