"""Artifacts of a farm whose database is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.artifacts.blobs import ARTIFACTS, BLOBS
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.errors import BlobsUnavailable
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.state.damage import DatabaseLost
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import is_new

log = structlog.get_logger()

_PATIENCE_S: Final = 2.0
"""Time for which a request to the bucket is repeated."""


def require_known(data: Path, path: Path, url: DatabaseUrl | None, wait_s: float, blobs: BucketLocation | None = None) -> None:
    """Refuse to begin with an empty database where there are artifacts.

    Args:
        data: the server's data folder.
        path: its SQLite file.
        url: the PostgreSQL database to use instead.
        wait_s: how long to wait for the PostgreSQL server.
        blobs: the bucket of the artifacts; None for files in the data folder.

    Raises:
        DatabaseLost: there are artifacts.
        BlobsUnavailable: the bucket's server refuses requests. One that is away has no say: a farm begins without it.
        DatabaseUnusable, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    if not is_new(path, url, wait_s):
        return
    folder = data / ARTIFACTS / BLOBS
    if next(folder.glob("??/*"), None) is not None:
        raise DatabaseLost(url or path, str(folder), data)
    if blobs is not None and asyncio.run(_has_objects(Bucket(blobs, patience_s=_PATIENCE_S))):
        raise DatabaseLost(url or path, blobs.place, data)


async def _has_objects(bucket: Bucket) -> bool:
    try:
        return await anext(bucket.list(BLOBS), None) is not None
    except BlobsUnavailable as error:
        if error.failure.is_lasting:
            raise
        log.warning("beginning an empty database without a look at the bucket, which may have artifacts", error=error.message)
        return False
