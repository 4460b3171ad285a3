"""Screening by digest: once each, in threads of its own, and nothing is remembered of what failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etfarm.server.compile import upload_screening
from etfarm.server.compile.screening import screen
from etfarm.server.compile.screening.errors import UnsafeModel
from etfarm.server.compile.upload_screening import Screening


class Gate:
    """A screen that holds its threads until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.looked: list[str] = []
        self.error: Exception | None = None

    def look(self, path: Path, allowed: frozenset[str] | None = None) -> None:
        self.looked.append(path.name)
        self.entered.release()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    created = Gate()
    monkeypatch.setattr(screen, "screen_upload", created.look)
    monkeypatch.setattr(screen, "screen_pte", created.look)
    return created


@pytest.fixture
async def screened(gate: Gate) -> AsyncIterator[Screening]:
    created = Screening(Path)
    yield created
    gate.open.set()
    created.close()


async def test_submissions_of_the_same_file_screen_it_once(screened: Screening, gate: Gate) -> None:
    waiting = [asyncio.create_task(screened.screen_pt2("same")) for _ in range(20)]
    await asyncio.to_thread(gate.entered.acquire)
    gate.open.set()
    await asyncio.gather(*waiting)
    await screened.screen_pt2("same")
    assert gate.looked == ["same"]


async def test_a_file_that_failed_is_screened_again(screened: Screening, gate: Gate) -> None:
    gate.open.set()
    gate.error = UnsafeModel("X", "it", "is evil")
    for _ in range(2):
        with pytest.raises(UnsafeModel):
            await screened.screen_pt2("bad")
    gate.error = None
    await screened.screen_pt2("bad")
    assert gate.looked == ["bad", "bad", "bad"]


async def test_a_caller_that_goes_away_leaves_the_others_their_answer(screened: Screening, gate: Gate) -> None:
    gone, stays = (asyncio.create_task(screened.screen_pt2("same")) for _ in range(2))
    await asyncio.to_thread(gate.entered.acquire)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    gate.open.set()
    await stays
    assert gate.looked == ["same"]


async def test_a_project_does_not_wait_for_all_files_of_another(screened: Screening, gate: Gate) -> None:
    many = [asyncio.create_task(screened.screen_pt2(f"a{index}", "a")) for index in range(50)]
    for _ in range(upload_screening.THREADS):
        await asyncio.to_thread(gate.entered.acquire)
    one = asyncio.create_task(screened.screen_pt2("b", "b"))
    shared = asyncio.create_task(screened.screen_pt2("a49", "b"))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(one, shared)
    before = [name for name in gate.looked if name.startswith("a") and gate.looked.index(name) < gate.looked.index("b")]
    assert len(before) == upload_screening.THREADS
    assert gate.looked.index("a49") < 2 * upload_screening.THREADS + 2, "nor for the other's turn with a file of both"
    await asyncio.gather(*many)
    assert sorted(gate.looked) == sorted([*(f"a{index}" for index in range(50)), "b"])


async def test_files_that_take_for_ever_take_no_thread_of_others(screened: Screening, gate: Gate) -> None:
    waiting = [asyncio.create_task(screened.screen_pt2(f"slow{index}")) for index in range(50)]
    for _ in range(upload_screening.THREADS):
        await asyncio.to_thread(gate.entered.acquire)
    # What the transfers and the store use is free, and no third screen has begun.
    assert await asyncio.gather(*(asyncio.to_thread(int, str(index)) for index in range(100))) == list(range(100))
    assert len(gate.looked) == upload_screening.THREADS
    gate.open.set()
    await asyncio.gather(*waiting)


async def test_what_passed_is_remembered_up_to_a_bound(screened: Screening, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_screening, "MAX_KEPT", 2)
    gate.open.set()
    for name in ("a", "b", "c", "c", "a"):
        await screened.screen_pt2(name)
    assert gate.looked == ["a", "b", "c", "a"]
