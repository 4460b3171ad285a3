"""The URL of a PostgreSQL database, whose password is never shown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from etfarm.wire.errors import UserError

_SCHEMES: Final = ("postgresql", "postgres")
_MASK: Final = "***"
_SECRETS: Final = frozenset({"password", "sslpassword"})
"""Parameters of a URL that are masked."""


class BadDatabaseUrl(UserError):
    """A text that is no URL of a PostgreSQL database. The error does not show it, since it may have a password."""

    reason = "BAD_DATABASE_URL"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The database's URL is not valid: {why}.", "Write it as postgresql://USER@HOST/DATABASE, or leave it out for SQLite."
        )


@dataclass(frozen=True)
class DatabaseUrl:
    """A URL as libpq reads it. Its text form has no password."""

    text: str = field(repr=False)
    """The URL with its password."""

    @classmethod
    def parse(cls, text: str) -> DatabaseUrl:
        """Return the URL of a text.

        Raises:
            BadDatabaseUrl: it is not a URL of PostgreSQL.
        """
        try:
            parts = urlsplit(text)
        except ValueError:
            raise BadDatabaseUrl("it cannot be split into its parts") from None
        if parts.scheme not in _SCHEMES or not text.startswith(f"{parts.scheme}://"):
            raise BadDatabaseUrl("it must begin with postgresql://")
        if "\x00" in text:
            raise BadDatabaseUrl("it has a NUL character")
        if re.search(r"://[^/]*[?#][^/]*@", text):
            # libpq would take them as a part of the password, but its end could not be told, and it might be shown.
            raise BadDatabaseUrl("it must have %3F and %23 for ? and # before the host, and %40 for @ after it")
        return cls(text)

    @property
    def has_password(self) -> bool:
        """Whether the URL has a password."""
        parts = urlsplit(self.text)
        return parts.password is not None or any(key in _SECRETS for key, _ in parse_qsl(parts.query))

    def __str__(self) -> str:
        parts = urlsplit(self.text)
        user, at, hosts = parts.netloc.rpartition("@")
        name, colon, _ = user.partition(":")
        place = f"{name}{colon and f':{_MASK}'}{at}{hosts}"
        query = urlencode(
            [(key, _MASK if key in _SECRETS else value) for key, value in parse_qsl(parts.query, keep_blank_values=True)],
            safe="/*,:",
        )
        return f"{parts.scheme}://{place}{parts.path}" + (f"?{query}" if query else "")
