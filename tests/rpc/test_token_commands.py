"""`etfarm tokens` and `etfarm audit` as commands against a real server, from the first admin's token on."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psycopg
import pytest

from etfarm.server.config import Config
from etfarm.v1 import agent_pb2, agent_pb2_grpc
from etfarm.wire.channel import parse_address
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.contract import WAIT_S, address_of
from tests.support.databases import PostgresDatabases
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.farm import serve
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="starts servers, and each command is a process")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETFARM_")}
    return subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", *arguments], env=kept | environment,
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


class Farm:
    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.daemon = serve(folder)

    def __call__(self, token: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, "--server", address_of(self.daemon), ETFARM_TOKEN=token)


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    created = Farm(tmp_path)
    with created.daemon:
        yield created


def test_from_the_first_admin_to_a_revoked_user(farm: Farm, tmp_path: Path) -> None:
    assert farm("", "devices", "list").returncode == 0, "without a token everybody is local"
    refused = farm("", "tokens", "create", "bob")
    assert refused.returncode == 2
    assert "The first token must be an admin's" in refused.stderr
    created = run("tokens", "init", "ann", "--data", str(farm.data))
    assert created.returncode == 0, created.stderr
    ann = created.stdout.strip()
    assert re.fullmatch(r"etf_[A-Za-z0-9_-]{43}", ann)
    until = time.monotonic() + WAIT_S
    while farm("", "devices", "list").returncode == 0:  # until the running server has seen it
        assert time.monotonic() < until
    listed = farm(ann, "tokens", "list")
    assert listed.returncode == 0, listed.stderr
    assert "ann" in listed.stdout and "admin" in listed.stdout and ann not in listed.stdout
    document = tmp_path / "bob.json"
    created = farm(ann, "tokens", "create", "bob", "--expires", "30d", "--json", str(document))
    bob = created.stdout.strip()
    assert created.returncode == 0 and bob not in created.stderr
    token = json.loads(document.read_text())
    assert (token["principal"], token["role"], token["secret"], token["state"]) == ("bob", "user", bob, "valid")
    assert document.stat().st_mode & 0o077 == 0
    assert farm(bob, "devices", "list").returncode == 0
    assert "bob is user, and this needs the role admin." in farm(bob, "tokens", "list").stderr
    fresh = farm(bob, "tokens", "rotate").stdout.strip()
    assert fresh.startswith("etf_") and fresh != bob
    assert farm(bob, "devices", "list").returncode != 0
    assert farm(fresh, "devices", "list").returncode == 0
    agent = farm(ann, "tokens", "create", "board-7", "--agent")
    assert agent.stdout.startswith("etfe_") and "for one enrolment" in agent.stderr
    revoked = farm(ann, "tokens", "revoke", token["id"])
    assert revoked.stdout == f"Revoked: {token['id']} of bob (user).\n"
    assert farm(fresh, "devices", "list").returncode != 0
    tokens = json.loads(farm(ann, "tokens", "list", "--json", "-").stdout)["tokens"]
    states = {each["principal"]: each["state"] for each in tokens}
    assert states == {"ann": "valid", "bob": "revoked", "board-7": "valid"}
    entries = json.loads(farm(ann, "audit", "--json", "-").stdout)["audit"]
    assert ["TokenService.Create", "OK"] in [[entry["action"], entry["outcome"]] for entry in entries]
    assert {"TokenService.Revoke", "TokenService.Rotate"} <= {entry["action"] for entry in entries}
    assert "UNAUTHENTICATED" in {entry["outcome"] for entry in entries}
    only = farm(ann, "audit", "--principal", "bob", "--action", "TokenService.Rotate")
    assert only.stdout.count("TokenService.Rotate") == 1 and ann not in only.stdout


def test_used_one_time_tokens_are_listed_on_request_and_a_name_is_revoked(farm: Farm, tmp_path: Path) -> None:
    ann = run("tokens", "init", "ann", "--data", str(farm.data)).stdout.strip()
    until = time.monotonic() + WAIT_S
    while farm("", "devices", "list").returncode == 0:  # until the running server has seen it
        assert time.monotonic() < until
    one_time = farm(ann, "tokens", "create", "rack", "--agent").stdout.strip()
    with grpc.insecure_channel(address_of(farm.daemon)) as channel:
        request = agent_pb2.EnrollAgentRequest(protocol_version=PROTOCOL_VERSION, agent_id="a1")
        agent_pb2_grpc.AgentServiceStub(channel).Enroll(request, metadata=[("authorization", f"Bearer {one_time}")])
    listed = farm(ann, "tokens", "list")
    assert "enrolment" not in listed.stdout and "1 used one-time token: --all lists it, too." in listed.stdout
    assert "used" in farm(ann, "tokens", "list", "--all").stdout.split()
    tokens = json.loads(farm(ann, "tokens", "list", "--json", "-").stdout)["tokens"]
    own = next(token for token in tokens if token["principal"] == "rack")
    assert farm(ann, "tokens", "revoke", "rack").stdout == f"Revoked: {own['id']} of rack (agent).\n"
    ids = [json.loads(farm(ann, "tokens", "create", "bob", "--json", "-").stdout)["id"] for _ in range(2)]
    refused = farm(ann, "tokens", "revoke", "bob")
    assert refused.returncode == 2
    assert refused.stderr == f"etfarm: bob has 2 usable tokens: {', '.join(sorted(ids))}. Give the id of one.\n"
    assert farm(ann, "tokens", "revoke", ids[0]).returncode == farm(ann, "tokens", "revoke", "bob").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", "bob", "--expires", "soon"], "--expires requires a duration, got 'soon'."),
        (["create", "bob", "--role", "king"], "--role must be admin, user, viewer or agent, got 'king'."),
        (["create", "bob", "--role", "user", "--agent"], "--agent requires the role agent, got --role user."),
    ],
)
def test_an_invalid_command_is_refused_before_any_rpc(arguments: list[str], says: str) -> None:
    done = run("tokens", *arguments, "--server", "127.0.0.1:1")
    assert done.returncode == 2
    assert says in done.stderr


def test_tokens_in_the_database_suffice_for_a_public_address(tmp_path: Path) -> None:
    config = Config(listen=parse_address("0.0.0.0:0"), data=tmp_path / "data")
    with refuses("EXPOSED", match="no --tokens"):
        config.check()
    created = run("tokens", "init", "ann", "--data", str(tmp_path / "data"))
    assert created.returncode == 0, created.stderr
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    with refuses("EXPOSED") as exposed:
        config.check()
    assert "--tokens" not in str(exposed.value) and "no --tls-cert" in str(exposed.value)
    # Revoking the last one does not open the farm.
    with sqlite3.connect(tmp_path / "data" / "farm.sqlite") as database:
        database.execute("UPDATE tokens SET revoked_at = '2026-01-01 00:00:00'")
    database.close()
    with refuses("EXPOSED") as exposed:
        config.check()
    assert "--tokens" not in str(exposed.value)


@pytest.mark.remedy("ADMIN_EXISTS")
def test_a_second_admin_is_created_on_purpose_only(tmp_path: Path) -> None:
    init = ("tokens", "init", "--data", str(tmp_path / "data"))
    assert run(*init, "ann").returncode == 0
    refused = run(*init, "bob")
    assert refused.returncode == 1 and refused.stdout == ""
    assert "The farm has an admin already: ann." in refused.stderr and "--another" in refused.stderr
    created = run(*init, "bob", "--another")
    assert created.returncode == 0 and created.stdout.startswith("etf_")
    assert "2 admins already: ann, bob." in run(*init, "carl").stderr
    # Tokens that are no longer valid are no obstacle.
    with sqlite3.connect(tmp_path / "data" / "farm.sqlite") as database:
        database.execute("UPDATE tokens SET revoked_at = '2026-01-01 00:00:00' WHERE principal = 'ann'")
        database.execute("UPDATE tokens SET expires_at = '2026-01-01 00:00:00' WHERE principal = 'bob'")
    database.close()
    assert run(*init, "carl").returncode == 0


@pytest.mark.parametrize("of", ["--database", "--config", "ETFARM_SERVE_DATABASE", "a secret"])
def test_a_token_by_the_command_of_the_unit_is_in_the_database_that_the_server_reads(
    tmp_path: Path, postgres_databases: PostgresDatabases, of: str
) -> None:
    url = postgres_databases.url(tmp_path / "farm.sqlite").text
    options, environment = ["--data", str(tmp_path / "data"), "--print-unit"], {}
    if of == "--database":
        options += [of, url]
    elif of == "--config":
        (tmp_path / "farm.toml").write_text(f'database = "{url}"\n')
        options += [of, str(tmp_path / "farm.toml")]
    else:
        environment["ETFARM_SERVE_DATABASE"] = f"{url}&password=a-secret" if of == "a secret" else url
    shown = run("serve", *options, **environment)
    assert shown.returncode == 0 and "a-secret" not in shown.stdout, shown.stderr
    (line,) = (line for line in shown.stdout.splitlines() if " tokens init ann " in line)
    words = shlex.split(line.removeprefix("#   "))
    if of == "a secret":  # which systemd adds to the environment
        assert words[:2] == ["sudo", "systemd-run"] and "--property=EnvironmentFile=/etc/etfarm/server.env" in words
    else:
        assert words[:3] == ["sudo", "-u", "etfarm"]
        environment = {}
    created = run(*words[words.index("tokens") :], **environment)
    assert created.returncode == 0, created.stderr
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT principal, role FROM tokens").fetchall() == [("ann", "admin")]
    postgres_databases.release()
