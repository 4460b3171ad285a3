"""Pages of lists: sizes, and tokens that count the entries before a page."""

from __future__ import annotations

from etfarm.wire.errors import UserError

_MAX_DIGITS = 17
"""Of a token: the number fits the database's 64-bit integers."""


class BadPageToken(UserError):
    """A page size is negative, or a page token is not one that an answer held."""

    reason = "BAD_PAGE_TOKEN"

    @classmethod
    def of(cls, token: str) -> BadPageToken:
        """Return the error of a token that no answer held."""
        return cls(f"{token[:80]!r} is not a page token.", "Send next_page_token of the page before.")


def page_size(requested: int, default: int, maximum: int) -> int:
    """Return how many entries a page has: `default` for 0, and at most `maximum`.

    Raises:
        BadPageToken: the requested size is negative.
    """
    if requested < 0:
        raise BadPageToken(f"page_size must be 0 to {maximum}, got {requested}.", f"Leave it out for {default}.")
    return min(requested or default, maximum)


def page_start(token: str) -> int:
    """Return the number that a token states, 0 for the first page: of entries before the page, or of the last entry there.

    Raises:
        BadPageToken: the token is not such a number.
    """
    if token and not (token.isascii() and token.isdecimal() and len(token) <= _MAX_DIGITS):
        raise BadPageToken.of(token)
    return int(token or 0)
