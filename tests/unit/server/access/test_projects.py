"""Projects: who is a member of which, what a call's project is, and what the database keeps of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from etfarm.server.access.projects import (
    Projects,
    require_active,
)
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import ROLE_ADMIN, ROLE_AGENT, ROLE_USER, ROLE_VIEWER, Principal
from etfarm.wire.errors import Kind
from tests.support.golden import Golden
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

NOW = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
async def projects(database: Database) -> Projects:
    created = Projects(database, lambda: NOW)
    await created.load()
    return created


def seen(projects: Projects, name: str, role: int = ROLE_USER, requested: str = "") -> tuple[list[str], str]:
    """Return the projects that a principal sees, and the one of what it makes."""
    resolved = projects.resolve(Principal(name=name, role=role), requested)  # type: ignore[arg-type]
    assert (resolved.name, resolved.role) == (name, role)
    return list(resolved.projects), resolved.project


async def test_a_principal_without_projects_is_a_member_of_default_alone(projects: Projects) -> None:
    await projects.create("vision", ["ann"], None, by="root")
    assert seen(projects, "bob") == (["default"], "default")
    assert seen(projects, "ann") == seen(projects, "ann", ROLE_VIEWER) == (["vision"], "vision")
    await projects.remove_member("vision", "ann")
    assert seen(projects, "ann") == (["default"], "default")


@pytest.mark.remedy("PROJECT_AMBIGUOUS")
async def test_the_active_project_is_what_is_named_else_the_only_one_else_default(golden: Golden, projects: Projects) -> None:
    for name in ("vision", "audio"):
        await projects.create(name, ["ann", "bob"], None, by="root")
    await projects.add_member("default", "bob")
    assert seen(projects, "bob") == (["audio", "default", "vision"], "default")
    assert seen(projects, "bob", requested="audio") == (["audio", "default", "vision"], "audio")
    assert seen(projects, "ann") == (["audio", "vision"], "")
    assert seen(projects, "ann", requested="vision") == (["audio", "vision"], "vision")
    with golden.refuses("PROJECT_AMBIGUOUS") as refused:
        require_active(projects.resolve(Principal(name="ann", role=ROLE_USER)))
    assert refused.value.kind is Kind.FAILED_PRECONDITION
    assert refused.value.metadata["projects"] == "audio, vision"


@pytest.mark.remedy("PROJECT_NOT_FOUND")
async def test_another_project_is_refused_in_the_words_of_one_that_does_not_exist(projects: Projects) -> None:
    await projects.create("vision", ["ann"], None, by="root")
    sentences = []
    for requested in ("vision", "nothing", "default"):
        name = "bob" if requested != "default" else "ann"
        with refuses("PROJECT_NOT_FOUND") as refused:
            seen(projects, name, requested=requested)
        sentences.append(str(refused.value).replace(requested, "X"))
    assert len(set(sentences)) == 1
    (listed,), _ = seen(projects, "ann")
    assert seen(projects, "ann", requested=listed)[1] == "vision"


async def test_an_admin_names_any_project_that_exists_and_an_agent_has_none(projects: Projects) -> None:
    await projects.create("vision", [], None, by="root")
    assert seen(projects, "root", ROLE_ADMIN) == ([], "default")
    assert seen(projects, "root", ROLE_ADMIN, "vision") == ([], "vision")
    with refuses("PROJECT_NOT_FOUND"):
        seen(projects, "root", ROLE_ADMIN, "nothing")
    await projects.add_member("vision", "pi")
    assert seen(projects, "pi", ROLE_AGENT) == seen(projects, "pi", ROLE_AGENT, "nothing") == ([], "")


async def test_what_a_principal_claims_of_its_projects_counts_for_nothing(projects: Projects) -> None:
    claims = Principal(name="bob", role=ROLE_USER, projects=["vision"], project="vision")
    resolved = projects.resolve(claims)
    assert (list(resolved.projects), resolved.project) == (["default"], "default")


async def test_projects_and_members_are_there_after_a_restart(database: Database, projects: Projects) -> None:
    created = await projects.create("vision", ["bob", "ann", "bob"], 5 << 30, by="root")
    assert (created.members, created.storage_limit_bytes, created.created_by, created.created_at) == (
        ("ann", "bob"),
        5 << 30,
        "root",
        NOW,
    )
    again = Projects(database, lambda: NOW)
    await again.load()
    assert again.names() == ["default", "vision"]
    assert again.membership("ann") == {"vision"}
    assert (again.storage_limit_bytes("vision"), again.storage_limit_bytes("default")) == (5 << 30, None)
    await again.update("vision", None)
    assert again.storage_limit_bytes("vision") is None


@pytest.mark.parametrize("name", ["", "Vision", "a" * 65, "-a", "a b", "agent:pi", "vision/../x", "farm", "é", "a\n", ".hidden"])
async def test_an_invalid_or_taken_project_name_is_refused(projects: Projects, name: str) -> None:
    with refuses("BAD_PROJECT"):
        await projects.create(name, [], None, by="root")
    assert projects.names() == ["default"]


@pytest.mark.parametrize("member", ["", "a b", "a" * 201, "a\x00b", "tab\t"])
async def test_a_member_that_no_token_can_be_of_is_refused_and_nothing_is_made(projects: Projects, member: str) -> None:
    with refuses("BAD_PROJECT"):
        await projects.create("vision", ["ann", member], None, by="root")
    assert projects.names() == ["default"]
    with refuses("BAD_PROJECT"):
        await projects.add_member("default", member)


@pytest.mark.remedy("PROJECT_EXISTS", "BAD_PROJECT", "MEMBER_NOT_FOUND")
async def test_changes_of_what_is_not_there_are_refused(projects: Projects) -> None:
    await projects.create("vision", ["ann"], None, by="root")
    with refuses("PROJECT_EXISTS"):
        await projects.create("vision", ["bob"], None, by="root")
    with refuses("PROJECT_EXISTS"):
        await projects.create("default", [], None, by="root")
    for change in (projects.add_member("x", "ann"), projects.remove_member("x", "ann"), projects.update("x", 1)):
        with refuses("PROJECT_NOT_FOUND"):
            await change
    with refuses("MEMBER_NOT_FOUND"):
        await projects.remove_member("vision", "bob")
    for limit in (-1, 1 << 63):
        with refuses("BAD_PROJECT"):
            await projects.update("vision", limit)
    assert (await projects.get("vision")).members == ("ann",)
    await projects.create("audio", ["bob"], None, by="root")
    await projects.update("vision", 1)
    await projects.remove_member("vision", "ann")
    assert (await projects.get("vision")).members == ()


async def test_a_page_has_a_scopes_projects_with_what_they_hold(database: Database, projects: Projects) -> None:
    for name in ("a", "b", "c"):
        await projects.create(name, [], None, by="root")
    artifact = {"digest": "d", "size_bytes": 7, "owner": "ann", "stored_at": NOW}
    held = [{"holder": holder, "digest": "d", "owner": "ann", "held_at": NOW} for holder in ("a", "c", "agent:pi")]
    job = {
        "id": "j", "number": 1, "name": "", "owner": "ann", "request_id": "r", "priority": 0, "spec": b"", "submitted_at": NOW,
        "last_sequence": 0, "project": "c",
    }  # fmt: skip
    await database.write(lambda connection: connection.execute(schema.artifacts.insert(), [artifact]))
    await database.write(lambda connection: connection.execute(schema.holdings.insert(), held))
    await database.write(lambda connection: connection.execute(schema.jobs.insert(), [job]))
    page, following = await projects.page(EVERYTHING, "", 3)
    assert [(one.name, one.storage_bytes, one.live_jobs) for one in page] == [("a", 7, 0), ("b", 0, 0), ("c", 7, 1)]
    page, following = await projects.page(EVERYTHING, following, 3)
    assert ([one.name for one in page], following) == (["default"], "")
    page, following = await projects.page(Scope(frozenset({"b", "c"})), "b", 3)
    assert ([one.name for one in page], following) == (["c"], "")
