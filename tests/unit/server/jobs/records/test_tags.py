"""Whose a tag is: who gave it first, whichever job it moves to."""

from __future__ import annotations

import pytest

from etfarm.server.access.ownership import NotYours
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs.records.tags import MAX_TAGS, Tags, tags_of
from etfarm.server.state.engine import Database
from tests.support.golden import Golden
from tests.support.jobs import AT, JournalWorld
from tests.support.refusals import refuses


@pytest.fixture
async def tags(database: Database) -> Tags:
    for job in ("one", "two"):
        await JournalWorld(database).submit(job)
    return Tags(database, lambda: AT)


async def put(tags: Tags, tag: str, job: str, *, project: str = "default", caller: str = "ann", is_admin: bool = False) -> str:
    return await tags.put(tag, job, project=project, caller=caller, is_admin=is_admin)


async def remove(
    tags: Tags, tag: str, job: str = "", *, scope: Scope = EVERYTHING, caller: str = "ann", is_admin: bool = False
) -> str:
    return await tags.remove(tag, job, scope=scope, caller=caller, is_admin=is_admin)


async def of(database: Database, job_id: str) -> list[str]:
    return list(await database.read(lambda connection: tags_of(connection, job_id)))


async def test_a_tag_moves_only_by_its_owner_or_an_admin_and_stays_its_owners(tags: Tags, database: Database) -> None:
    assert await put(tags, "baseline", "one") == ""
    with pytest.raises(match="belongs to ann"):
        await put(tags, "baseline", "two", caller="bob")
    assert await of(database, "one") == ["baseline"]
    assert await put(tags, "baseline", "two", caller="root", is_admin=True) == "one"
    assert (await of(database, "one"), await of(database, "two")) == ([], ["baseline"])
    assert await put(tags, "baseline", "one") == "two"


@pytest.mark.remedy("TAG_NOT_FOUND", "NOT_YOURS")
async def test_a_tag_is_taken_away_only_by_its_owner_or_an_admin(golden: Golden, tags: Tags, database: Database) -> None:
    await put(tags, "baseline", "one")
    with pytest.raises(NotYours):
        await remove(tags, "baseline", caller="bob")
    with golden.refuses("TAG_NOT_FOUND"):
        await remove(tags, "baseline", "two")
    assert await remove(tags, "baseline", caller="root", is_admin=True) == "one"
    with golden.refuses("TAG_NOT_FOUND"):
        await remove(tags, "baseline")
    assert await put(tags, "baseline", "two", caller="bob") == ""


@pytest.mark.remedy("TOO_MANY_TAGS", "BAD_TAG")
async def test_a_job_may_not_have_any_number_of_tags(tags: Tags, database: Database) -> None:
    for number in range(MAX_TAGS):
        await put(tags, f"t{number:03}", "one")
    with refuses("TOO_MANY_TAGS", match="has 100 tags"):
        await put(tags, "one-more", "one")
    with refuses("BAD_TAG"):
        await put(tags, "one more", "one")
    await remove(tags, "t001", "one")
    await put(tags, "one-more", "one")
    await put(tags, "t000", "one")
    assert len(await of(database, "one")) == MAX_TAGS


async def test_another_projects_tag_is_free_here_and_cannot_be_taken_away(golden: Golden, tags: Tags, database: Database) -> None:
    audio = Scope(frozenset({"audio"}), "audio")
    await put(tags, "baseline", "one", project="vision")
    with golden.refuses("TAG_NOT_FOUND"):
        await remove(tags, "baseline", scope=audio)
    # Neither refused, which would tell that it exists, nor moved.
    assert await put(tags, "baseline", "two", project="audio", caller="bob") == ""
    assert (await of(database, "one"), await of(database, "two")) == (["baseline"], ["baseline"])
