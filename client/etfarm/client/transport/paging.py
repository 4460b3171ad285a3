"""List calls whose answers come in pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from etfarm.wire.errors import error_for

PAGE_SIZE: Final = 500
"""Requested number of rows on a page: the most that a server returns of most lists."""

MAX_PAGES: Final = 100_000
"""Maximum number of pages of one list: at 500 rows a page, 50 million rows."""


class PagedRequest(Protocol):
    """The request of a List call."""

    page_token: str


class Page(Protocol):
    """One page of an answer."""

    @property
    def next_page_token(self) -> str:
        """The token of the next page; empty on the last page."""


RequestT = TypeVar("RequestT", bound=PagedRequest)
PageT = TypeVar("PageT", bound=Page)


async def iterate_pages(
    rpc: Callable[[RequestT], Awaitable[PageT]], request: RequestT, *, server: str, max_pages: int = MAX_PAGES
) -> AsyncIterator[PageT]:
    """Yield the pages of a list, from that of `request.page_token` to the last.

    Args:
        rpc: the call.
        request: the request of every page; its `page_token` is set here. The caller may change `page_size` between pages.
        server: address for error messages.

    Raises:
        ENDLESS_LIST: the server returns a page token a second time, or more than `max_pages` pages.
        EtfarmError: as the call.
    """
    tokens = {request.page_token}
    for _ in range(max_pages):
        page = await rpc(request)
        yield page
        token = page.next_page_token
        if not token:
            return
        if token in tokens:
            raise error_for(
                "ENDLESS_LIST",
                f"The server {server} returned the same page token twice, so its list has no end.",
                "This is a defect of the server: update it, or report the defect.",
                server=server,
            )
        tokens.add(token)
        request.page_token = token
    raise error_for(
        "ENDLESS_LIST",
        f"The server {server} returned more than {max_pages} pages for one list.",
        "Narrow the list down with the command's filters. If it is short, this is a defect of the server.",
        server=server,
        max_pages=max_pages,
    )


async def iterate_rows(
    rpc: Callable[[Any], Awaitable[Any]], request: Any, field: str, *, server: str, limit: int | None = None
) -> AsyncIterator[Any]:
    """Yield the rows of a list, at most `limit`.

    Args:
        rpc, server: as of `iterate_pages`.
        request: without a `page_size`, pages have PAGE_SIZE rows.
        field: the field of a page that has its rows.

    Raises:
        EtfarmError: as `iterate_pages`.
    """
    if limit is not None and limit <= 0:
        return
    left, most = limit, request.page_size or PAGE_SIZE
    request.page_size = most if left is None else min(left, most)
    async for page in iterate_pages(rpc, request, server=server):
        rows = getattr(page, field)
        for row in rows[:left]:
            yield row
        if left is not None:
            left -= len(rows)
            if left <= 0:
                return
            request.page_size = min(left, most)
