"""The web page of a server that does not lead: its visitors' calls are forwarded with the addresses of their browsers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.databases import PostgresDatabases
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.farm import wait_until
from tests.support.servers import Servers
from tests.support.web import Visit, audited_addresses, sign_in_and_reserve

pytestmark = pytest.mark.slow(reason="starts the servers of a farm and a page")

BROWSER: Final = "127.0.0.77"
TOKENS: Final = {role: f"etf_{secrets.token_urlsafe(24)}" for role in ("admin", "user")}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, postgres_databases: PostgresDatabases) -> Iterator[Servers]:
    """A farm of two servers, the second of which has a page."""
    folder = tmp_path_factory.mktemp("farm")
    (file := folder / "tokens").touch(mode=0o600)
    file.write_text("".join(f"the-{role} {role} {token}\n" for role, token in TOKENS.items()))
    with postgres_databases.server.new_database() as url, Servers(folder, url) as running:
        running.add("--tokens", str(file))
        running.add("--tokens", str(file), "--web", "127.0.0.1:0")
        yield running


@pytest.fixture(scope="module")
def url(servers: Servers) -> str:
    """The address of the standby's page."""
    daemon = servers.servers[1].daemon
    assert daemon is not None
    return daemon.expect("web page at").rpartition(" ")[2].rstrip("/")


def test_the_page_shows_the_farm_and_the_leader_audits_its_browsers(servers: Servers, url: str) -> None:
    leader = servers.servers[0]
    sign_in_and_reserve(url, TOKENS["user"], BROWSER, etfarm_forwarded_peer="ipv4:203.0.113.9:1", etfarm_forwarded_key="guessed")
    assert wait_until(lambda: audited_addresses(leader.address, TOKENS["admin"], "DeviceService.Reserve") == {BROWSER})
    assert wait_until(lambda: audited_addresses(leader.address, TOKENS["admin"], "FarmService.GetServerInfo") == {BROWSER}), (
        "the page itself asks for nothing when it starts"
    )
    visit = Visit(url, source=BROWSER)
    assert visit.sign_in(TOKENS["admin"]).status == 303
    for path in ("/", "/jobs", "/server"):
        assert visit.get(path).status == 200, path


def test_the_page_follows_a_new_leader(servers: Servers, url: str) -> None:
    leader, standby = servers.servers
    visit = Visit(url, source=BROWSER)
    assert visit.sign_in(TOKENS["user"]).status == 303
    leader.kill9()
    standby.wait_until_leading()
    assert wait_until(lambda: visit.get("/jobs").status == 200), "the session outlives the leader"
    assert Visit(url, source=BROWSER).sign_in(TOKENS["user"]).status == 303
