"""The farm's tokens as a standby reads them from the database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from etfarm.server.access.tokens import Credential, Unauthenticated, key_of
from etfarm.server.cluster import lease
from etfarm.server.cluster.known_tokens import KnownTokens, StandbyAuthentication
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.v1.common_pb2 import Principal, Role
from etfarm.wire.farm_proof import hint_of
from tests.support.databases import TEMPLATE, PostgresDatabases
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.waiting import becomes

WAIT_S = 60.0


@pytest.fixture
def url(postgres_databases: PostgresDatabases) -> Iterator[str]:
    server, name = postgres_databases.server, f"tokens_{uuid.uuid4().hex}"
    server.execute("CREATE DATABASE {} TEMPLATE {}", name, TEMPLATE)
    yield server.url(name)
    server.execute("DROP DATABASE {} WITH (FORCE)", name)


def insert(url: str, secret: str, role: str = "user", author: str = "created_by") -> None:
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO tokens (id, principal, role, secret_hash, enrolment, created_at, "
            f"{author}) VALUES (%s, %s, %s, %s, false, now(), 'x')".encode(),
            [secret, f"owner of {secret}", role, key_of(secret)],
        )


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statement.encode())


@asynccontextmanager
async def following(url: str) -> AsyncIterator[KnownTokens]:
    known = KnownTokens(DatabaseUrl.parse(url))
    task = asyncio.create_task(known.follow())
    try:
        yield known
    finally:
        task.cancel()
        await asyncio.wait({task})


def credential_of(known: KnownTokens, secret: str) -> Credential:
    credential = known.find(key_of(secret))
    assert credential is not None
    return credential


async def test_a_change_of_the_table_is_known(url: str, tmp_path: Path) -> None:
    async with following(url) as known:
        authentication = StandbyAuthentication(None, known, tmp_path / "changed")
        assert authentication.asks_for_tokens, "the tokens are not known yet"
        await becomes(known.loaded.is_set)
        assert not authentication.asks_for_tokens
        insert(url, "first")
        await becomes(lambda: known.find(key_of("first")) is not None)
        assert authentication.asks_for_tokens
        credential = authentication.authenticate("Bearer first")
        assert (credential.principal.name, credential.principal.role) == ("owner of first", Role.ROLE_USER)
        for header in (None, "Bearer other"):
            with pytest.raises(Unauthenticated):
                authentication.authenticate(header)
        insert(url, "second")
        execute(url, f"UPDATE tokens SET secret_hash = '\\x{key_of('third').hex()}' WHERE id = 'second'")
        await becomes(lambda: known.find(key_of("third")) is not None)
        by_word = Credential(key_of("third"), "", Principal(name="x"))
        assert authentication.is_valid(credential_of(known, "third")) and authentication.is_valid(by_word)
        execute(url, "UPDATE tokens SET expires_at = now() AT TIME ZONE 'UTC' WHERE id = 'second'")
        await becomes(lambda: not authentication.is_valid(credential_of(known, "third")))
        assert not authentication.is_valid(by_word)
        execute(url, "UPDATE tokens SET revoked_at = now()")
        await becomes(lambda: known.find(key_of("first")) is None)
        assert known.is_former(key_of("first")) and known.is_former(key_of("third"))
        assert not known.is_empty, "revoked tokens do not open the server"


async def test_tables_of_other_versions_are_read_as_far_as_they_are_known(url: str) -> None:
    execute(url, "ALTER TABLE tokens ADD COLUMN later integer; ALTER TABLE tokens RENAME COLUMN created_by TO author")
    insert(url, "known", "viewer", "author")
    insert(url, "later", "auditor", "author")
    async with following(url) as known:
        await becomes(known.loaded.is_set)
        assert known.find(key_of("known")) is not None and known.find(key_of("later")) is None
        assert not known.is_empty


async def test_without_the_table_callers_need_no_token(url: str) -> None:
    execute(url, "ALTER TABLE tokens RENAME TO former_tokens")
    async with following(url) as known:
        await becomes(known.loaded.is_set)
        assert known.is_empty
        known.note_refusal()
        assert not known.is_empty, "the leader has a token file"


async def lead(url: str, *, asks_for_tokens: bool) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as session:
        await lease.create_tables(session)
        taken = await lease.take(session, "a", "farm-a:7433", "1", "", asks_for_tokens=asks_for_tokens)
        assert taken is not None
        await lease.release(session, taken.token)


async def test_a_token_file_of_the_leader_alone_is_known_from_the_start(url: str, tmp_path: Path) -> None:
    await lead(url, asks_for_tokens=True)
    async with following(url) as known:
        authentication = StandbyAuthentication(None, known, tmp_path / "changed")
        await becomes(known.loaded.is_set)
        assert authentication.asks_for_tokens
        for header in (None, "Bearer known-to-the-leader-only"):
            with pytest.raises(Unauthenticated):
                authentication.authenticate(header)
        await lead(url, asks_for_tokens=False)
        await becomes(lambda: not authentication.asks_for_tokens)
        await lead(url, asks_for_tokens=True)
        await becomes(lambda: authentication.asks_for_tokens)


async def test_the_table_of_an_older_version_gets_the_column(url: str) -> None:
    await lead(url, asks_for_tokens=False)
    execute(url, "ALTER TABLE etfarm_cluster.lease DROP COLUMN asks_for_tokens")
    async with following(url) as known:
        await becomes(known.loaded.is_set)
        assert known.is_empty
        await lead(url, asks_for_tokens=True)
        await becomes(lambda: not known.is_empty)


async def test_while_the_table_cannot_be_read_no_caller_is_admitted_without_the_leader(
    url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(url, "ALTER TABLE tokens RENAME COLUMN role TO roles")
    async with following(url) as known:
        await becomes(lambda: "cannot be read" in (text := capsys.readouterr()).out + text.err + caplog.text)
        assert not known.loaded.is_set() and not known.is_empty
        execute(url, "ALTER TABLE tokens RENAME COLUMN roles TO role")
        await becomes(known.loaded.is_set)
        assert known.is_empty


async def test_a_standby_knows_the_farm_and_finds_agents_own_tokens_by_their_hints(url: str) -> None:
    async with following(url) as known:
        await asyncio.wait_for(known.loaded.wait(), WAIT_S)
        await becomes(lambda: bool(known.farm_id))
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT id FROM farm").fetchall() == [(known.farm_id,)]
        insert(url, "of-an-agent", "agent")
        insert(url, "of-a-user")
        execute(url, "UPDATE tokens SET agent_id = 'an-agent' WHERE role = 'agent'")
        await becomes(lambda: known.key_of_hint(hint_of(key_of("of-an-agent"))) == key_of("of-an-agent"))
        assert known.key_of_hint(hint_of(key_of("of-a-user"))) is None
        execute(url, "UPDATE tokens SET revoked_at = now() WHERE role = 'agent'")
        await becomes(lambda: known.key_of_hint(hint_of(key_of("of-an-agent"))) is None)


async def test_a_standby_proves_nothing_while_an_older_version_leads(url: str) -> None:
    execute(url, "DROP TABLE farm")
    async with following(url) as known:
        insert(url, "of-an-agent", "agent")
        await becomes(lambda: known.find(key_of("of-an-agent")) is not None)
        assert known.farm_id == ""
        execute(url, "CREATE TABLE farm (id text PRIMARY KEY)")
        execute(url, "INSERT INTO farm VALUES ('migrated')")
        await becomes(lambda: known.farm_id == "migrated")
