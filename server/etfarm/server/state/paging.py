"""Paging of lists: page sizes, and page tokens that state a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from etfarm.wire.errors import UserError

PAGE_SIZES: Final = 50, 500
"""Default and maximum number of entries on a page of most lists."""

_MAX_DIGITS = 17
"""Maximum number of digits of a token, so that its number fits the database's 64-bit integers."""

EntryT = TypeVar("EntryT")


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


def page_of(entries: Sequence[EntryT], size: int, token: str) -> tuple[Sequence[EntryT], str]:
    """Return a page of a list that is complete in memory, and the token of the next page; "" on the last page.

    Args:
        entries: the list.
        size: the requested number of entries, as `page_size` takes it.
        token: the requested page's token; empty for the first page.

    Raises:
        BadPageToken: the size is negative, or the token is not one.
    """
    start, count = page_start(token), page_size(size, *PAGE_SIZES)
    following = start + count
    return entries[start:following], str(following) if following < len(entries) else ""
