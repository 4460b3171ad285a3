"""Errors of artifacts in a bucket, and what S3 servers mean by theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from etfarm.wire.errors import FarmError, Kind
from etfarm.wire.escapes import in_a_line

NO_BUCKET: Final = "NoSuchBucket"
DENIED: Final = "AccessDenied"
LOOK: Final = "check the S3 server and --blobs-endpoint"
"""The remedy of a server that is away."""
_CLOCKS_DIFFER: Final = "RequestTimeTooSkewed"
_REFUSED: Final = frozenset({DENIED, "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})
"""Codes of refused credentials, which obstore does not tell apart from failures where objects are listed."""
_WHY_CHARACTERS: Final = 200


@dataclass(frozen=True)
class Failure:
    """Why requests to a bucket fail."""

    why: str
    remedy: str
    """What the farm's admin should do, as "create the bucket"."""
    is_lasting: bool = False
    """Whether the server answers, and answers all requests alike until the bucket or the configuration is corrected. Otherwise it
    is away, and requests are repeated."""

    @classmethod
    def of(cls, error: Exception, bucket: str) -> Failure:
        """Return what an error of obstore or of the system means."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        code, why = code_of(error), _why(error)
        if code == NO_BUCKET:
            return cls(f"there is no bucket {bucket!r}", "create it, or correct --blobs", is_lasting=True)
        if code == _CLOCKS_DIFFER:
            why = f"the clock of the farm's server differs too much from that of the S3 server ({code})"
            return cls(why, "set the clock of the farm's server, for example with `timedatectl set-ntp true`")
        if code in _REFUSED or isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            remedy = "check --blobs-credentials: they must permit to read, write, list and delete there"
            return cls(f"the server refuses the credentials ({why})", remedy, is_lasting=True)
        return cls(why, LOOK)


def code_of(error: Exception) -> str:
    """Return the code of a server's answer in an error of obstore; empty if the answer has none, as that to a HEAD."""
    return str(error).partition("<Code>")[2].partition("</Code>")[0]


def _why(error: Exception) -> str:
    """Return the gist of an error of obstore, which has neither the signature nor the server's whole answer."""
    text = str(error).partition("\n\nDebug source")[0]
    gist = code_of(error) or (text.splitlines()[0].rpartition(" - ")[2].rstrip(".: ") if text else type(error).__name__)
    return in_a_line(gist[:_WHY_CHARACTERS])


class BlobsUnavailable(FarmError):
    """An artifact that could not be read or written, since the bucket's server did not answer in time, or refused it."""

    reason = "BLOBS_UNAVAILABLE"
    kind = Kind.UNAVAILABLE

    def __init__(self, what: str, place: str, failure: Failure) -> None:
        super().__init__(
            f"{what} failed in {place}: {failure.why}.",
            f"Nothing is lost. It is tried again by itself; if that lasts, ask the farm's admin to {failure.remedy}.",
            why=failure.why,
        )
        self.place = place
        self.failure = failure


class BlobsUnusable(FarmError):
    """A bucket that the server cannot use, detected before it starts."""

    reason = "BLOBS_UNUSABLE"
    kind = Kind.FAILED_PRECONDITION


class BlobsAway(BlobsUnusable):
    """A bucket whose server did not answer a check. A server starts without it; commands that copy artifacts do not."""


@contextmanager
def checked() -> Iterator[None]:
    """Translate errors of requests, which are repeated, to those of a check, which ends a command.

    Raises:
        BlobsAway: the server does not answer.
        BlobsUnusable: it answers, and the bucket cannot be used.
    """
    try:
        yield
    except BlobsUnavailable as error:
        kind, failure = BlobsUnusable if error.failure.is_lasting else BlobsAway, error.failure
        remedy = f"{failure.remedy[0].upper()}{failure.remedy[1:]}."
        raise kind(f"Artifacts cannot be stored in {error.place}: {failure.why}.", remedy) from None
