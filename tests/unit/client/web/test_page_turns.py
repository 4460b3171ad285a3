"""Turns of visitors: the pace of requests, fair slots, and refused sign-ins."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from etfarm.client.web.turns import FORGET_S, FREE_REFUSALS, MAX_OWNERS, REFUSAL_S, FairSlots, Pace, Refusals, TooManyRequests


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def settle() -> None:
    """Let every task do what it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_are_at_once_until_an_owner_is_too_early() -> None:
    clock = Clock()
    pace = Pace(10.0, 5, clock=clock)
    delays = [pace.delay_s("a") for _ in range(8)]
    assert delays == pytest.approx([0, 0, 0, 0, 0, 0, 0.1, 0.2])
    assert pace.delay_s("b") == 0
    clock.now_s += 10.0
    assert [pace.delay_s("a") for _ in range(7)] == pytest.approx([0, 0, 0, 0, 0, 0, 0.1])


def test_who_sends_one_request_after_the_other_is_never_refused() -> None:
    clock = Clock()
    pace = Pace(100.0, 500, clock=clock)
    connections = [clock.now_s] * 64
    for _ in range(5_000):
        turn = connections.index(min(connections))
        clock.now_s = max(clock.now_s, connections[turn])
        connections[turn] = clock.now_s + pace.delay_s("address")
    assert clock.now_s - 1000.0 == pytest.approx(45.0, abs=1.0)


def test_what_would_wait_too_long_is_refused_and_not_counted() -> None:
    clock = Clock()
    pace = Pace(10.0, 5, clock=clock)
    for _ in range(15):
        last_s = pace.delay_s("a")
    assert last_s == pytest.approx(0.9)
    clock.now_s -= 0.05
    for _ in range(1_000):
        with pytest.raises(TooManyRequests):
            pace.delay_s("a")
    clock.now_s += 0.35
    assert pace.delay_s("a") == pytest.approx(0.7)


def test_owners_are_bounded() -> None:
    pace, refusals = Pace(1.0, 1), Refusals()
    for number in range(MAX_OWNERS + 100):
        pace.delay_s(str(number))
        refusals.delay_s(str(number))
    assert len(pace._next_s) == len(refusals._last) == MAX_OWNERS


async def test_a_free_slot_goes_to_the_owner_that_holds_the_fewest() -> None:
    slots = FairSlots(3, 2, 8, "downloads")
    order: list[str] = []

    async def use(owner: str) -> None:
        await slots.acquire(owner, 60.0)
        order.append(owner)

    waiting = [asyncio.create_task(use(owner)) for owner in ("a", "a", "a", "a", "b", "c", "c")]
    await settle()
    assert order == ["a", "a", "b"]
    for released in ("a", "b", "a", "c"):
        slots.release(released)
        await settle()
    assert order == ["a", "a", "b", "c", "a", "a", "c"]
    await asyncio.gather(*waiting)


@pytest.mark.remedy("TOO_MANY_REQUESTS")
async def test_an_owner_has_no_more_slots_than_its_share() -> None:
    slots = FairSlots(4, 2, 8, "downloads")
    for _ in range(2):
        await slots.acquire("a", 60.0)
    with pytest.raises(TooManyRequests, match="Too many downloads"):
        await slots.acquire("a", 0.01)
    async with slots.take("b", 0.01):
        pass
    slots.release("a")
    await slots.acquire("a", 0.01)


async def test_visitors_behind_an_unknown_proxy_are_not_one_owner() -> None:
    slots = FairSlots(3, 1, 2, "sign-ins")
    waiting = [asyncio.create_task(slots.acquire(owner, 60.0)) for owner in ("a", "a", *[""] * 6)]
    await settle()
    assert [each.done() for each in waiting] == [True, False, True, True, *[False] * 4], "nobody is refused"
    slots.release("")
    await settle()
    assert waiting[4].done() and not waiting[1].done()
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_cancelled_callers_leave_their_slots() -> None:
    slots = FairSlots(1, 1, 1, "downloads")
    await slots.acquire("a", 60.0)
    waiting = asyncio.create_task(slots.acquire("b", 60.0))
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await slots.acquire("b", 60.0)
    slots.release("a")  # b has its turn, and is cancelled before it knows
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
        slots.release("b")
    async with slots.take("c", 0.01):
        pass
    assert (slots._free, slots._held, slots._waiting) == (1, {}, [])


def test_refusals_take_their_time_after_some() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    assert [refusals.delay_s("a") for _ in range(FREE_REFUSALS + 2)] == [0.0] * FREE_REFUSALS + [REFUSAL_S] * 2
    assert refusals.delay_s("b") == 0.0
    clock.now_s += FORGET_S + 1
    assert refusals.delay_s("a") == 0.0
