"""Artifacts that are not the farm's: another farm has them, or their database is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.artifacts import folder_claim
from etfarm.server.artifacts.blobs import ARTIFACTS, BLOBS
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER, require_not_foreign
from etfarm.server.artifacts.s3.errors import BlobsAway, checked
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.state.damage import database_lost
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import identity_of, is_new
from etfarm.server.state.identity import Identity

log = structlog.get_logger()

_PATIENCE_S: Final = 2.0
"""Time for which a request to the bucket is repeated."""


def require_known(
    data: Path,
    path: Path,
    url: DatabaseUrl | None,
    wait_s: float,
    blobs: BucketLocation | None = None,
    *,
    begin_empty: bool = False,
) -> None:
    """Refuse to begin with an empty database where there are artifacts, and to use those of another farm.

    Args:
        data: the server's data folder.
        path: its SQLite file.
        url: the PostgreSQL database to use instead.
        wait_s: how long to wait for the PostgreSQL server.
        blobs: the bucket of the artifacts; None for files in the data folder.
        begin_empty: whether an empty database beside artifacts is intended.

    Raises:
        DATABASE_LOST: there are artifacts.
        BlobsUnusable: the folder of files or of the bucket is another farm's, or the bucket's server refuses requests. One that
            is away has no say: a farm begins without it.
        DATABASE_UNUSABLE, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    may_begin = begin_empty or not is_new(path, url, wait_s)
    if not may_begin and next((folder := data / ARTIFACTS / BLOBS).glob("??/*"), None) is not None:
        owner = data / ARTIFACTS / folder_claim.OWNER
        raise database_lost(url or path, str(folder), data, f"the file {owner}" if url is not None and owner.exists() else "")
    if blobs is None:
        if url is not None:
            folder_claim.require_not_foreign(data / ARTIFACTS, identity_of(path, url, wait_s))
        return
    if asyncio.run(_has_lost(Bucket(blobs, patience_s=_PATIENCE_S), identity_of(path, url, wait_s), may_begin)):
        raise database_lost(url or path, blobs.place, data, f"the object {blobs.url}/{OWNER}")


async def _has_lost(bucket: Bucket, farm: Identity | None, may_begin: bool) -> bool:
    """Return whether a bucket has artifacts, and none are allowed."""
    try:
        with checked():
            if not may_begin and await anext(bucket.list(BLOBS), None) is not None:
                return True
            await require_not_foreign(bucket, farm)
    except BlobsAway as error:
        log.warning("starting without a look at the bucket, which may have artifacts of another farm", error=error.message)
    return False
