"""Pages of a List call: the client reads to the last page, and stops at a server that never comes to one."""

from __future__ import annotations

from itertools import count

import pytest

from etfarm.client.transport.paging import iterate_pages
from etfarm.v1 import device_pb2
from tests.support.refusals import refuses


class Pages:
    """A List call that answers with the page tokens of a sequence, and keeps those that it was asked for."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = iter(tokens)
        self.requested: list[str] = []

    async def list(self, request: device_pb2.ListDevicesRequest) -> device_pb2.ListDevicesResponse:
        """Answer with the next page."""
        self.requested.append(request.page_token)
        return device_pb2.ListDevicesResponse(next_page_token=next(self._tokens))


async def _read(pages: Pages, max_pages: int = 10) -> int:
    request = device_pb2.ListDevicesRequest()
    return len([page async for page in iterate_pages(pages.list, request, server="farm:1", max_pages=max_pages)])


async def test_every_page_is_read_once() -> None:
    pages = Pages("a", "b", "")
    assert await _read(pages) == 3
    assert pages.requested == ["", "a", "b"]


@pytest.mark.remedy("ENDLESS_LIST")
@pytest.mark.parametrize("tokens", [("a", "a"), ("a", "b", "a")])
async def test_a_page_token_that_comes_again_ends_the_list(tokens: tuple[str, ...]) -> None:
    pages = Pages(*tokens)
    with refuses("ENDLESS_LIST", match=r"farm:1 returned the same page token twice") as error:
        await _read(pages)
    assert error.value.reason == "ENDLESS_LIST"
    assert len(pages.requested) == len(tokens)
    assert await _read(Pages("a", "b", "")) == 3  # of a server without the defect


async def test_a_list_has_a_bounded_number_of_pages() -> None:
    pages = Pages(*(str(number) for number in range(1, 100)))
    with refuses("ENDLESS_LIST", match="more than 10 pages"):
        await _read(pages)
    assert len(pages.requested) == 10


async def test_as_many_pages_as_are_allowed_are_read() -> None:
    assert await _read(Pages(*(str(number) for number in range(1, 10)), "")) == 10


async def test_a_caller_may_stop_between_pages() -> None:
    pages = Pages(*(str(number) for number in range(1, 10)))
    numbers = count(1)
    async for _ in iterate_pages(pages.list, device_pb2.ListDevicesRequest(), server="farm:1"):
        if next(numbers) == 2:
            break
    assert len(pages.requested) == 2
