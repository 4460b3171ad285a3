"""Validation of page sizes and page tokens."""

from __future__ import annotations

from etfarm.server.jobs.records.history import BadPageToken


def page_size(asked: int, usual: int, most: int) -> int:
    """Return how many entries a page has.

    Raises:
        BadPageToken: the requested size is negative.
    """
    if asked < 0:
        raise BadPageToken(f"page_size must be 0 to {most}, got {asked}.", f"Give 0 for {usual}.")
    return min(asked or usual, most)


def page_start(token: str) -> int:
    """Return the number of entries before a page, which its token states.

    Raises:
        BadPageToken: the token is not such a number.
    """
    if token and not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise BadPageToken(f"{token[:80]!r} is no page token.", "Send next_page_token of the page before.")
    return int(token or 0)
