"""PostgreSQL's errors, as etfarm's or as those after which work is repeated."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors
from sqlalchemy.exc import DBAPIError

from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import DatabaseFull, DatabaseUnavailable, QueryTooSlow
from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for

_REPEATABLE: Final = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)
_REFUSALS: Final = (
    errors.InvalidPassword, errors.InvalidAuthorizationSpecification, errors.InvalidCatalogName, errors.InsufficientPrivilege,
    errors.UndefinedFile,
)  # fmt: skip
_REFUSED_STARTS: Final = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry")

_FULL: Final = ("too many clients", "connection slots are reserved", "too many connections")
"""PostgreSQL's words for the limits of all connections, of those that are not a superuser's, and of a role or database."""
_NEEDED: Final = 6
"""Maximum number of connections of a server: one that writes, four that read, and one for the lease."""

_WITHOUT_CODE: Final = (psycopg.OperationalError, psycopg.DatabaseError)

DRIVER_ERRORS: Final = (DBAPIError, psycopg.Error)
"""What SQLAlchemy and the driver raise."""


class WritesLost(FarmError):
    """A database without writes that it had confirmed. What the server has in memory is ahead of it."""

    reason = "DATABASE_LOST_WRITES"
    kind = Kind.DATA_LOSS

    def __init__(self, url: DatabaseUrl) -> None:
        super().__init__(
            f"The database {url} has lost the last writes: it crashed, or a standby without them has taken over.",
            "Start the server again: it resumes from what the database has. So that none is lost, set synchronous_commit to "
            "remote_apply for its role.",
            url=url,
        )


def driver_error(error: BaseException) -> psycopg.Error | None:
    """Return the driver's error that an error is or wraps."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return original if isinstance(original, psycopg.Error) else None


def is_loss(error: BaseException) -> bool:
    """Return whether the connection broke: every error of the server has a code, and errors of the arguments other types."""
    original = driver_error(error)
    return original is not None and type(original) in _WITHOUT_CODE and original.sqlstate is None


def is_repeatable(error: BaseException) -> bool:
    """Return whether the transaction was undone only because of others that ran at the same time."""
    return isinstance(driver_error(error), _REPEATABLE)


def is_standby(error: BaseException) -> bool:
    """Return whether the server does not accept writes, as a standby."""
    return isinstance(driver_error(error), errors.ReadOnlySqlTransaction)


def unavailable(url: DatabaseUrl, error: BaseException, limit_s: float | None) -> DatabaseUnavailable:
    """Return the error for work that has waited for too long, or, without a limit, that ends with its server."""
    why = one_line(error)
    remedy = "Nothing was changed. Try again when it is back; the server connects by itself."
    if any(text in why for text in _FULL):
        remedy = (
            "Nothing was changed. End connections of other programs, or raise max_connections: each server of the farm needs "
            f"{_NEEDED}. The server connects by itself."
        )
    since = "is not available" if limit_s is None else f"was not available for {limit_s:g} s"
    return DatabaseUnavailable(f"The database {url} {since}: {why}.", remedy, url=url)


def lost(url: DatabaseUrl, error: BaseException) -> DatabaseUnavailable:
    """Return the error for work that ends with its connection."""
    return DatabaseUnavailable(
        f"The connection to the database {url} was lost: {one_line(error)}.",
        "Run it again when the database is back: what was not committed is undone, and a copy continues.",
        url=url,
    )


def translated(url: DatabaseUrl, error: Exception) -> Exception:
    """Return etfarm's error for one of the database; any other error as it is."""
    return _known(url, error) or error


def _known(url: DatabaseUrl, error: Exception) -> EtfarmError | None:
    original = driver_error(error)
    if isinstance(original, errors.DiskFull):
        return DatabaseFull("The disk of the database is full.", "Free space on its server; etfarm goes on by itself.")
    if isinstance(original, errors.QueryCanceled):
        return QueryTooSlow(
            f"The database {url} took too long for a query.", "Nothing was changed. Try again; see what else it does.", url=url
        )
    return refused(url, error)


def refused(url: DatabaseUrl, error: BaseException) -> EtfarmError | None:
    """Return the error of a database that does not let the server in, which waiting does not change."""
    original = driver_error(error)
    if original is None:
        return None
    # Errors of a connection's start have no code.
    is_start = isinstance(original, psycopg.OperationalError) and original.sqlstate is None
    if not isinstance(original, _REFUSALS) and not (is_start and any(text in str(original) for text in _REFUSED_STARTS)):
        return None
    why = one_line(original)
    remedy = next((remedy for text, remedy in _REMEDIES if text in why), _REMEDY)
    return error_for("DATABASE_UNUSABLE", f"The database {url} cannot be used: {why}.", remedy, url=url)


_REMEDIES: Final = (
    (
        "no pg_hba.conf entry",
        "Add a line for this machine and role to pg_hba.conf of the database's server, and reload PostgreSQL.",
    ),
    ("password authentication failed", "Correct the role's password in the password file (passfile of the database's URL)."),
    (
        "no password supplied",
        "Give the password file (passfile of the database's URL) a line HOST:PORT:DATABASE:USER:PASSWORD for it, and chmod it "
        "600: one that others may read is ignored.",
    ),
)
_REMEDY: Final = "Create the role and the database, and give the role all privileges on it, as docs/growing.md shows."


def one_line(error: BaseException) -> str:
    """Return what an error says in one line, without a full stop."""
    original = driver_error(error) or error
    text = original.diag.message_primary if isinstance(original, psycopg.Error) else None
    return " ".join((text or str(original)).split()).rstrip(".")[:500] or type(original).__name__
