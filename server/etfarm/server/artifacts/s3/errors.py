"""Errors of artifacts in a bucket."""

from __future__ import annotations

from etfarm.wire.errors import FarmError, Kind


class BlobsUnavailable(FarmError):
    """An artifact that could not be read or written, since the bucket's server did not answer in time, or refused it."""

    reason = "BLOBS_UNAVAILABLE"
    kind = Kind.UNAVAILABLE

    def __init__(self, what: str, place: str, why: str) -> None:
        super().__init__(
            f"{what} failed in {place}: {why}.",
            "Nothing is lost. It is tried again by itself; if that lasts, ask the farm's admin to look at the S3 server.",
            why=why,
        )


class BlobsUnusable(FarmError):
    """A bucket that the server cannot use, detected before it starts."""

    reason = "BLOBS_UNUSABLE"
    kind = Kind.FAILED_PRECONDITION
