"""The addresses that others than the caller itself name: only those with a key of this process or of the farm are believed."""

from __future__ import annotations

import pytest

from etfarm.server.rpc.door.forwarded import Forwarded, forwarded_metadata


@pytest.mark.parametrize(
    ("key", "is_believed"), [("of the servers", True), ("of the page", True), ("of another process's page", False), ("", False)]
)
def test_a_process_believes_its_own_page_and_the_farms_servers(key: str, is_believed: bool) -> None:
    forwarded = Forwarded("of the servers", "of the page")
    peer = "ipv4:203.0.113.7:0"
    assert forwarded.peer(forwarded_metadata(peer, key)) == (peer if is_believed else None)


def test_a_process_without_page_and_other_servers_believes_nobody() -> None:
    assert Forwarded().peer(forwarded_metadata("ipv4:203.0.113.7:0", "")) is None
