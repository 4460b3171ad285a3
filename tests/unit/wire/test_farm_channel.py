"""Channels of an agent to its farm: which servers get the token, over TLS on loopback, and what is said of the others."""

from __future__ import annotations

import contextlib
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from etfarm.v1.farm_pb2 import GetServerInfoRequest
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from etfarm.wire.channel import Access
from etfarm.wire.farm_channel import FarmNotProven, farm_channel
from tests.support.farm_servers import FARM, TOKEN, FarmServer, Old, Site, losing_link
from tests.support.golden import Golden, sentence
from tests.support.refusals import refuses


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def ask(access: Access) -> str:
    """Return the address of the server that answers a call with the token."""
    async with farm_channel(access) as channel:
        return (await FarmServiceStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=20)).version


async def refused(access: Access, address: str) -> str:
    """Return the sentence with which no server gets the token."""
    with pytest.raises(FarmNotProven) as error:
        await ask(access)
    return sentence(error.value).replace(address, "ADDRESS")


async def test_a_server_is_asked_once_and_gets_the_token(site: Site) -> None:
    server = FarmServer(site)
    async with server.running() as address:
        access = site.access(address)
        for _ in range(3):
            assert await ask(access) == address
    assert server.proofs == 1 and server.tokens == [f"Bearer {TOKEN}"] * 3


async def test_a_renewed_certificate_is_proven_again(site: Site) -> None:
    server = FarmServer(site)
    async with server.running() as address:
        access = site.access(address)
        assert await ask(access) == address
    server.issue(site)
    async with server.running():
        assert await ask(access) == address
    assert server.proofs == 2


async def test_another_server_at_a_proven_address_gets_no_token(site: Site, golden: Golden) -> None:
    server = FarmServer(site)
    async with server.running() as address:
        access = site.access(address)
        await ask(access)
    other = FarmServer(site, token="etf_of-another")
    other.address = address
    async with other.running():
        golden.check(await refused(access, address))
    assert not other.tokens


@pytest.mark.parametrize("what", ["another farm", "a copy", "another certificate", "old"])
async def test_what_proves_nothing_gets_no_token_and_is_named(site: Site, golden: Golden, what: str) -> None:
    server = {
        "another farm": lambda: FarmServer(site, farm_id="another", token="etf_of-another"),
        "a copy": lambda: FarmServer(site, farm_id="another"),
        "another certificate": lambda: FarmServer(site, certificate=site.ca.issue_cert("localhost").cert_chain_pems[0].bytes()),
        "old": lambda: Old(site),
    }[what]()
    async with server.running() as address:
        golden.check(await refused(site.access(address), address))
    assert not server.tokens


async def test_a_token_that_is_bound_to_an_address_goes_there_and_learns_its_farm(site: Site) -> None:
    server, learnt = FarmServer(site), list[str]()
    async with server.running() as address:
        access = site.access(address, farm_id="")
        access.proofs.__init__("", learnt.append)  # type: ignore[misc]
        assert await ask(access) == address
    assert learnt == [FARM] and access.proofs is not None and access.proofs.farm_id == FARM


@pytest.mark.parametrize("tls", [True, False])
async def test_a_server_without_proofs_gets_the_token_that_is_bound_to_its_address(site: Site, *, tls: bool) -> None:
    server = Old(site, tls=tls)
    async with server.running() as address:
        access = site.access(address, farm_id="", tls=tls)
        assert await ask(access) == address
    assert access.proofs is not None and not access.proofs.farm_id and server.tokens


async def test_of_several_servers_only_those_of_the_farm_get_the_token(site: Site) -> None:
    other, own, later = FarmServer(site, token="etf_of-another", farm_id="another"), FarmServer(site), FarmServer(site)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server.running()) for server in (other, own)]
        async with later.running() as last:
            access = site.access(*servers, last)
            assert await ask(access) == own.address
    # The one that is left takes over, and the one that is of another farm still gets nothing.
    async with other.running(), later.running():
        assert await ask(access) == later.address
    assert not other.tokens and own.tokens and later.tokens


async def test_a_server_that_is_away_is_no_other_farm(site: Site) -> None:
    other, away = FarmServer(site, token="etf_of-another", farm_id="another"), FarmServer(site)
    async with away.running():
        pass
    async with other.running():
        with refuses("SERVER_UNREACHABLE", match=f"The server at {away.address} does not answer") as error:
            await ask(site.access(other.address, away.address))
        # Otherwise nothing would ever say it.
        assert f"The server at {other.address} is of another farm" in error.value.message
        assert "tokens create" in error.value.remedy
    assert not other.tokens


async def test_a_certificate_of_another_authority_is_named_as_ever(site: Site, tmp_path: Path) -> None:
    server = FarmServer(site)
    async with server.running() as address:
        (tmp_path / "other").mkdir()
        with refuses("SERVER_UNREACHABLE", match="its certificate is not trusted"):
            await ask(Site(tmp_path / "other").access(address))
    assert not server.tokens


@pytest.mark.remedy("SERVER_UNREACHABLE")
async def test_a_name_that_is_not_in_the_certificate_is_refused_as_ever(site: Site) -> None:
    server = FarmServer(site, "localhost")
    async with server.running() as address:
        with refuses("SERVER_UNREACHABLE", match="its certificate is for another address"):
            await ask(site.access(address))
        assert await ask(site.access(address.replace("127.0.0.1", "localhost"))) == address
    assert server.tokens == [f"Bearer {TOKEN}"]


@pytest.mark.parametrize("before", [0, 99])
async def test_lost_connections_are_no_proxy_before_a_farm_that_was_found(site: Site, before: int) -> None:
    server, left = FarmServer(site), [0]

    def is_lost(number: int) -> bool:
        left[0] -= 1
        return left[0] >= 0

    async with server.running() as target, losing_link(target, is_lost) as address:
        access = site.access(address)
        assert await ask(access) == target
        assert access.proofs is not None
        access.proofs.unseen[address] = before
        # A connection of gRPC and a handshake are lost, and the question after that is not: as of a server that starts.
        left[0] = 2
        with contextlib.suppress(grpc.aio.AioRpcError):  # as of any server that is away
            await ask(access)
        assert await ask(access) == target


async def test_only_a_certificate_that_is_never_seen_is_a_proxys(site: Site) -> None:
    server = FarmServer(site)
    async with server.running() as target, losing_link(target, lambda number: number % 2 == 1) as address:
        access = site.access(address)
        for _ in range(4):
            with refuses("SERVER_UNREACHABLE", match="does not show this agent its certificate"):
                await ask(access)
        assert "Let the agent connect to it without an HTTP proxy" in await refused(access, address)
    assert not server.tokens


async def test_a_server_that_was_away_is_asked_again_once_no_other_one_is_reached(site: Site) -> None:
    first, standby = FarmServer(site), FarmServer(site)
    async with standby.running():
        pass
    async with first.running() as address:
        access = site.access(address, standby.address)
        for _ in range(2):
            assert await ask(access) == address
    async with standby.running():
        assert await ask(access) == standby.address
