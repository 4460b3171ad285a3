"""Tokens, roles and TLS of real server processes, and configurations with which a server refuses to start."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import trustme

from etfarm.server.rpc.door.roles import ROLES
from etfarm.v1 import agent_pb2_grpc, common_pb2, device_pb2, farm_pb2
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error
from tests.support.contract import RPCS, WAIT_S, address_of, call
from tests.support.farm import Daemon, private_file, serve
from tests.support.farm_calls import FarmCalls
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.runner import know_own_runners
from tests.support.session_ends import Caller, Serving, session_on, welcomed

pytestmark = pytest.mark.slow(reason="starts a server for each kind of access")

LET_THROUGH_S = 10.0
"""Who waits for so long was not refused, which takes no time."""
ROLES_OF_PEOPLE = ("admin", "user", "agent", "viewer")
TOKENS = {role: f"token-of-the-{role}-0123456789" for role in ROLES_OF_PEOPLE}


class Guarded:
    """A server with TLS and tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ca = trustme.CA()
        certificate = ca.issue_cert("localhost", "127.0.0.1")
        self.ca, self.other_ca = folder / "ca.pem", folder / "other.pem"
        ca.cert_pem.write_to_path(self.ca)
        trustme.CA().cert_pem.write_to_path(self.other_ca)
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        (folder / "key.pem").chmod(0o600)
        certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        tokens = private_file(folder / "tokens", "".join(f"the-{role} {role} {token}\n" for role, token in TOKENS.items()))
        self.tls = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
        self.daemon = serve(folder, "--tokens", str(tokens), *self.tls)

    def channel(self, token: str = "", ca: Path | None = None) -> grpc.aio.Channel:
        return open_channel(Access(address_of(self.daemon), token, ca or self.ca))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    created = Guarded(tmp_path_factory.mktemp("guarded"))
    with created.daemon:
        yield created


async def outcomes(channel: grpc.aio.Channel) -> dict[str, EtfarmError | None]:
    """Return the status of each rpc of the contract for an empty request."""

    async def outcome(rpc: str) -> EtfarmError | None:
        try:
            # Recipes are asked of workers that may not be warm: who waits for them was let through.
            await call(channel, rpc, wait_s=LET_THROUGH_S if rpc == "CompileService.ListRecipes" else WAIT_S)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, server="here")
        return None

    async with asyncio.timeout(WAIT_S):
        return dict(zip(RPCS, await asyncio.gather(*map(outcome, RPCS)), strict=True))


@pytest.mark.remedy("UNAUTHENTICATED")
@pytest.mark.parametrize("token", ["", "of-nobody-0123456789", TOKENS["admin"] + "x"])
async def test_without_a_known_token_every_rpc_is_unauthenticated(guarded: Guarded, token: str) -> None:
    async with guarded.channel(token) as channel:
        answers = await outcomes(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    proof = answers.pop("FarmService.GetProof")
    assert proof is not None and proof.reason == "BAD_PROOF_REQUEST"
    for rpc, error in answers.items():
        assert error is not None, rpc
        assert (error.reason, error.kind, error.fault) == ("UNAUTHENTICATED", "UNAUTHENTICATED", "USER"), rpc
        assert "ETFARM_TOKEN" in error.remedy
    async with guarded.channel(TOKENS["admin"]) as channel:
        answers = await outcomes(channel)
    assert not any(error is not None and error.reason == "UNAUTHENTICATED" for error in answers.values())


@pytest.mark.parametrize("role", ROLES_OF_PEOPLE)
async def test_a_role_can_only_call_the_rpcs_of_the_table(guarded: Guarded, role: str) -> None:
    async with guarded.channel(TOKENS[role]) as channel:
        answers = await outcomes(channel)
    value = common_pb2.Role.Value(f"ROLE_{role.upper()}")
    for rpc, error in answers.items():
        allowed = value in ROLES[f"/etfarm.v1.{rpc.replace('.', '/')}"]
        reason = None if error is None else error.reason
        assert (reason == "PERMISSION_DENIED") != allowed, f"{role} calls {rpc}: {error}"
        assert reason not in ("UNAUTHENTICATED", "INTERNAL"), f"{role} calls {rpc}: {error}"
        if error is not None and not allowed:
            assert error.kind == "PERMISSION_DENIED"
            assert error.message.startswith(f"the-{role} is {role}, and this needs the role ")
            assert error.metadata == {"rpc": rpc, "role": role}


async def test_a_token_names_its_principal(guarded: Guarded) -> None:
    async with guarded.channel(TOKENS["viewer"]) as channel:
        (info,) = await call(channel, "FarmService.GetServerInfo", farm_pb2.GetServerInfoRequest())
    expected = common_pb2.Principal(name="the-viewer", role=common_pb2.ROLE_VIEWER, projects=["default"], project="default")
    assert info.principal == expected


@pytest.mark.parametrize("which", ["none", "another"])
async def test_a_client_without_the_ca_gets_an_error_with_what_to_check(guarded: Guarded, which: str) -> None:
    address = address_of(guarded.daemon)
    access = Access(address, TOKENS["admin"], guarded.other_ca if which == "another" else None)
    async with open_channel(access) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "FarmService.GetServerInfo")
    error = from_rpc_error(failed.value, server=address)
    assert error.reason == "SERVER_UNREACHABLE"
    assert error.message.startswith(f"The server at {address} does not answer: ")
    assert "\n" not in str(error)
    assert "--tls-ca" in error.remedy
    assert ("its certificate is not trusted (" in error.message) == (which == "another")


def run_command(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit code of a command and its stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ETFARM_", "GRPC_"))}
    done = subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", *arguments], env=kept | {"ETFARM_DATA": str(folder)} | environment,
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_command_reports_an_untrusted_server_in_a_single_line(guarded: Guarded, tmp_path: Path) -> None:
    address = address_of(guarded.daemon)
    asked = ("devices", "list", "--server", address, "--tls-ca", str(guarded.other_ca))
    code, text = run_command(tmp_path, *asked)
    assert code == 4
    assert text.startswith(f"etfarm: The server at {address} does not answer: its certificate is not trusted ("), text
    assert text.endswith("Give --tls-ca (or ETFARM_TLS_CA) the certificate of the authority that signed it.\n")
    assert text.count("\n") == 1, text
    # Who asks gRPC for its own words gets them too.
    assert "Handshake failed" in run_command(tmp_path, *asked, GRPC_VERBOSITY="INFO")[1]


def test_every_line_of_a_json_log_is_json_also_those_of_grpc(guarded: Guarded, tmp_path: Path) -> None:
    with serve(tmp_path, "--log-format", "json", *guarded.tls) as daemon:
        host, _, port = address_of(daemon).rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while plain.recv(4096):
                """Until the server closes the connection that is not TLS."""
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    (handshake,) = (line for line in lines if "Handshake failed" in line["message"])
    assert (handshake["logger"], handshake["level"]) == ("grpc", "info") and handshake["timestamp"].endswith("Z")


def test_an_agent_reports_an_untrusted_server_in_a_single_line(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    know_own_runners(tmp_path / "agent")
    with Daemon(
        ["agent", "--server", address_of(guarded.daemon), "--data", str(tmp_path / "agent"), "--exit-with-stdin",
         "--tls-ca", str(guarded.other_ca)],
        tmp_path / "log",
    ) as agent:  # fmt: skip
        until = time.monotonic() + WAIT_S
        while "Trying again." not in (text := agent.log.read_text()) and time.monotonic() < until:
            time.sleep(0.1)
    assert "does not answer: its certificate is not trusted (" in text
    assert text.count("\n") == 1, text


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices", "list", "--server", "127.0.0.1:1", "--tls-ca", "{none}"),
        ("agent", "--server", "127.0.0.1:1", "--tls-ca", "{none}"),
        ("serve", "--listen", "127.0.0.1:0", "--no-bundle", "--tls-cert", "{none}", "--tls-key", "{none}"),
        ("serve", "--listen", "127.0.0.1:0", "--no-bundle", "--tls-cert", "{missing}", "--tls-key", "{none}"),
    ],
)
def test_an_invalid_tls_file_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    none, missing = tmp_path / "none.py", tmp_path / "missing.pem"
    none.write_text("import npz\n")
    code, text = run_command(tmp_path, *(word.format(none=none, missing=missing) for word in arguments))
    assert code == 2, text
    expected = (
        f"{missing} cannot be read" if "{missing}" in arguments else f"etfarm: {none} holds no certificate (PEM). Check --tls-c"
    )
    assert expected in text
    assert text.count("\n") == 1, text


def ended(folder: Path, *arguments: str) -> Daemon:
    """Return a server that has ended with a usage error."""
    daemon = serve(folder, *arguments)
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(WAIT_S) == 2
    return daemon


def refused(folder: Path, *arguments: str) -> str:
    """Return the usage error of `etfarm serve` on stderr; the server must not have listened."""
    daemon = ended(folder, *arguments)
    with pytest.raises(AssertionError, match="it ended before"):
        daemon.expect("listening on")
    text = daemon.log.read_text()
    assert text.count("\n") == 1, text
    assert not (folder / "data" / "farm.sqlite").exists()
    return text


def test_a_public_address_without_tls_is_refused_before_it_is_bound(tmp_path: Path) -> None:
    assert refused(tmp_path, "--listen", "0.0.0.0:0") == (
        "etfarm: Other machines can reach 0.0.0.0:0, and it has no --tls-cert, no --tls-key, no --tokens. "
        "Give them (tokens in the database will do: `etfarm tokens init`), listen on 127.0.0.1, or pass --insecure if you trust "
        "everybody who can reach it.\n"
    )
    assert not (tmp_path / "data").exists()


def test_a_token_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann admin {TOKENS['admin']}\n")
    tokens.chmod(0o644)
    assert f"chmod 600 {tokens}" in refused(tmp_path, "--listen", "127.0.0.1:0", "--tokens", str(tokens))


def test_an_address_in_use_is_named(tmp_path: Path, guarded: Guarded) -> None:
    address = address_of(guarded.daemon)
    assert f"etfarm: Cannot listen on {address}" in ended(tmp_path, "--listen", address).log.read_text()


def test_a_stale_unix_socket_is_replaced_but_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("keep me")
    assert "Cannot listen on unix:" in ended(tmp_path, "--listen", f"unix:{path}").log.read_text()
    assert path.read_text() == "keep me"


async def test_a_killed_servers_children_end_and_its_socket_can_be_reused(tmp_path: Path) -> None:
    path = tmp_path / "farm.sock"
    arguments = ["serve", "--data", str(tmp_path / "data"), "--no-bundle", "--exit-with-stdin", "--listen", f"unix:{path}"]
    first, second = (Daemon(arguments, tmp_path / "log", executes=True) for _ in range(2))
    first.start()
    assert address_of(first) == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    children = psutil.Process(first.pid).children(recursive=True)
    assert any("etfarm.server.workers.child.forkserver" in " ".join(child.cmdline()) for child in children)
    descriptors = [os.pidfd_open(child.pid) for child in children]
    try:
        first.kill9()
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 30)[0], "a process outlived its server"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    with second:
        async with open_channel(Access(address_of(second))) as channel:
            (info,) = await call(channel, "FarmService.GetServerInfo")
        assert info.version


async def test_only_the_agent_of_a_sessions_device_can_serve_it(guarded: Guarded) -> None:
    runner = device_pb2.DeviceRunner(
        kind=common_pb2.RUNNER_KIND_PYTHON, executorch="1.5.1", backends=["XnnpackBackend"], operators=["aten::add.out"]
    )
    channels = [guarded.channel(TOKENS[role]) for role in ("user", "agent", "admin")]
    async with channels[0] as users, channels[1] as agents, channels[2] as admins:
        agent = await welcomed(agents, "alone", own_runners=[runner])
        caller = Caller(users, session_on(agent, await FarmCalls(users).put(program("add").bytes)))
        start = await agent.started()
        stranger = Serving(agent_pb2_grpc.AgentServiceStub(admins), start.attempt_id)
        assert (await refusal(stranger.stream.read())).reason == "NOT_YOURS"
        agent.serve(start)
        assert (await caller.event("ready")).ready.device.id == agent.devices[0].id
        caller.events.cancel()
        agent.stream.cancel()
