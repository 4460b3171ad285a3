"""Channels of an agent to its farm: which servers get the token, over TLS on loopback, and what is said of the others."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from etfarm.v1.farm_pb2 import FarmProof, GetProofRequest, GetServerInfoRequest, ServerInfo
from etfarm.v1.farm_pb2_grpc import FarmServiceServicer, FarmServiceStub, add_FarmServiceServicer_to_server
from etfarm.wire.channel import Access
from etfarm.wire.farm_channel import FarmNotProven, farm_channel
from etfarm.wire.farm_proof import METADATA, Proofs, key_of, mac_of
from etfarm.wire.status import Unreachable
from etfarm.wire.tls import first_of
from tests.support.golden import Golden, sentence

TOKEN, FARM = "etf_of-an-agent", "the-farm"


@dataclass
class Site:
    """An authority, and the servers that it has signed certificates for."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def access(self, *addresses: str, farm_id: str = FARM, tls: bool = True) -> Access:
        path = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(path)
        return Access(",".join(addresses), TOKEN, path if tls else None, proofs=Proofs(farm_id))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


class FarmServer(FarmServiceServicer):
    """A server of a farm, which records the metadata of its calls.

    Args:
        token: the token that it knows.
        names: those in its certificate.
        certificate: PEM of the certificate that it says to have; its own if empty.
    """

    def __init__(
        self, site: Site, *names: str, farm_id: str = FARM, token: str = TOKEN, certificate: bytes = b"", tls: bool = True
    ) -> None:
        self._farm_id, self._key, self._tls = farm_id, key_of(token), tls
        self._names = names or ("localhost", "127.0.0.1")
        self.issue(site, certificate)
        self.address = ""
        self.proofs = 0
        self.tokens: list[str] = []

    def issue(self, site: Site, certificate: bytes = b"") -> None:
        """Give it a new certificate."""
        own = site.ca.issue_cert(*self._names)
        self._credentials = grpc.ssl_server_credentials([(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())])
        self._certificate = first_of(certificate or own.cert_chain_pems[0].bytes())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_FarmServiceServicer_to_server(self, server)
        address = self.address or "127.0.0.1:0"
        port = server.add_secure_port(address, self._credentials) if self._tls else server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await server.start()
        try:
            yield self.address
        finally:
            await server.stop(None)

    async def GetProof(self, request: GetProofRequest, context: Any) -> FarmProof:
        self._record(context)
        self.proofs += 1
        sent = GetProofRequest.FromString(dict(context.invocation_metadata())[METADATA])
        certificate = hashlib.sha256(self._certificate).digest() if self._tls else b""
        mac = mac_of(self._key, sent.nonce, b"s" * 32, self._farm_id, certificate)
        return FarmProof(farm_id=self._farm_id, server_nonce=b"s" * 32, mac=mac)

    async def GetServerInfo(self, request: GetServerInfoRequest, context: Any) -> ServerInfo:
        self._record(context)
        return ServerInfo(version=self.address)

    def _record(self, context: Any) -> None:
        self.tokens += [str(value) for name, value in context.invocation_metadata() if name == "authorization"]


class Old(FarmServer):
    """A server of the last release, which has no GetProof."""

    async def GetProof(self, request: GetProofRequest, context: Any) -> FarmProof:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        raise AssertionError("abort raises")


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
async def test_a_server_of_the_last_release_gets_the_token_that_is_bound_to_its_address(site: Site, *, tls: bool) -> None:
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
        with pytest.raises(Unreachable, match=f"The server at {away.address} does not answer"):
            await ask(site.access(other.address, away.address))
    assert not other.tokens


async def test_a_certificate_of_another_authority_is_named_as_ever(site: Site, tmp_path: Path) -> None:
    server = FarmServer(site)
    async with server.running() as address:
        (tmp_path / "other").mkdir()
        with pytest.raises(Unreachable, match="its certificate is not trusted"):
            await ask(Site(tmp_path / "other").access(address))
    assert not server.tokens


async def test_a_name_that_is_not_in_the_certificate_is_refused_as_ever(site: Site) -> None:
    server = FarmServer(site, "localhost")
    async with server.running() as address:
        with pytest.raises(Unreachable, match="its certificate is for another address"):
            await ask(site.access(address))
        assert await ask(site.access(address.replace("127.0.0.1", "localhost"))) == address
    assert server.tokens == [f"Bearer {TOKEN}"]
