"""Whose address the farm sees of what a browser does, and who waits for refused sign-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError
from etfarm.wire.channel import CALL_METADATA
from etfarm.wire.names import FORWARDED_KEY_METADATA, FORWARDED_PEER_METADATA
from tests.support.farm import serve, wait_until
from tests.support.web import Visit, WebFarm, audited_addresses, running_page, sign_in_and_reserve

pytestmark = pytest.mark.slow(reason="starts servers and pages")

BROWSER: Final = "127.0.0.77"
OTHER: Final = "127.0.0.78"
ELSEWHERE: Final = "203.0.113.9"
FREE: Final = 100
"""Number of an address's failures that the server does not mind."""


class Served:
    """A server that has started its own page."""

    def __init__(self, web: WebFarm, folder: Path, *options: str) -> None:
        self.tokens = web.tokens
        self.daemon = serve(folder, "--tokens", str(web.folder / "tokens"), "--web", "127.0.0.1:0", *options)
        self.daemon.start()
        self.address = self.daemon.expect("listening on").rpartition(" ")[2]
        self.url = self.daemon.expect("web page at").rpartition(" ")[2].rstrip("/")

    def addresses(self, action: str) -> set[str]:
        return audited_addresses(self.address, self.tokens["admin"], action)


@pytest.fixture(scope="module")
def served(web: WebFarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(web, tmp_path_factory.mktemp("served"))
    yield running
    running.daemon.stop()


def test_the_audit_has_the_browsers_address(served: Served) -> None:
    sign_in_and_reserve(served.url, served.tokens["user"], BROWSER, x_forwarded_for=ELSEWHERE)
    assert wait_until(lambda: BROWSER in served.addresses("FarmService.GetServerInfo"))
    assert wait_until(lambda: served.addresses("DeviceService.Reserve") == {BROWSER})
    assert ELSEWHERE not in served.addresses("FarmService.GetServerInfo")


def test_a_trusted_proxy_names_the_browsers_address(web: WebFarm, tmp_path: Path) -> None:
    served = Served(web, tmp_path, "--web-trusted-proxy", "127.0.0.1", "--web-trusted-proxy", "10.0.0.0/8")
    try:
        sign_in_and_reserve(
            served.url, served.tokens["user"], "127.0.0.1", x_forwarded_for=f"198.51.100.1, {ELSEWHERE}, 10.1.2.3"
        )
        sign_in_and_reserve(served.url, served.tokens["user"], BROWSER, x_forwarded_for="198.51.100.1")
        sign_in_and_reserve(served.url, served.tokens["user"], "127.0.0.1", x_forwarded_for="nonsense, 10.1.2.4")
        assert wait_until(lambda: served.addresses("DeviceService.Reserve") == {ELSEWHERE, BROWSER, "10.1.2.4"})
    finally:
        served.daemon.stop()


def test_a_page_of_its_own_and_other_clients_are_not_believed(web: WebFarm, served: Served, tmp_path: Path) -> None:
    with running_page(served.address, tmp_path / "web.log") as (_, url):
        sign_in_and_reserve(url, web.tokens["user"], OTHER)

    async def claim() -> None:
        CALL_METADATA.set(((FORWARDED_PEER_METADATA, f"ipv4:{ELSEWHERE}:1"), (FORWARDED_KEY_METADATA, "guessed")))
        async with AsyncFarm(served.address, token=web.tokens["user"]) as farm:
            with suppress(EtfarmError):
                await farm.reserve_devices("name=none")

    asyncio.run(claim())
    assert wait_until(lambda: "127.0.0.1" in served.addresses("DeviceService.Reserve"))
    assert not {OTHER, ELSEWHERE} & served.addresses("DeviceService.Reserve")


def test_an_address_waits_for_its_refused_sign_ins_and_others_do_not(served: Served) -> None:
    def refuse(_: object) -> str:
        return Visit(served.url, source=BROWSER).sign_in("etf_wrong").text

    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        attempts = [threads.submit(refuse, number) for number in range(FREE + 10)]
        waits_s = []
        while not all(attempt.done() for attempt in attempts):
            before_s = time.monotonic()
            assert Visit(served.url, source=OTHER).sign_in(served.tokens["user"]).status == 303
            waits_s.append(time.monotonic() - before_s)
        texts = [attempt.result() for attempt in attempts]
    assert time.monotonic() - began_s > 20.0, "4 attempts at a time, each of a second"
    assert max(waits_s) < 10.0
    assert any("Wait" in text and "before the next one" in text for text in texts)
    assert "before the next one" not in Visit(served.url, source=OTHER).sign_in("etf_wrong").text
    assert Visit(served.url, source=BROWSER).sign_in(served.tokens["user"]).status == 303, "a valid token is never refused"
