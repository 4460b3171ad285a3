"""Whose a tag is: who gave it first, whichever job it moves to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from etfarm.server.access.ownership import NotYours
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs.records.tags import MAX_TAGS, Tags, tags_of
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from tests.support.databases import new_database
from tests.support.golden import Golden
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

NOW = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    created = new_database(tmp_path / "farm.sqlite")
    await created.open()
    rows = [
        {"id": job, "number": number, "name": "", "owner": "ann", "request_id": job, "priority": 0, "spec": b"",
         "submitted_at": NOW, "last_sequence": 0}
        for number, job in enumerate(("one", "two"), 1)
    ]  # fmt: skip
    await created.write(lambda connection: connection.execute(schema.jobs.insert(), rows))
    yield created
    created.close()


async def of(database: Database, job_id: str) -> list[str]:
    return list(await database.read(lambda connection: tags_of(connection, job_id)))


async def test_a_tag_moves_only_by_its_owner_or_an_admin_and_stays_its_owners(database: Database) -> None:
    tags = Tags(database, lambda: NOW)
    assert await tags.put("baseline", "one", project="default", caller="ann", is_admin=False) == ""
    with pytest.raises(match="belongs to ann"):
        await tags.put("baseline", "two", project="default", caller="bob", is_admin=False)
    assert await of(database, "one") == ["baseline"]
    assert await tags.put("baseline", "two", project="default", caller="root", is_admin=True) == "one"
    assert (await of(database, "one"), await of(database, "two")) == ([], ["baseline"])
    assert await tags.put("baseline", "one", project="default", caller="ann", is_admin=False) == "two"


@pytest.mark.remedy("TAG_NOT_FOUND")
async def test_a_tag_is_taken_away_only_by_its_owner_or_an_admin(golden: Golden, database: Database) -> None:
    tags = Tags(database, lambda: NOW)
    await tags.put("baseline", "one", project="default", caller="ann", is_admin=False)
    with pytest.raises(NotYours):
        await tags.remove("baseline", "", scope=EVERYTHING, caller="bob", is_admin=False)
    with golden.refuses("TAG_NOT_FOUND"):
        await tags.remove("baseline", "two", scope=EVERYTHING, caller="ann", is_admin=False)
    assert await tags.remove("baseline", "", scope=EVERYTHING, caller="root", is_admin=True) == "one"
    with golden.refuses("TAG_NOT_FOUND"):
        await tags.remove("baseline", "", scope=EVERYTHING, caller="ann", is_admin=False)
    assert await tags.put("baseline", "two", project="default", caller="bob", is_admin=False) == ""


async def test_a_job_may_have_several_tags(database: Database) -> None:
    tags = Tags(database, lambda: NOW)
    for tag in ("v2", "baseline"):
        await tags.put(tag, "one", project="default", caller="ann", is_admin=False)
    assert await of(database, "one") == ["baseline", "v2"]


@pytest.mark.remedy("TOO_MANY_TAGS", "BAD_TAG")
async def test_a_job_may_not_have_any_number_of_tags(database: Database) -> None:
    tags = Tags(database, lambda: NOW)
    for number in range(MAX_TAGS):
        await tags.put(f"t{number:03}", "one", project="default", caller="ann", is_admin=False)
    with refuses("TOO_MANY_TAGS", match="has 100 tags"):
        await tags.put("one-more", "one", project="default", caller="ann", is_admin=False)
    with refuses("BAD_TAG"):
        await tags.put("one more", "one", project="default", caller="ann", is_admin=False)
    await tags.remove("t001", "one", scope=EVERYTHING, caller="ann", is_admin=False)
    await tags.put("one-more", "one", project="default", caller="ann", is_admin=False)
    await tags.put("t000", "one", project="default", caller="ann", is_admin=False)
    assert len(await of(database, "one")) == MAX_TAGS


async def test_another_projects_tag_is_free_here_and_cannot_be_taken_away(golden: Golden, database: Database) -> None:
    tags, audio = Tags(database, lambda: NOW), Scope(frozenset({"audio"}), "audio")
    await tags.put("baseline", "one", project="vision", caller="ann", is_admin=False)
    with golden.refuses("TAG_NOT_FOUND"):
        await tags.remove("baseline", "", scope=audio, caller="ann", is_admin=False)
    # Neither refused, which would tell that it exists, nor moved.
    assert await tags.put("baseline", "two", project="audio", caller="bob", is_admin=False) == ""
    assert (await of(database, "one"), await of(database, "two")) == (["baseline"], ["baseline"])
