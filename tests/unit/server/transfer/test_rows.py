"""Rows of a farm that are copied between SQLite and PostgreSQL: each value arrives, once, and what does not is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, func, insert, select, update

from etfarm.server.state import schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.transfer import rows
from etfarm.server.transfer.database import FarmDatabase, copy_rows
from etfarm.server.transfer.errors import RowRefused
from etfarm.server.transfer.rows import OnProgress
from tests.support.full_farm import COUNT, committed, contents, fill, new_farm
from tests.support.golden import Golden
from tests.support.refusals import refuses

MANY = 603
"""Number of rows of each table that take several batches."""


class Interrupted(Exception):
    """What ends a copy before its time."""


@pytest.fixture
def farm(tmp_path: Path) -> FarmDatabase:
    """A farm in SQLite."""
    return new_farm(tmp_path / "data")


@pytest.fixture
def large(tmp_path: Path) -> FarmDatabase:
    return new_farm(tmp_path / "large", count=MANY)


@pytest.fixture
def empty(tmp_path: Path, new_postgres: Callable[[], DatabaseUrl]) -> FarmDatabase:
    """A PostgreSQL database without tables."""
    return FarmDatabase(tmp_path / "nowhere.sqlite", new_postgres())


def copy(source: FarmDatabase, target: FarmDatabase, on_progress: OnProgress = lambda what, done, total: None) -> int:
    with source.connected() as connection, connection.begin():
        return copy_rows(connection, target, "the farm", on_progress)


def take(target: FarmDatabase) -> None:
    with target.connected() as connection:
        rows.finish(connection)


def interrupt_at(number: int) -> OnProgress:
    """Return a callback that interrupts the copy when so many rows, or more, are copied."""

    def on_progress(what: str, done: int, total: int) -> None:
        if done >= number:
            raise Interrupted

    return on_progress


def test_every_value_arrives_in_postgresql_and_comes_back(farm: FarmDatabase, empty: FarmDatabase, tmp_path: Path) -> None:
    before = contents(farm)
    assert all(len(before[table]) >= COUNT - 2 for table in before)
    assert copy(farm, empty) == sum(map(len, before.values()))
    take(empty)
    assert contents(empty) == before
    back = FarmDatabase(tmp_path / "back.sqlite")
    copy(empty, back)
    take(back)
    assert contents(back) == before


def test_new_rows_of_postgresql_are_numbered_behind_the_copied_ones(farm: FarmDatabase, empty: FarmDatabase) -> None:
    copy(farm, empty)
    take(empty)
    for table in (schema.audit, schema.deliveries, schema.health_events):
        with committed(empty) as connection:
            highest = connection.execute(select(func.max(table.c.number))).scalar_one()
            values = dict(connection.execute(select(table).limit(1)).one()._mapping)
            values |= {"event_id": "new"} if table is schema.deliveries else {}
            del values["number"]
            new = connection.execute(insert(table).values(values).returning(table.c.number)).scalar_one()
            assert new == highest + 1


def test_an_empty_farm_is_copied_and_numbers_its_first_row_1(tmp_path: Path, empty: FarmDatabase) -> None:
    source = FarmDatabase(tmp_path / "farm.sqlite")
    source.open()
    assert copy(source, empty) == 2, "the project of everybody, and the farm's id"
    take(empty)
    assert contents(empty) == contents(source)
    with committed(empty) as connection:
        assert connection.execute(select(func.nextval("audit_number_seq"))).scalar_one() == 1


@pytest.mark.slow(reason="copies large tables")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99, 1.0])
def test_an_interrupted_copy_goes_on_and_doubles_nothing(large: FarmDatabase, empty: FarmDatabase, share: float) -> None:
    total = sum(map(len, contents(large).values()))
    with pytest.raises(Interrupted):
        copy(large, empty, interrupt_at(round(share * total)))
    later = list[int]()
    copy(large, empty, lambda what, done, total: later.append(done) if what == "rows copied" else None)
    assert all(done >= share * total for done in later), "what was copied stays"
    take(empty)
    assert contents(empty) == contents(large)


def test_no_server_opens_a_database_with_an_unfinished_copy(farm: FarmDatabase, empty: FarmDatabase) -> None:
    with pytest.raises(Interrupted):
        copy(farm, empty, interrupt_at(1))

    with refuses("COPY_UNFINISHED", match="unfinished copy of the farm"):
        empty.open()
    copy(farm, empty)
    with refuses("COPY_UNFINISHED"):
        empty.open()
    take(empty)
    empty.open()


@pytest.mark.slow(reason="copies large tables")
def test_a_farm_that_ran_since_the_interruption_is_copied_anew(large: FarmDatabase, empty: FarmDatabase) -> None:
    with pytest.raises(Interrupted):
        copy(large, empty, interrupt_at(30 * MANY))
    with committed(large) as connection:
        connection.execute(update(schema.jobs).values(name="changed"))
        connection.execute(delete(schema.job_models))
        connection.execute(insert(schema.notify_secrets).values(project="new", secret="s", created_at=func.now()))
    copy(large, empty)
    take(empty)
    assert contents(empty) == contents(large)


def test_a_database_with_rows_and_one_with_another_copy_are_refused(farm: FarmDatabase, empty: FarmDatabase) -> None:
    empty.open()
    with committed(empty) as connection:
        connection.execute(insert(schema.trusted_times).values(name="clock", at=func.now()))
    with refuses("TARGET_NOT_EMPTY", match="'trusted_times' has rows"):
        copy(farm, empty)
    with committed(empty) as connection:
        connection.execute(delete(schema.trusted_times))
    with pytest.raises(Interrupted):
        copy(farm, empty, interrupt_at(1))
    with farm.connected() as connection, connection.begin(), refuses("COPY_UNFINISHED", match="of the farm"):
        copy_rows(connection, empty, "another farm", lambda what, done, total: None)


def test_a_row_that_changes_on_its_way_is_noticed(farm: FarmDatabase, empty: FarmDatabase, golden: Golden) -> None:
    def on_progress(what: str, done: int, total: int) -> None:
        if done == total and what == "rows copied":
            with committed(empty) as connection:
                connection.execute(update(schema.devices).where(schema.devices.c.id.contains("2")).values(body=b"rot"))

    with golden.refuses("COPY_DIFFERS", "'devices' has rows with other values"):
        copy(farm, empty, on_progress)


@pytest.mark.remedy("COPY_DIFFERS")
def test_a_row_that_goes_astray_is_noticed(farm: FarmDatabase, empty: FarmDatabase, golden: Golden) -> None:
    def on_progress(what: str, done: int, total: int) -> None:
        if done == total and what == "rows copied":
            with committed(empty) as connection:
                connection.execute(delete(schema.uses).where(schema.uses.c.id.contains("2")))

    with golden.refuses("COPY_DIFFERS", f"'uses' has {COUNT - 1} rows instead of {COUNT}"):
        copy(farm, empty, on_progress)
    copy(farm, empty)
    assert contents(empty) == contents(farm)


@pytest.mark.remedy("ROW_REFUSED")
def test_a_name_that_postgresql_cannot_index_is_named(farm: FarmDatabase, empty: FarmDatabase) -> None:
    name = random.Random(1).randbytes(5_000).hex()
    with committed(farm) as connection:
        connection.execute(
            insert(schema.job_models).values(job_id=select(schema.jobs.c.id).limit(1).scalar_subquery(), model=name)
        )
    with pytest.raises(RowRefused, match=r"'job_models'.*index row"):
        copy(farm, empty)
    with committed(farm) as connection:
        connection.execute(delete(schema.job_models).where(schema.job_models.c.model == name))
    copy(farm, empty)


def test_a_source_that_grows_meanwhile_is_copied_as_it_was_at_first(empty: FarmDatabase, tmp_path: Path) -> None:
    empty.open()
    with empty.connected() as connection:
        fill(connection)
    before = contents(empty)
    is_added = False

    def on_progress(what: str, done: int, total: int) -> None:
        nonlocal is_added
        if not is_added:
            is_added = True
            with committed(empty) as connection:
                connection.execute(insert(schema.trusted_times).values(name="later", at=func.now()))
                connection.execute(delete(schema.device_telemetry))

    target = FarmDatabase(tmp_path / "backup.sqlite")
    copy(empty, target, on_progress)
    take(target)
    assert contents(target) == before != contents(empty)
