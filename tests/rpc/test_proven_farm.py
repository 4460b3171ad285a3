"""An agent whose farm moves to another port, name, list of servers or certificate, and servers that are not of its farm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from etfarm.client import AsyncFarm, Progress
from etfarm.server.backup.backup import back_up
from etfarm.server.backup.restore import restore
from etfarm.v1 import agent_pb2, agent_pb2_grpc, common_pb2, token_pb2, token_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from tests.support.databases import TEMPLATE, PostgresDatabases
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.fake_servers import serving
from tests.support.farm import START_S, Daemon, private_file, serve
from tests.support.programs import program
from tests.support.runner import know_own_runners
from tests.support.servers import Servers

pytestmark = pytest.mark.slow(reason="starts servers and agents that enrol")

ADMIN = "token-of-root-0123456789"


class Home:
    """The data of a farm, with an authority that signs its servers' certificates."""

    def __init__(self, folder: Path, authority: trustme.CA | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.data, self.ca = folder / "data", folder / "ca.pem"
        self.authority = authority or trustme.CA()
        self.authority.cert_pem.write_to_path(self.ca)
        self.tokens = private_file(folder / "tokens", f"root admin {ADMIN}\n")
        self.renew()

    def renew(self) -> None:
        """Replace the server's certificate, which is for both names of loopback."""
        certificate = self.authority.issue_cert("localhost", "127.0.0.1")
        key = self.folder / "key.pem"
        key.unlink(missing_ok=True)
        key.touch(mode=0o600)
        certificate.private_key_pem.write_to_path(key)
        chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
        (self.folder / "cert.pem").write_bytes(chain)

    @property
    def tls(self) -> tuple[str, ...]:
        """The options that name the server's certificate."""
        return "--tls-cert", str(self.folder / "cert.pem"), "--tls-key", str(self.folder / "key.pem")

    @contextmanager
    def serving(self, *, address: str = "127.0.0.1:0", tls: bool = True) -> Iterator[str]:
        """Run a server of the farm for the time of a block; yield the address that it listens on."""
        # Of two --data, the last one counts: a farm may have been restored elsewhere.
        options = ("--listen", address, "--data", str(self.data), "--tokens", str(self.tokens), *(self.tls if tls else ()))
        with serve(self.folder, *options) as daemon:
            yield daemon.expect("listening on").rpartition(" ")[2]
        assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()

    async def enrolment_token(self, address: str, *, tls: bool = True) -> str:
        async with open_channel(Access(address, ADMIN, self.ca if tls else None)) as channel:
            request = token_pb2.CreateTokenRequest(principal="board", role=common_pb2.ROLE_AGENT, enrolment=True)
            return (await token_pb2_grpc.TokenServiceStub(channel).Create(request)).secret

    async def connected(self, address: str) -> int:
        """Return how many agents are connected."""
        async with open_channel(Access(address, ADMIN, self.ca)) as channel:
            listed = await agent_pb2_grpc.AgentServiceStub(channel).ListAgents(agent_pb2.ListAgentsRequest())
        return sum(agent.connected for agent in listed.agents)


class Board:
    """An agent that is started with one address after the other."""

    def __init__(self, folder: Path, ca: Path | None) -> None:
        self.folder, self.ca = folder, ca
        folder.mkdir(exist_ok=True)
        know_own_runners(folder / "agent")

    @property
    def kept(self) -> dict[str, str]:
        """What its data folder has of its token."""
        return json.loads((self.folder / "agent" / "token").read_text())

    def keep(self, **changes: str) -> None:
        """Write that, without fields whose value is empty."""
        path = self.folder / "agent" / "token"
        path.write_text(json.dumps({name: value for name, value in (self.kept | changes).items() if value}))

    def _daemon(self, address: str, token: str) -> Daemon:
        tls = ["--tls-ca", str(self.ca)] if self.ca is not None else []
        return Daemon(
            ["agent", "--server", address, "--data", str(self.folder / "agent"), "--name", "board", "--exit-with-stdin", *tls],
            self.folder / "agent.log", {"ETFARM_TOKEN": token},
        )  # fmt: skip

    @asynccontextmanager
    async def connected(self, address: str, token: str = "") -> AsyncIterator[Daemon]:
        """Run the agent, which connects, for the time of a block."""
        daemon = self._daemon(address, token)
        await asyncio.to_thread(daemon.start)
        try:
            await asyncio.to_thread(daemon.expect, "connected to")
            yield daemon
        finally:
            assert await asyncio.to_thread(daemon.stop) == 0

    async def refused(self, address: str, token: str = "") -> str:
        """Run the agent, which ends by itself; return what it has logged."""
        (self.folder / "agent.log").unlink(missing_ok=True)
        daemon = self._daemon(address, token)
        await asyncio.to_thread(daemon.start)
        assert daemon.process is not None
        try:
            assert await asyncio.to_thread(daemon.process.wait, START_S) == 1
        finally:
            await asyncio.to_thread(daemon.stop)
        return daemon.log.read_text()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "farm")


@pytest.fixture
async def board(home: Home, tmp_path: Path) -> Board:
    """An agent that has enrolled at the farm and was stopped, as the farm's server was."""
    created = Board(tmp_path / "board", home.ca)
    with home.serving() as address:
        async with created.connected(address, await home.enrolment_token(address)):
            assert await home.connected(address) == 1
    assert created.kept["server"] == address and created.kept["farm_id"]
    return created


async def test_an_agent_follows_its_farm_to_another_port_another_name_and_a_renewed_certificate(home: Home, board: Board) -> None:
    token, former = board.kept["token"], board.kept["server"]
    home.renew()
    with home.serving() as address:
        named = f"localhost:{address.rpartition(':')[2]}"
        for server in (address, named, f"{named},{address}"):
            async with board.connected(server) as agent:
                assert await home.connected(address) == 1
                assert f"connected to {server} as board" in agent.lines[-1]
            assert board.kept["server"] == server and board.kept["token"] == token
    log = (board.folder / "agent.log").read_text()
    assert f"the server at {address} has proven to be of this agent's farm, which was at {former} before" in log


async def test_an_agent_stays_when_its_server_starts_again_with_a_renewed_certificate(home: Home, board: Board) -> None:
    address = board.kept["server"]
    async with AsyncExitStack() as running:
        with home.serving(address=address):
            agent = await running.enter_async_context(board.connected(address))
        home.renew()
        with home.serving(address=address):
            await asyncio.to_thread(agent.expect, "connected to")
            assert await home.connected(address) == 1


async def test_a_token_of_before_is_bound_to_the_farm_where_it_connects_first(home: Home, board: Board) -> None:
    former, farm_id = board.kept["server"], board.kept["farm_id"]
    board.keep(farm_id="")
    with home.serving() as address:
        # Nothing says yet that the farm has moved.
        logged = await board.refused(address)
        assert f"This agent's token is for the server at {former}, and was not sent to {address}" in logged
    assert f"Start it once with --server {former}" in logged
    with home.serving(address=former):
        async with board.connected(former):
            pass
    assert board.kept["farm_id"] == farm_id
    with home.serving() as address:
        async with board.connected(address):
            pass


@pytest.mark.remedy("TOKEN_WITHHELD")
async def test_without_tls_a_token_stays_with_its_address_and_the_refusal_says_so(home: Home, tmp_path: Path) -> None:
    board = Board(tmp_path / "board", None)
    with home.serving(tls=False) as former:
        async with board.connected(former, one_time := await home.enrolment_token(former, tls=False)):
            pass
        async with board.connected(former):
            pass
    assert board.kept["farm_id"]
    with home.serving(tls=False) as address:
        for token in ("", one_time):
            logged = await board.refused(address, token)
            assert f"and was not sent to {address}: without TLS, nothing proves that the same farm is there." in logged
    # The remedy: with TLS, it is the same farm.
    with home.serving() as address:
        board.ca = home.ca
        async with board.connected(address):
            pass


@pytest.mark.remedy("FARM_NOT_PROVEN")
async def test_another_farm_at_the_address_is_named_as_such_without_tls(home: Home, tmp_path: Path) -> None:
    board = Board(tmp_path / "board", None)
    with home.serving(tls=False) as address:
        async with board.connected(address, await home.enrolment_token(address, tls=False)):
            pass
    other = Home(tmp_path / "other")
    with other.serving(tls=False, address=address):
        logged = await board.refused(address)
        assert f"The server at {address} is of another farm than this agent, whose token it does not know." in logged
        # The remedy: it enrols there.
        async with board.connected(address, await other.enrolment_token(address, tls=False)):
            pass


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server with a certificate of its own that passes every call on to another one, and records its metadata.

    Args:
        knows_proof: whether it passes on GetProof; otherwise it claims not to have the method.
    """

    def __init__(self, home: Home, target: str, ca: Path, *, knows_proof: bool = True) -> None:
        self._target = Access(target, tls_ca=ca)
        self._knows_proof = knows_proof
        self.calls: list[tuple[str, dict[str, Any]]] = []
        certificate = home.authority.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
        self._credentials = grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain)])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with serving(self, credentials=self._credentials) as address:
            yield address

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def pass_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            metadata = dict(context.invocation_metadata())
            self.calls.append((details.method, metadata))
            if not self._knows_proof and details.method.endswith("GetProof"):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED)
            sent = [(name, value) for name, value in metadata.items() if name.startswith(("authorization", "etfarm-"))]
            async with open_channel(self._target) as channel:
                async for answer in channel.stream_stream(details.method)(requests, metadata=sent):
                    yield answer

        return grpc.stream_stream_rpc_method_handler(pass_on)


async def test_the_relay_of_these_tests_passes_calls_on(home: Home, board: Board) -> None:
    with home.serving() as address:
        async with Relay(home, address, home.ca).running() as relayed:
            access = Access(relayed, ADMIN, home.ca)
            async with open_channel(access) as channel:
                await agent_pb2_grpc.AgentServiceStub(channel).ListAgents(agent_pb2.ListAgentsRequest())


@pytest.mark.parametrize("knows_proof", [True, False])
async def test_a_relay_with_a_certificate_of_its_own_gets_no_token(home: Home, board: Board, *, knows_proof: bool) -> None:
    with home.serving() as address:
        relay = Relay(home, address, home.ca, knows_proof=knows_proof)
        async with relay.running() as relayed:
            logged = await board.refused(relayed)
            # Also not where the board was before.
            board.keep(server=relayed)
            await board.refused(relayed)
    assert "this agent's token, which was not sent" in logged
    assert [method.rpartition("/")[2] for method, _ in relay.calls] == ["GetProof"] * len(relay.calls) and relay.calls
    assert all("authorization" not in metadata for _, metadata in relay.calls)


async def test_somebody_elses_farm_gets_no_token_and_the_board_can_enrol_there(home: Home, board: Board) -> None:
    other = Home(board.folder / "other", home.authority)
    with other.serving() as address:
        relay = Relay(home, address, home.ca)
        async with relay.running() as relayed:
            logged = await board.refused(relayed)
        assert f"The server at {relayed} is of another farm than this agent" in logged
        assert relay.calls and all("authorization" not in metadata for _, metadata in relay.calls)
        async with board.connected(address, await other.enrolment_token(address)):
            assert await other.connected(address) == 1


async def test_a_board_does_not_follow_a_copy_of_its_farm_that_was_not_meant_to_replace_it(home: Home, board: Board) -> None:
    await asyncio.to_thread(back_up, home.data, backup := board.folder / "backup")
    for keeps in (False, True):
        home.data = board.folder / f"restored-{keeps}"
        await asyncio.to_thread(restore, backup, home.data, keep_identity=keeps)
        with home.serving() as address:
            if keeps:
                async with board.connected(address):
                    assert await home.connected(address) == 1
                continue
            logged = await board.refused(address)
            assert f"The server at {address} is of a farm that was restored from a backup of this agent's farm" in logged


async def test_a_revoked_token_is_not_sent_and_named(home: Home, board: Board) -> None:
    with home.serving() as address:
        async with open_channel(Access(address, ADMIN, home.ca)) as channel:
            tokens = token_pb2_grpc.TokenServiceStub(channel)
            listed = (await tokens.List(token_pb2.ListTokensRequest())).tokens
            for token in listed:
                if token.agent_id and not token.enrolment:
                    await tokens.Revoke(token_pb2.RevokeTokenRequest(id=token.id))
        logged = await board.refused(address)
        assert (
            "the token was revoked, as of a board that was retired, or something between them has a certificate of its own."
            in logged
        )


@pytest.fixture
async def two(postgres_databases: PostgresDatabases, tmp_path: Path, home: Home) -> AsyncIterator[Servers]:
    """Two servers of one farm, each with a certificate of its own."""
    (tmp_path / "servers").mkdir()
    with postgres_databases.server.new_database(TEMPLATE) as url, Servers(tmp_path / "servers", url) as servers:
        for each in (home, Home(tmp_path / "second", home.authority)):
            await asyncio.to_thread(servers.add, "--tokens", str(each.tokens), *each.tls)
        yield servers


async def test_each_server_of_a_farm_proves_itself_and_an_agent_goes_from_one_to_the_other(
    two: Servers, home: Home, tmp_path: Path
) -> None:
    leader, standby = two.servers
    board = Board(tmp_path / "board", home.ca)
    async with board.connected(leader.address, await home.enrolment_token(leader.address)):
        pass
    async with board.connected(standby.address):
        assert await home.connected(leader.address) == 1
    async with board.connected(two.addresses) as agent:
        await asyncio.to_thread(leader.kill9)
        await asyncio.to_thread(agent.expect, "connected to")
        assert await home.connected(standby.address) == 1


async def test_a_result_reaches_a_server_that_was_away_when_its_attempt_began(two: Servers, home: Home, tmp_path: Path) -> None:
    leader, other = two.servers
    board = Board(tmp_path / "board", home.ca)
    await asyncio.to_thread(other.kill9)
    async with (
        board.connected(two.addresses, await home.enrolment_token(leader.address)),
        AsyncFarm(two.addresses, token=ADMIN, tls_ca=home.ca) as farm,
    ):
        job = await farm.bench(program("add").path, warmup=1, min_time_s=10.0)
        async for event in job.watch():
            if isinstance(event, Progress) and event.phase == "TIMED":
                break
        await asyncio.to_thread(other.start)
        await asyncio.to_thread(leader.kill9)
        async with asyncio.timeout(240):
            (report,) = (await job.result()).reports
        assert report.error is None and report.state == "SUCCEEDED"
