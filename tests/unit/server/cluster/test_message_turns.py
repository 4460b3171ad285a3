"""Turns of callers to have a message in a standby."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from etfarm.server.cluster.forwarding import ALL, AT_ONCE, SLOW, Turns
from tests.support.refusals import refuses

LONG_S = 3600.0
"""Longer than the test."""


async def hold(turns: Turns, owner: str, number: int, account: str = "") -> tuple[list[asyncio.Event], list[asyncio.Task[None]]]:
    """Let so many messages of an owner come; return an event for each that has its turn, and the tasks."""
    began = [asyncio.Event() for _ in range(number)]

    async def receive(event: asyncio.Event) -> None:
        async with turns.take(owner, account):
            event.set()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(receive(event)) for event in began]
    await asyncio.sleep(0)
    return began, tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def count(events: list[asyncio.Event]) -> int:
    return sum(event.is_set() for event in events)


async def test_an_owner_has_few_messages_at_a_time_and_does_not_delay_others() -> None:
    turns = Turns(LONG_S)
    began, tasks = await hold(turns, "a", AT_ONCE + 3)
    assert count(began) == AT_ONCE
    async with turns.take("b"):
        pass
    tasks[0].cancel()
    await began[AT_ONCE].wait()
    assert count(began) == AT_ONCE + 1
    await end(tasks)
    async with AsyncExitStack() as stack:
        for _ in range(AT_ONCE):
            await stack.enter_async_context(turns.take("a"))


async def test_a_few_slow_messages_lend_their_turns() -> None:
    turns = Turns(0.0)
    began, tasks = await hold(turns, "a", AT_ONCE + SLOW + 3)
    await asyncio.gather(*(event.wait() for event in began[: AT_ONCE + SLOW]))
    for _ in range(100):
        await asyncio.sleep(0)
    assert count(began) == AT_ONCE + SLOW
    await end(tasks)
    again, more = await hold(turns, "a", AT_ONCE)
    assert count(again) == AT_ONCE
    await end(more)


async def test_all_owners_together_have_a_bound() -> None:
    turns = Turns(LONG_S)
    held = [await hold(turns, f"owner {number}", 1) for number in range(ALL + 1)]
    assert sum(count(began) for began, _ in held) == ALL
    await end(held[0][1])
    await held[-1][0][0].wait()
    for _, tasks in held:
        await end(tasks)


async def test_an_account_with_many_addresses_leaves_turns_to_others() -> None:
    turns = Turns(LONG_S)
    held = [await hold(turns, f"address {number} of ann", AT_ONCE, "ann") for number in range(ALL)]
    assert sum(count(began) for began, _ in held) == ALL // 2
    began, tasks = await hold(turns, "address of bob", AT_ONCE, "bob")
    assert count(began) == AT_ONCE
    await end(tasks)
    more = [await hold(turns, f"address {number} of bob", AT_ONCE, "bob") for number in range(ALL)]
    assert sum(count(began) for began, _ in more) == ALL // 4
    for name in ("cid", "dan", "eve"):
        began, tasks = await hold(turns, name, 1)
        assert count(began) == 1, name
        more.append((began, tasks))
    for _, tasks in (*held, *more):
        await end(tasks)
    async with turns.take("a"):
        pass


@pytest.mark.remedy("MESSAGE_OVERDUE")
async def test_a_message_that_does_not_arrive_is_given_up() -> None:
    turns = Turns(LONG_S, limit_s=0.0)
    with refuses("MESSAGE_OVERDUE"):
        async with turns.take("a"):
            await asyncio.Event().wait()
    async with Turns(LONG_S, limit_s=LONG_S).take("a"):
        await asyncio.sleep(0)  # it arrives in time
