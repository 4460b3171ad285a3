"""Requests that change something come from the page itself: the exact origin, and https where visitors use https."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from etfarm.client.web.forms import CsrfTokens, FormCheck
from etfarm.client.web.options import WebOptions

HTTPS = {"public_url": "https://farm.example:443/etfarm"}


@pytest.mark.parametrize(
    ("options", "host", "origin", "is_own"),
    [
        ({}, "127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ({}, "127.0.0.1:8080", "http://127.0.0.1:80801", False),
        ({}, "127.0.0.1:8080", "http://127.0.0.1", False),
        ({}, "127.0.0.1:8080", "https://127.0.0.1:8080", False),
        ({"is_https": True}, "farm:8443", "https://farm:8443", True),
        ({"is_https": True}, "farm:8443", "http://farm:8443", False),
        (HTTPS, "farm.example", "https://farm.example", True),
        (HTTPS, "farm.example", "HTTPS://FARM.example", True),
        (HTTPS, "farm.example", "http://farm.example", False),
        (HTTPS, "127.0.0.1:8080", "http://127.0.0.1:8080", False),
        (HTTPS, "other.example", "https://other.example", True),
        (HTTPS, "farm.example", "https://farm.example.evil.example", False),
        (HTTPS, "farm.example", "https://farm.example/", False),
        (HTTPS, "farm.example", "https://evil.example, https://farm.example", False),
        ({"public_url": "http://farm.example/x"}, "farm.example", "http://farm.example", True),
        ({"public_url": "http://farm.example/x"}, "farm.example", "https://farm.example", False),
        (HTTPS, "farm.example", "null", False),
    ],
)
def test_only_the_pages_own_origin_may_change_something(options: dict[str, object], host: str, origin: str, is_own: bool) -> None:
    async def unused(*_: object) -> None: ...

    check = FormCheck(unused, WebOptions("127.0.0.1:1", **options), CsrfTokens(), "cookie")  # type: ignore[arg-type]
    assert check._is_own_origin(Headers({"host": host, "origin": origin})) is is_own
