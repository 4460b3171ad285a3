"""Which connections end when there are too many, and what an address counts as."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import socket
from typing import Any

import pytest

from etfarm.client.web.connections import CONNECTS_AT_ONCE, CONNECTS_PER_S, Connections, Place
from etfarm.client.web.options import WebOptions
from etfarm.client.web.server import LOGGED, LOGGED_S, LogLimit
from etfarm.wire.authority import network_of


class Crowd:
    """Connections, of which those that were ended are known by name."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 1000.0
        self.connections = Connections(WebOptions("127.0.0.1:1", **options), lambda: self.now_s)
        self.ended: list[str] = []
        self._ports = itertools.count(1)

    def open(self, name: str, host: str = "10.0.0.1", account: str = "", *, is_busy: bool = False) -> Place:
        self.now_s += 1.0
        place = self.connections.begin((host, next(self._ports)), lambda: self.ended.append(name))
        if account:
            place.enter(account)
        place.set_busy(is_busy)
        return place


def test_the_longest_idle_one_of_an_address_ends_for_a_new_one() -> None:
    crowd = Crowd(max_connections_of_address=3)
    crowd.open("busy", is_busy=True)
    first = crowd.open("first")
    crowd.open("second")
    crowd.open("other", "10.0.0.2")
    first.set_busy(True)
    crowd.now_s += 1.0
    first.set_busy(False)
    crowd.open("third")
    assert crowd.ended == ["second"]
    crowd.open("fourth", is_busy=True)
    assert crowd.ended == ["second", "first"]
    crowd.open("fifth", is_busy=True)
    crowd.open("sixth")
    assert crowd.ended == ["second", "first", "third", "busy"], "a request that is sent slowly ends for new ones"


def test_the_signed_in_have_room_of_their_own() -> None:
    crowd = Crowd(max_connections=4, max_connections_of_address=2, max_connections_of_account=3)
    for number in range(3):
        crowd.open(f"member {number}", account="a", is_busy=True)
    for number in range(50):
        crowd.open(f"stranger {number}", f"10.0.1.{number}")
    assert len(crowd.ended) == 46 and not any(name.startswith("member") for name in crowd.ended)
    crowd.ended.clear()
    crowd.open("member 3", account="a")
    assert crowd.ended == ["stranger 46", "member 3"], "requests in progress of the signed-in go on"
    crowd.open("late", account="b")
    crowd.open("later", account="b")
    assert crowd.ended[2:] == ["later"], "nor do they end for others"


def test_the_address_with_the_most_connections_loses_one() -> None:
    crowd = Crowd(max_connections=5)
    for number in range(4):
        crowd.open(f"many {number}", "10.0.0.1")
    crowd.open("few", "10.0.0.2")
    crowd.open("new", "10.0.0.3")
    assert crowd.ended == ["many 0"]


def test_a_connection_counts_for_whom_its_last_request_was() -> None:
    crowd = Crowd(max_connections_of_address=1)
    place = crowd.open("first", account="a")
    crowd.open("second")
    assert crowd.ended == []
    place.enter("")
    assert crowd.ended == ["second"]
    place.enter("")
    place.room.remove(place)
    place.enter("a")
    assert (crowd.connections.strangers.count, crowd.connections.visitors.count) == (0, 0)


@pytest.mark.parametrize(
    ("options", "host", "is_limited"),
    [
        ({}, "127.0.0.1", True),
        ({"public_url": "https://farm.example"}, "127.0.0.1", False),
        ({"public_url": "https://farm.example"}, "::ffff:127.0.0.1", False),
        ({"public_url": "https://farm.example"}, "10.0.0.1", True),
        ({"trusted_proxies": (ipaddress.ip_network("10.0.0.0/24"),)}, "10.0.0.1", False),
        ({"trusted_proxies": (ipaddress.ip_network("10.0.0.0/24"),)}, "127.0.0.1", True),
    ],
)
def test_a_proxy_has_the_connections_of_many(options: dict[str, Any], host: str, is_limited: bool) -> None:
    crowd = Crowd(max_connections_of_address=2, **options)
    for number in range(5):
        crowd.open(str(number), host)
    assert bool(crowd.ended) is is_limited


async def test_an_address_that_opens_too_many_a_second_is_refused() -> None:
    crowd = Crowd()
    with socket.socket() as connected:
        accepted = sum(crowd.connections.accept(connected, ("10.0.0.1", number)) for number in range(CONNECTS_AT_ONCE + 500))
        assert CONNECTS_AT_ONCE <= accepted <= CONNECTS_AT_ONCE + 1
        assert crowd.connections.accept(connected, ("10.0.0.2", 1))
        crowd.now_s += 1.0
        assert sum(crowd.connections.accept(connected, ("10.0.0.1", number)) for number in range(500)) == CONNECTS_PER_S
    assert crowd.connections.strangers.count <= 65


@pytest.mark.parametrize(
    ("host", "owner"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("", ""),
    ],
)  # fmt: skip
def test_a_network_of_one_machine_counts_as_one(host: str, owner: str) -> None:
    assert network_of(host) == owner


def test_a_flood_of_messages_is_counted_and_not_logged() -> None:
    now_s = [1000.0]
    limit = LogLimit(lambda: now_s[0])

    def pass_through(text: str, name: str = "x") -> str | None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, (), None)
        return record.getMessage() if limit.filter(record) else None

    passed = [pass_through("Invalid HTTP request received.") for _ in range(1_000)]
    assert sum(text is not None for text in passed) == LOGGED
    assert pass_through("another") == "another"
    assert pass_through("Invalid HTTP request received.", "y") is not None
    now_s[0] += LOGGED_S + 1
    assert pass_through("Invalid HTTP request received.") == (
        "Invalid HTTP request received. (990 more since the last one that was logged)"
    )
    for number in range(5_000):
        pass_through(f"kind {number}")
    assert len(limit._seen) <= 1_001
