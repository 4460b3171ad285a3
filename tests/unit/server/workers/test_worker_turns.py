"""Slots of children: projects hold them equally long."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.server.workers import fair_slots
from etfarm.server.workers.fair_slots import FairSlots


class Queue:
    """Children that hold a slot until they are ended. Those with a `!` are urgent."""

    def __init__(self, slots: int, reserved: int = 0) -> None:
        self.now_s = 0.0
        self.turns = FairSlots(slots, reserved, clock=lambda: self.now_s)
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *names: str) -> None:
        """Ask for a slot for each; the first letter is the project."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        async with self.turns.take(name[0], urgent=name.endswith("!")):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def end(self, name: str) -> list[str]:
        """Return who runs then."""
        self._ends[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)
        return self.running

    async def cancel(self, name: str) -> list[str]:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await asyncio.sleep(0)
        return self.running


async def test_a_long_queue_does_not_precede_later_callers() -> None:
    queue = Queue(1)
    await queue.add("a1", "a2", "a3", "a4", "b1", "b2")
    assert queue.running == ["a1"]
    order = [queue.running[0]]
    while queue.running:
        order += await queue.end(queue.running[0])
    assert order == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_the_queue_with_fewer_slots_is_next() -> None:
    queue = Queue(2)
    await queue.add("a1", "a2", "a3", "b1", "b2")
    assert sorted(await queue.end("a1")) == ["a2", "b1"]
    assert sorted(await queue.end("a2")) == ["a3", "b1"]
    assert sorted(await queue.end("b1")) == ["a3", "b2"]


async def test_a_cancelled_caller_keeps_no_slot() -> None:
    queue = Queue(1)
    await queue.add("a1", "a2", "b1")
    assert await queue.cancel("a2") == ["a1"]
    assert await queue.cancel("a1") == ["b1"]
    assert await queue.end("b1") == []
    await queue.add("c1")
    assert queue.running == ["c1"]
    await queue.end("c1")


async def test_a_slot_granted_to_a_caller_that_is_just_cancelled_is_passed_on() -> None:
    queue = Queue(1)
    await queue.add("a1", "b1", "c1")
    queue._ends["a1"].set()
    await asyncio.sleep(0)  # a1 gives its slot back: b1 has it, and has not run since
    await queue.cancel("b1")
    assert queue.running == ["c1"]
    await queue.end("c1")


async def test_a_caller_cancelled_while_a_slot_becomes_free_ends_as_cancelled() -> None:
    for waiting in (["b1"], ["b1", "b2"], ["b1!"]):
        queue = Queue(1)
        await queue.add("a1", *waiting)
        queue._ends["a1"].set()
        queue._tasks[waiting[0]].cancel()  # a1 gives its slot back before b1 notices that it is cancelled
        await asyncio.wait([queue._tasks[waiting[0]]])
        assert queue._tasks[waiting[0]].cancelled()
        await asyncio.sleep(0)
        assert queue.running == waiting[1:]


async def test_an_analysis_starts_beside_a_compilation_and_before_the_next() -> None:
    queue = Queue(2, reserved=1)
    await queue.add("a1", "a2", "b1")
    assert queue.running == ["a1"], "the other slot is for urgent ones"
    await queue.add("a3!", "b4!")
    assert queue.running == ["a1", "a3!"]
    assert await queue.end("a1") == ["a3!", "b4!"], "the analysis that waits goes first"
    assert await queue.end("a3!") == ["b4!"], "no compilation starts while an analysis runs"
    assert await queue.end("b4!") == ["a2"]
    assert await queue.end("a2") == ["b1"]


async def test_an_urgent_one_that_is_cancelled_takes_no_slot_along() -> None:
    queue = Queue(2, reserved=1)
    await queue.add("a1!", "a2!", "a3!", "b1")
    assert await queue.cancel("a3!") == ["a1!", "a2!"]
    assert await queue.cancel("a2!") == ["a1!"]
    assert await queue.cancel("a1!") == ["b1"]


async def test_analyses_without_end_do_not_keep_a_compilation_from_its_turn() -> None:
    queue = Queue(2, reserved=1)
    names = [f"{number:x}!" for number in range(16)]
    await queue.add(*names[:2], "c", *names[2:])
    order = list(queue.running)
    while queue.running:
        before = queue.running[0]
        order += [name for name in await queue.end(before) if name not in order]
    assert sorted(order) == sorted([*names, "c"])
    assert order.index("c") == 2 + fair_slots._MOST_AHEAD


async def test_analyses_beside_a_compilation_do_not_wait_for_the_next() -> None:
    queue = Queue(2, reserved=1)
    await queue.add("a", "b")
    for number in range(2 * fair_slots._MOST_AHEAD):
        await queue.add(name := f"{number:x}!")
        assert queue.running == ["a", name]
        await queue.end(name)
    assert await queue.end("a") == ["b"]


async def test_analyses_go_on_when_the_compilation_that_they_wait_for_is_cancelled() -> None:
    queue = Queue(2, reserved=1)
    names = [f"{number:x}!" for number in range(14)]
    await queue.add(*names[:2], "c", *names[2:])
    while len(queue.running) == 2:
        await queue.end(queue.running[0])
    (last,) = queue.running
    await queue.cancel("c")
    assert last in queue.running and len(queue.running) == 2
    while queue.running:
        await queue.end(queue.running[0])


async def test_more_slots_are_handed_out_at_once_and_fewer_as_their_holders_end() -> None:
    queue = Queue(1, reserved=1)
    await queue.add("a1", "a2", "a3")
    assert queue.running == []
    queue.turns.resize(3)
    await asyncio.sleep(0)
    assert queue.running == ["a1", "a2"]
    queue.turns.resize(2)
    assert await queue.end("a1") == ["a2"]
    assert await queue.end("a2") == ["a3"]
    await queue.add("a4")
    queue.turns.resize(1)
    assert await queue.end("a3") == []
    await queue.add("b1!")
    assert queue.running == ["b1!"]
    queue.turns.resize(2)
    await asyncio.sleep(0)
    assert queue.running == ["b1!"]  # nothing else starts beside an urgent one
    queue.turns.resize(3)
    await asyncio.sleep(0)
    assert queue.running == ["b1!", "a4"]


class Farm:
    """Slots in simulated time, for tasks whose times are known."""

    def __init__(self, slots: int) -> None:
        self.queue = Queue(slots)
        self.used_s: Counter[str] = Counter()
        self.starts: dict[str, int] = {}
        """The start of each running task."""
        self._added = 0

    async def add(self, project: str, task_s: int, count: int = 1) -> None:
        for _ in range(count):
            self._added += 1
            await self.queue.add(f"{project} {task_s} {self._added}")

    async def run(self, until_s: int) -> list[str]:
        """Let time pass; return the projects in the order in which their tasks started."""
        order = self._started()
        while (name := min(self.starts, key=self._end, default=None)) is not None and self._end(name) <= until_s:
            self.queue.now_s = self._end(name)
            self.used_s[name[0]] += self._end(name) - self.starts.pop(name)
            await self.queue.end(name)
            order += self._started()
        self.queue.now_s = until_s
        return order

    async def stop(self) -> None:
        for task in self.queue._tasks.values():
            task.cancel()
        await asyncio.wait(self.queue._tasks.values())

    def _end(self, name: str) -> int:
        return self.starts[name] + int(name.split()[1])

    def _started(self) -> list[str]:
        new = [name for name in self.queue.running if name not in self.starts]
        self.starts.update(dict.fromkeys(new, int(self.queue.now_s)))
        return [name[0] for name in new]


async def test_a_project_that_comes_waits_for_one_task_of_each_other_at_most() -> None:
    farm = Farm(1)
    await farm.add("a", 900, 5)
    await farm.run(450)
    await farm.add("b", 900, 5)
    await farm.run(600)
    await farm.add("c", 1, 1)
    assert await farm.run(2700) == ["b", "c", "a"]
    await farm.stop()


async def test_a_project_alone_uses_all_slots_and_others_get_theirs_before_it_gets_a_second_one() -> None:
    farm = Farm(2)
    await farm.add("a", 900, 5)
    assert await farm.run(10) == ["a", "a"]
    await farm.add("b", 900, 2)
    await farm.add("c", 900, 2)
    assert await farm.run(900) == ["b", "c"]
    await farm.stop()


async def test_use_without_competition_does_not_count_later() -> None:
    farm = Farm(2)
    await farm.add("a", 100, 300)
    await farm.run(9_950)
    await farm.add("b", 100, 200)
    order = await farm.run(11_950)
    assert 18 <= order.count("a") <= 20 and 18 <= order.count("b") <= 20
    await farm.stop()


async def test_a_project_that_was_away_has_saved_nothing() -> None:
    farm = Farm(1)
    await farm.add("b", 10)
    await farm.add("a", 10, 1_000)
    await farm.run(5_000)
    await farm.add("b", 10, 1_000)
    order = await farm.run(6_000)
    assert 48 <= order.count("b") <= 52
    await farm.stop()


async def test_slot_time_that_a_project_makes_up_for_is_bounded() -> None:
    farm = Farm(8)
    await farm.add("a", 5_000, 8)
    await farm.run(1)
    for project in "bcdefghi":
        await farm.add(project, 100, 30)
    await farm.add("a", 100, 10)
    await farm.run(4_999)
    order = await farm.run(7_000)
    assert order.index("a") == 8 * 9  # not 8 * 400, although `a` has held eight slots for 5,000 s
    await farm.stop()


@settings(max_examples=20, deadline=None)
@given(slots=st.integers(1, 3), tasks_s=st.lists(st.integers(100, 900), min_size=4, max_size=5))
def test_projects_that_always_wait_hold_slots_equally_long(slots: int, tasks_s: list[int]) -> None:
    async def simulate() -> None:
        farm, until_s = Farm(slots), 3_000
        await farm.add("z", 1, slots)
        for project, task_s in zip("abcde", tasks_s, strict=False):
            await farm.add(project, task_s, until_s // task_s + 2)
        await farm.run(until_s)
        used_s = farm.used_s + Counter({name[0]: until_s - start_s for name, start_s in farm.starts.items()})
        assert sum(used_s.values()) == slots * until_s and used_s.pop("z") == slots
        assert max(used_s.values()) - min(used_s[name] for name in "abcde"[: len(tasks_s)]) <= 2 * max(tasks_s)
        await farm.stop()

    asyncio.run(simulate())
