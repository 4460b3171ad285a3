"""A token is revoked by its id, or by a name that it alone has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from etfarm.server.access.tokens import TokenTable, key_of
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import ROLE_AGENT, ROLE_USER
from tests.support.golden import Golden
from tests.support.refusals import refuses


class Clock:
    def __init__(self) -> None:
        self.at = datetime(2026, 6, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock, database: Database) -> TokenTable:
    return TokenTable(database, clock)


async def test_tokens_that_are_of_no_use_do_not_make_a_name_ambiguous(tokens: TokenTable, clock: Clock) -> None:
    revoked, _ = await tokens.create("rack", ROLE_AGENT, by="root")
    await tokens.revoke(revoked.id)
    await tokens.create("rack", ROLE_AGENT, by="root", lifetime_s=60)
    clock.at += timedelta(seconds=61)
    _, secret = await tokens.create("rack", ROLE_AGENT, by="root", enrolment=True)
    enrolment = tokens.find(key_of(secret))
    assert enrolment is not None
    own = key_of(await tokens.enroll(enrolment, "a1", is_known=False))
    ended = await tokens.revoke("rack")
    assert (ended.agent_id, ended.enrolment) == ("a1", False) and tokens.find(own) is None


@pytest.mark.remedy("TOKEN_AMBIGUOUS")
async def test_a_name_with_several_usable_tokens_is_refused_with_their_ids(tokens: TokenTable) -> None:
    created = [(await tokens.create("bob", ROLE_USER, by="root"))[0] for _ in range(2)]
    with refuses("TOKEN_AMBIGUOUS") as refused:
        await tokens.revoke("bob")
    assert sorted(token.id for token in created) == str(refused.value.metadata["tokens"]).split()
    assert all(token.id in refused.value.message for token in created)
    await tokens.revoke(created[0].id)
    assert (await tokens.revoke("bob")).id == created[1].id


@pytest.mark.remedy("TOKEN_NOT_FOUND")
async def test_a_name_without_a_usable_token_is_refused(golden: Golden, tokens: TokenTable) -> None:
    await tokens.create("someone", ROLE_USER, by="root")
    with golden.refuses("TOKEN_NOT_FOUND"):
        await tokens.revoke("no-one")
    (listed,) = await tokens.list(9, 0)
    assert (await tokens.revoke(listed.principal)).id == listed.id
