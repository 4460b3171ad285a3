"""The host of a request, read strictly: what browsers and attackers put into the header Host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire.authority import host_of, is_address


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("farm.example", "farm.example"), ("FARM.Example:443", "farm.example"), ("127.0.0.1:8080", "127.0.0.1"),
        ("a_b-c", "a_b-c"),
        ("[::1]", "[::1]"), ("[0:0::0:1]:80", "[::1]"), ("[::FFFF:127.0.0.1]", "[::ffff:7f00:1]"), ("x:0", "x"), ("x:65535", "x"),
    ],
)  # fmt: skip
def test_the_host_of_an_authority(authority: str, host: str) -> None:
    assert host_of(authority) == host


@pytest.mark.parametrize(
    "authority",
    [
        "", ":80", "evil:80:good", "[::1]evil", "[::1]:80:90", "[::1", "::1", "[127.0.0.1]", "[]", "user@farm.example",
        "farm.example.",
        "farm..example", ".farm.example", "-farm", "farm-", "farm.example:", "farm.example:x", "farm.example:65536",
        "farm.example:٣",
        "farm example", " farm.example", "farm.example\n", "farm.example\t", "farm.example/", "farm.example?", "farm.example#",
        "farm.example\\", "farm.example,evil", "f\u00e9rme.example", "\u212a.example", "[fe80::1%eth0]", "a" * 254,
        "%66arm.example",
    ],
)  # fmt: skip
def test_anything_else_is_no_host(authority: str) -> None:
    assert host_of(authority) == ""


@given(st.text(max_size=40))
def test_a_host_is_its_own_authority(text: str) -> None:
    host = host_of(text)
    assert host_of(host) == host
    assert not set(host) & set("@/\\?#, \r\n\t%")


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("[::1]", True), ("localhost", False), ("127.1", False)])
def test_addresses_and_names(host: str, expected: bool) -> None:
    assert is_address(host) is expected
