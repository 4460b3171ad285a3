"""Which principal's token may connect as which agent, over restarts of the server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from etfarm.server.access import identities
from etfarm.server.access.identities import Identities, Identity
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import Principal, Role
from tests.support.golden import Golden
from tests.support.refusals import refuses

ADMIN = Principal(name="root", role=Role.ROLE_ADMIN)
RACK = Principal(name="rack", role=Role.ROLE_AGENT)
DESK = Principal(name="desk", role=Role.ROLE_AGENT)


def of(database: Database, *known: str) -> Identities:
    return Identities(database, lambda agent_id: agent_id in known, lambda: datetime(2026, 1, 2, tzinfo=UTC))


@pytest.mark.remedy("AGENT_NOT_YOURS")
async def test_a_new_identity_is_bound_for_good_to_the_first_principal_that_connects(database: Database) -> None:
    before = of(database)
    await before.admit("a1", RACK)
    await before.admit("a1", RACK)
    with refuses("AGENT_NOT_YOURS"):
        await before.admit("a1", DESK)
    after = of(database, "a1")
    await after.load()
    assert after.principal_of("a1") == "rack"
    with refuses("AGENT_NOT_YOURS"):
        await after.admit("a1", DESK)
    await after.bind("a1", "desk", by="root")
    await after.admit("a1", DESK)


@pytest.mark.remedy("AGENT_UNBOUND")
async def test_an_identity_from_before_bindings_is_bound_by_an_admin_and_not_by_its_first_connection(
    golden: Golden,
    database: Database,
) -> None:
    farm = of(database, "old")
    with refuses("AGENT_UNBOUND"):
        await farm.admit("old", RACK)
    for _ in range(2):
        with golden.refuses("AGENT_UNBOUND"):
            await farm.admit("old", DESK)
    assert farm.list({"old": []}) == [Identity("old", "", "desk")]
    await farm.bind("old", "rack", by="root")
    assert farm.list({}) == [Identity("old", "rack")]
    await farm.admit("old", RACK)
    with refuses("AGENT_NOT_YOURS"):
        await farm.admit("old", DESK)


async def test_a_token_of_one_agent_serves_as_no_other(golden: Golden, database: Database) -> None:
    farm = of(database)
    enrolled = Principal(name="rack", role=Role.ROLE_AGENT, agent_id="a1")
    await farm.admit("a1", enrolled)
    with golden.refuses("AGENT_NOT_YOURS"):
        await farm.admit("a2", enrolled)


async def test_an_admin_connects_as_any_agent_and_binds_none(database: Database) -> None:
    farm = of(database, "old")
    await farm.admit("old", ADMIN)
    await farm.admit("new", ADMIN)
    assert [farm.principal_of(agent_id) for agent_id in ("old", "new")] == ["", ""]


@pytest.mark.remedy("AGENT_NOT_FOUND")
async def test_nothing_is_bound_to_an_agent_that_never_was(database: Database) -> None:
    farm = of(database, "type")
    with refuses("AGENT_NOT_FOUND"):
        await farm.bind("typo", "rack", by="root")
    (listed,) = farm.list({"type": []})
    await farm.bind(listed.agent_id, "rack", by="root")


async def test_refusals_are_remembered_within_bounds(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "MAX_REFUSED", 3)
    farm = of(database, *map(str, range(10)))
    for number in range(10):
        with refuses("AGENT_UNBOUND"):
            await farm.admit(str(number), DESK)
    assert [identity.agent_id for identity in farm.list({})] == ["7", "8", "9"]


async def test_two_that_claim_a_new_identity_at_once_are_not_both_admitted(database: Database) -> None:
    farm = of(database)
    outcomes = await asyncio.gather(farm.admit("a1", RACK), farm.admit("a1", DESK), return_exceptions=True)
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [None, "AGENT_NOT_YOURS"]
    assert farm.principal_of("a1") == "rack"


@pytest.mark.remedy("TOO_MANY_AGENTS")
async def test_one_token_claims_a_bounded_number_of_identities(
    golden: Golden, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "MAX_IDENTITIES", 2)
    farm = of(database)
    for agent_id in ("a1", "a2", "a1"):
        await farm.admit(agent_id, RACK)
    with golden.refuses("TOO_MANY_AGENTS"):
        await farm.admit("a3", RACK)
    await farm.admit("a3", DESK)
