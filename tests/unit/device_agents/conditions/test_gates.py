"""Gates: what a measurement waits for, for how long, and that it begins in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.conditions.gates import COOLING_WINDOW_S, GateLimits, Gates, Surroundings
from etfarm.v1 import report_pb2

LIMITS = GateLimits()


@dataclass
class World:
    """A device whose sensors are functions of the time, which passes only where somebody sleeps."""

    heat: Callable[[float], float | None] = lambda _: None
    tasks: Callable[[float], int | None] = lambda _: None
    cpus: int = 2
    now_s: float = 0.0
    messages: list[tuple[str, str]] = field(default_factory=list)

    async def _sleep(self, pause_s: float) -> None:
        assert pause_s > 0
        self.now_s += pause_s

    async def _hottest_c(self) -> float | None:
        return self.heat(self.now_s)

    async def _runnable(self) -> int | None:
        return self.tasks(self.now_s)

    def gates(self, folder: Path, limits: GateLimits = LIMITS) -> Gates:
        around = Surroundings(
            self._hottest_c, self._runnable, self.cpus, lambda: self.now_s,
            lambda: 1e9 + self.now_s, self._sleep,
        )  # fmt: skip
        return Gates(limits, around, folder / "measured")

    def on_wait(self, phase: str, message: str) -> None:
        self.messages.append((phase, message))


async def test_a_machine_without_sensors_does_not_wait(tmp_path: Path) -> None:
    world = World()
    gates = world.gates(tmp_path)
    gates.measured()
    assert await gates.wait(world.on_wait, 600.0) == []
    assert world.now_s == 0 and not world.messages


async def test_a_cool_and_idle_device_pays_some_milliseconds(tmp_path: Path) -> None:
    world = World(heat=lambda _: 45.0, tasks=lambda _: 0)
    assert await world.gates(tmp_path).wait(world.on_wait, 600.0) == []
    assert world.now_s < 0.02 and not world.messages


async def test_a_hot_device_cools_first(tmp_path: Path) -> None:
    world = World(heat=lambda now_s: 80 - now_s)
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert (wait.gate, wait.passed, wait.threshold) == (report_pb2.GATE_COOL, True, 60)
    assert wait.measured < 60 and wait.waited_ms == pytest.approx(20_500)
    assert world.messages[0] == ("WAIT_FOR_COOL", "at most 60 s: 80.0 °C, to be below 60 °C")
    assert {phase for phase, _ in world.messages} == {"WAIT_FOR_COOL"}


async def test_a_device_that_cools_too_slowly_runs_anyway(tmp_path: Path) -> None:
    world = World(heat=lambda now_s: 95 - now_s / 10)
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert not wait.passed and wait.waited_ms == pytest.approx(LIMITS.cool_wait_s * 1e3)
    assert wait.measured == pytest.approx(95 - LIMITS.cool_wait_s / 10)


async def test_a_device_that_does_not_cool_at_all_is_not_waited_for(tmp_path: Path) -> None:
    world = World(heat=lambda _: 65.0)
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert not wait.passed and wait.measured == 65
    assert wait.waited_ms == pytest.approx(COOLING_WINDOW_S * 1e3, abs=1000)


async def test_a_busy_device_becomes_idle_first(tmp_path: Path) -> None:
    world = World(tasks=lambda now_s: 2 if now_s < 3 else 0)
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert (wait.gate, wait.passed, wait.measured) == (report_pb2.GATE_IDLE, True, 0)
    assert 2900 < wait.waited_ms < 3300
    assert world.messages[0] == ("WAIT_FOR_IDLE", "at most 10 s: 1.00 tasks per cpu run, to be below 0.15")


async def test_a_device_that_stays_busy_runs_anyway(tmp_path: Path) -> None:
    world = World(tasks=lambda _: 1, cpus=4)
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert not wait.passed and wait.measured == 0.25
    assert wait.waited_ms == pytest.approx(LIMITS.idle_wait_s * 1e3, abs=100)


async def test_a_moment_of_housekeeping_is_no_load(tmp_path: Path) -> None:
    world = World(tasks=lambda now_s: int(0.003 < now_s < 0.005))
    assert await world.gates(tmp_path).wait(world.on_wait, 600.0) == []


async def test_two_measurements_have_a_pause_where_heat_can_be_read(tmp_path: Path) -> None:
    world = World(heat=lambda _: 40.0)
    world.gates(tmp_path).measured()
    world.now_s = 0.4
    # Another agent process, same device.
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert (wait.gate, wait.passed) == (report_pb2.GATE_COOL_DOWN, True) and wait.waited_ms == pytest.approx(600, abs=1)
    assert await world.gates(tmp_path).wait(world.on_wait, 600.0) == []


async def test_a_clock_that_was_set_back_does_not_make_the_pause_longer(tmp_path: Path) -> None:
    world = World(heat=lambda _: 40.0)
    world.now_s = 1000.0
    world.gates(tmp_path).measured()
    world.now_s = 0.0
    (wait,) = await world.gates(tmp_path).wait(world.on_wait, 600.0)
    assert wait.waited_ms <= LIMITS.cool_down_s * 1e3


async def test_no_waiting_can_be_asked_for(tmp_path: Path) -> None:
    world = World(heat=lambda _: 90.0, tasks=lambda _: 9)
    limits = GateLimits(cool_wait_s=0, cool_down_s=0, idle_wait_s=0)
    waits = await world.gates(tmp_path, limits).wait(world.on_wait, 600.0)
    assert [(wait.gate, wait.passed) for wait in waits] == [(report_pb2.GATE_COOL, False), (report_pb2.GATE_IDLE, False)]
    assert world.now_s < 0.02 and not world.messages


@given(st.lists(st.none() | st.floats(-40, 150), min_size=1), st.lists(st.none() | st.integers(0, 1000), min_size=1))
async def test_the_waiting_always_ends(
    tmp_path_factory: pytest.TempPathFactory, heat: list[float | None], tasks: list[int | None]
) -> None:
    world = World(lambda now_s: heat[int(now_s * 2) % len(heat)], lambda now_s: tasks[int(now_s * 9) % len(tasks)])
    await world.gates(tmp_path_factory.getbasetemp() / "none").wait(world.on_wait, 600.0)
    assert world.now_s <= LIMITS.cool_wait_s + LIMITS.idle_wait_s + 1


async def test_this_machine_is_looked_at() -> None:
    around = Surroundings.of_machine()
    assert around.cpus >= 1 and (await around.runnable() or 0) >= 0
    hottest = await around.hottest_c()
    assert hottest is None or -40 <= hottest <= 150


async def test_waiting_leaves_half_of_the_attempts_time_to_the_program(tmp_path: Path) -> None:
    world = World(heat=lambda _: 95.0, tasks=lambda _: 9)
    waits = await world.gates(tmp_path).wait(world.on_wait, 3.0)
    assert [(wait.gate, wait.passed) for wait in waits] == [(report_pb2.GATE_COOL, False), (report_pb2.GATE_IDLE, False)]
    assert world.now_s <= 1.5
