"""Pages of lists that are complete in the server's memory."""

from __future__ import annotations

import pytest

from etfarm.server.state.paging import PAGE_SIZES, BadPageToken, page_of

DEFAULT, MAXIMUM = PAGE_SIZES


def test_pages_of_the_requested_size_make_the_whole_list() -> None:
    entries = list("abcdefg")
    first, token = page_of(entries, 3, "")
    second, token_of_last = page_of(entries, 3, token)
    assert [*first, *second] == list("abcdef")
    assert page_of(entries, 3, token_of_last) == (["g"], "")


@pytest.mark.parametrize(("requested", "count"), [(0, DEFAULT), (MAXIMUM, MAXIMUM), (MAXIMUM + 1, MAXIMUM)])
def test_a_page_has_a_default_and_a_maximum_size(requested: int, count: int) -> None:
    page, token = page_of(range(MAXIMUM + 1), requested, "")
    assert (len(page), token) == (count, str(count))


def test_the_last_full_page_has_no_token() -> None:
    assert page_of([1, 2], 2, "") == ([1, 2], "")
    assert page_of([], 2, "") == ([], "")


def test_a_list_that_became_shorter_ends() -> None:
    assert page_of([1, 2], 2, "4") == ([], "")


@pytest.mark.parametrize(("size", "token"), [(-1, ""), (1, "x"), (1, "-1"), (1, "9" * 18), (1, "\u0663")])
def test_a_page_that_does_not_exist_is_refused(size: int, token: str) -> None:
    with pytest.raises(BadPageToken):
        page_of([1], size, token)
