"""Random schedules of jobs and faults, bounded: fixed seeds, and one that changes each day."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.fault.engines import Engines, running_engines
from tests.fault.schedule import run

pytestmark = pytest.mark.slow(reason="runs a farm under random faults for several seconds")

ACTIONS, MOST_S = 25, 40.0
"""A number of actions, so that a schedule is the same on a busy machine; each of them has a limit of its own."""
TODAY = datetime.now(UTC).date().toordinal()


@pytest.fixture
def engines() -> Iterator[Engines]:
    with running_engines() as engines:
        yield engines


@pytest.mark.parametrize("seed", [1, TODAY])
async def test_no_schedule_loses_a_job_or_leaves_a_process(tmp_path: Path, seed: int) -> None:
    world = await run(tmp_path, seed, MOST_S, actions=ACTIONS, compiles=False)
    assert world.submitted, world.timeline


@pytest.mark.parametrize("seed", [1, TODAY])
async def test_no_schedule_of_two_servers_and_their_engines_loses_a_job(tmp_path: Path, engines: Engines, seed: int) -> None:
    world = await run(tmp_path, seed, MOST_S, actions=ACTIONS, compiles=False, engines=engines)
    assert world.submitted, world.timeline
