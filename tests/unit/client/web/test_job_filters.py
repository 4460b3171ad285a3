"""The conditions of a list of jobs."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta

import pytest
from starlette.datastructures import QueryParams

from etfarm.client.web.job_filters import JobFilters
from tests.support.refusals import refuses

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def filters(**query: str) -> JobFilters:
    return JobFilters.from_query(QueryParams(query))


def test_an_address_without_conditions_filters_nothing() -> None:
    empty = filters(page="token", other="x")
    assert empty.query == {}
    assert empty.command == "etfarm jobs list"
    assert not any(empty.conditions(NOW).values())


def test_conditions_are_those_of_the_command() -> None:
    chosen = filters(name="it's; rm", state="failed", label="team=vision", since="2d", model=" m ")
    assert shlex.split(chosen.command) == [
        "etfarm", "jobs", "list", "--name", "it's; rm", "--model", "m", "--state", "failed", "--label", "team=vision", "--since",
        "2d",
    ]  # fmt: skip
    assert chosen.conditions(NOW) == {
        "name": "it's; rm", "owner": "", "model": "m", "states": ["FAILED"], "labels": {"team": "vision"},
        "since": NOW - timedelta(days=2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("90m", NOW - timedelta(minutes=90)),
        ("1w", NOW - timedelta(weeks=1)),
        ("2026-05-01", datetime(2026, 5, 1, tzinfo=UTC)),
        ("2026-05-01T10:00:00+02:00", datetime(2026, 5, 1, 8, tzinfo=UTC)),
    ],
)
def test_since_is_a_duration_or_a_time(text: str, start: datetime) -> None:
    assert filters(since=text).conditions(NOW)["since"] == start


@pytest.mark.parametrize("query", [{"since": "yesterday"}, {"since": "999999w"}, {"label": "team"}, {"label": "=x"}])
def test_a_condition_that_cannot_be_read_says_what_to_write(query: dict[str, str]) -> None:
    with refuses("BAD_OPTION", match=next(iter(query))) as caught:
        filters(**query).conditions(NOW)
    assert caught.value.remedy.startswith("Write for example")
