"""Data sets and commands whose server is killed in the middle, and started again: they go on without their user."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from etfarm.client.transport.presence import AWAY, BACK
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="kills a server in the middle of a data set and of a run")

SAMPLES, KILLED_AT = 300, 40
ONES = np.ones((2, 3), np.float32)


def sums(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs of `add`: sample i gives i + 1 everywhere."""
    return [(ONES * number, ONES) for number in range(count)]


def test_a_data_set_goes_on_after_a_restart_of_the_server(breakable: FarmProcess) -> None:
    breakable.start()
    restarting = threading.Thread(target=breakable.restart)
    with breakable.client() as client:
        seen: list[int] = []
        for index, outputs in client.run_dataset(program("add").path, sums(SAMPLES)):
            assert (outputs[0] == index + 1).all()
            seen.append(index)
            if index == KILLED_AT:
                breakable.kill9()
                restarting.start()
        restarting.join()
    assert seen == list(range(SAMPLES))


async def test_a_command_goes_on_with_its_job_after_a_restart_of_the_server(breakable: FarmProcess, tmp_path: Path) -> None:
    await asyncio.to_thread(breakable.start)
    path = str(program("conv").path)
    command = ("bench", path, "--server", breakable.address, "--min-time", "3", "--threads", "1")
    running = asyncio.create_task(asyncio.to_thread(lambda: etfarm(*command, cwd=tmp_path)))
    with breakable.client() as client:
        assert await asyncio.to_thread(wait_until, lambda: any(job.state.value == "RUNNING" for job in client.jobs(1)))
    breakable.kill9()
    await asyncio.to_thread(wait_until, lambda: False, 2.0)
    await asyncio.to_thread(breakable.restart)
    done = await running
    assert done.returncode == 0, done.stderr
    assert (done.stderr.count(AWAY), done.stderr.count(BACK)) == (1, 1), done.stderr
