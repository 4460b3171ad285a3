"""Paging of lists: page sizes, and page tokens that state a position."""

from __future__ import annotations

from etfarm.wire.errors import UserError

_MAX_DIGITS = 17
"""Maximum number of digits of a token, so that its number fits the database's 64-bit integers."""


class BadPageToken(UserError):
    """A negative page size, or a page token that no response contained."""

    reason = "BAD_PAGE_TOKEN"

    @classmethod
    def of(cls, token: str) -> BadPageToken:
        """Return the error for a token that no response contained."""
        return cls(f"{token[:80]!r} is not a page token.", "Send next_page_token of the page before.")


def page_size(requested: int, default: int, maximum: int) -> int:
    """Return the number of entries of a page: `default` if 0 is requested, and at most `maximum`.

    Raises:
        BadPageToken: the requested size is negative.
    """
    if requested < 0:
        raise BadPageToken(f"page_size must be 0 to {maximum}, got {requested}.", f"Leave it out for {default}.")
    return min(requested or default, maximum)


def page_start(token: str) -> int:
    """Return the number in a token: the entries before the page, or the last one there; 0 for the first page.

    Raises:
        BadPageToken: the token is not such a number.
    """
    if token and not (token.isascii() and token.isdecimal() and len(token) <= _MAX_DIGITS):
        raise BadPageToken.of(token)
    return int(token or 0)
