"""Power cycles of hung devices, by a registry with a clock of its own and real scripts."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from etfarm.server.devices.health import power, standing
from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.health.file import read_settings
from etfarm.server.devices.health.power import PowerCycles, PowerRule, rules_of
from etfarm.server.devices.registry import Registry
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import HealthEvent, HealthEventKind, HealthRun
from etfarm.wire.errors import DeviceError
from tests.support.farm import wait_until
from tests.support.refusals import refuses
from tests.support.registries import RegistryWorld, board

RULE = PowerRule(("/bin/cycle", "{label.pdu}"))


class World(RegistryWorld):
    """A registry with the health of its devices."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.book = HealthBook(database, self.now)
        super().__init__(folder, database)

    def new_registry(self) -> Registry:
        return Registry(self.database, self.bundles, self.runs, self.now, fill_health=self.book.apply)

    async def connect_pi(self, **labels: str) -> None:
        self.agent = await self.connect(board("pi", labels=labels))

    async def lose_pi(self) -> None:
        """Connect an agent and lose it, an hour ago."""
        await self.connect_pi()
        await self.registry.disconnect(self.agent)
        self.later(3600)

    def cycles(self, *rules: PowerRule) -> PowerCycles:
        return PowerCycles(self.registry, self.book, rules or (RULE,), self.now, poll_s=0.01)


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


def script(folder: Path, *lines: str) -> str:
    path = folder / "cycle"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o700)
    return str(path)


async def test_a_silent_device_is_hung_after_a_while_and_a_stopped_one_is_not(world: World) -> None:
    await world.connect_pi()
    await world.registry.label("pi", {"pdu": "7"}, ())
    cycles = world.cycles()
    assert cycles.find_hung() == []
    await world.registry.disconnect(world.agent)
    world.later(RULE.after_s - 1)
    assert cycles.find_hung() == []
    world.later(1)
    assert cycles.find_hung() == [("pi", ["/bin/cycle", "7"], RULE)]
    await world.connect_pi()
    assert cycles.find_hung() == [], "it is back"
    world.registry.farewell(world.agent)
    world.later(9999)
    assert cycles.find_hung() == [], "its agent was stopped on purpose"


async def test_a_device_that_its_agent_lost_is_hung(world: World) -> None:
    await world.connect_pi()
    await world.registry.label("pi", {"pdu": "7"}, ())
    world.registry.gone(world.agent, "pi", "it does not answer")
    world.later(RULE.after_s)
    assert len(world.cycles().find_hung()) == 1


async def test_a_connected_device_whose_health_runs_keep_failing_is_hung(world: World) -> None:
    await world.connect_pi()
    rule = PowerRule(("/bin/cycle",), devices=frozenset({"pi"}))
    for _ in range(power.FAILED_RUNS):
        assert world.cycles(rule).find_hung() == []
        await world.book.record_run("pi", HealthRun(), DeviceError("It hangs."), "", "a1")
    assert world.book.of("pi").state == standing.QUARANTINED
    assert world.cycles(rule).find_hung() == [("pi", ["/bin/cycle"], rule)]


async def test_what_an_agent_says_about_its_device_selects_no_power(world: World) -> None:
    await world.connect_pi(pdu="7")
    await world.registry.disconnect(world.agent)
    world.later(9999)
    assert world.cycles().find_hung() == []


async def test_power_cycles_are_limited_in_rate_and_number(world: World, tmp_path: Path) -> None:
    await world.connect_pi()
    counted = tmp_path / "counted"
    rule = PowerRule((script(tmp_path, f'echo "$1" >> {counted}', "echo switched"), "port 7; rm -rf"), frozenset({"pi"}))
    cycles = world.cycles(rule)
    await world.registry.disconnect(world.agent)
    for _ in range(48):
        world.later(1800)
        for hung in cycles.find_hung():
            await cycles.cycle(*hung)
            assert cycles.find_hung() == [], "not again at once"
    assert counted.read_text().splitlines() == ["port 7; rm -rf"] * rule.max_per_day, "an argument, not a shell's line"
    world.later(86_400)
    assert len(cycles.find_hung()) == 1, "the next day"
    events, _ = await world.book.events("pi", 0, 500)
    assert {event.kind for event in events} == {HealthEventKind.HEALTH_EVENT_KIND_POWER_CYCLED}
    assert (events[0].exit_code, events[0].message) == (0, f"{rule.command[0]}: exit code 0: switched")


async def test_the_limits_of_power_cycles_hold_after_a_restart_of_the_server(world: World, tmp_path: Path) -> None:
    await world.lose_pi()
    rule = PowerRule((script(tmp_path, "exit 0"),), frozenset({"pi"}))

    async def find_after_a_restart() -> int:
        world.book = HealthBook(world.database, world.now)
        restarted = world.cycles(rule)
        await restarted.load()
        return len(restarted.find_hung())

    cycles = world.cycles(rule)
    for _ in range(rule.max_per_day):
        world.later(rule.min_interval_s)
        assert await find_after_a_restart() == 1
        await cycles.cycle(*cycles.find_hung()[0])
        assert await find_after_a_restart() == 0, "too soon"
    world.later(3 * rule.min_interval_s)
    assert await find_after_a_restart() == 0, "too many"
    world.later(86_400)
    assert await find_after_a_restart() == 1


async def test_a_power_cycle_counts_though_the_server_is_killed_during_its_command(world: World, tmp_path: Path) -> None:
    await world.lose_pi()
    begun = tmp_path / "begun"
    rule = PowerRule((script(tmp_path, f"touch {begun}", "sleep 1000"),), frozenset({"pi"}))
    cycles = world.cycles(rule)
    cycling = asyncio.create_task(cycles.cycle(*cycles.find_hung()[0]))
    assert await asyncio.to_thread(wait_until, begun.exists, 30.0)
    restarted = world.cycles(rule)
    await restarted.load()
    assert restarted.find_hung() == []
    cycling.cancel()
    await asyncio.gather(cycling, return_exceptions=True)
    (event,), _ = await world.book.events("pi", 0, 500)
    assert event.message == f"{rule.command[0]}: it was called" and not event.HasField("exit_code")


async def test_a_power_cycle_of_a_clock_that_was_ahead_blocks_no_others_for_long(world: World, tmp_path: Path) -> None:
    await world.lose_pi()
    world.later(365 * 86_400)
    rule = PowerRule((script(tmp_path, "exit 0"),), frozenset({"pi"}))
    cycles = world.cycles(rule)
    await cycles.cycle(*cycles.find_hung()[0])
    world.later(-364 * 86_400)
    assert cycles.find_hung() == [], "it may have been a moment ago"
    world.later(rule.min_interval_s)
    assert len(cycles.find_hung()) == 1


async def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = script(tmp_path, f"sleep 1000 & echo $! $$ > {pids}", "wait")
    began_s = time.monotonic()
    message, exit_code = await power.call([hanging], 0.5)
    assert (message, exit_code) == ("it was killed after 0.5 s", None)
    assert time.monotonic() - began_s < 20
    left = [Path(f"/proc/{pid}/stat") for pid in pids.read_text().split()]
    assert len(left) == 2
    assert await asyncio.to_thread(wait_until, lambda: not any(map(_is_running, left)), 10.0)


def _is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_command_with_much_output_keeps_its_end_and_sees_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETFARM_TOKEN", "secret")
    code = "import os; print('x' * 5_000_000); print('ETFARM_TOKEN' in os.environ, 'last')"
    message, exit_code = await power.call([sys.executable, "-c", code], 60)
    assert exit_code == 0 and message.endswith("False last") and len(message) < 500


async def test_a_command_that_is_missing_is_reported(tmp_path: Path) -> None:
    message, exit_code = await power.call([str(tmp_path / "missing")], 1)
    assert exit_code is None and message.startswith("it could not be started: ")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[power]]\ncommand = ["pdu", "7"]\ndevices = ["pi"]', "the first of them an absolute path"),
        ('[[power]]\ncommand = ["/pdu", "7"]', "names no device"),
        ('[[power]]\ncommand = "/pdu"', "command must be a list of strings"),
        ('[[power]]\ncommand = ["/pdu", "{label.pdu}"]\ntimeout_s = 0', "timeout_s must be 1 to 3,600"),
        ('[[power]]\ncommand = ["/pdu", "{label.pdu}"]\nafter = 3', "has no setting 'after'"),
        ('power = "/pdu"', "power must be a list"),
        ("probe_s = ", "is not valid TOML"),
        ("quarantine = 1", "There is no health setting"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "health.toml").write_text(text)
    with refuses("BAD_HEALTH_POLICY", match=why):
        read_settings(tmp_path / "health.toml")


def test_a_file_sets_rules_and_commands_and_an_option_wins(tmp_path: Path) -> None:
    (tmp_path / "health.toml").write_text(
        'interval_s = 7200.0\nprobe_s = 5\n[[power]]\ncommand = ["/pdu", "{label.pdu}"]\nafter_s = 30\n'
    )
    settings = read_settings(tmp_path / "health.toml", 0.0)
    assert (settings.policy.interval_s, settings.policy.probe_s) == (0.0, 5)
    assert settings.power == (PowerRule(("/pdu", "{label.pdu}"), after_s=30),)
    with refuses("BAD_HEALTH_POLICY", match="cannot be read"):
        read_settings(tmp_path / "missing.toml")
    assert rules_of([]) == ()


async def test_the_end_of_a_power_cycle_changes_no_event_of_another_device(world: World) -> None:
    """SQLite gives a forgotten event's number to the next one."""
    cycle = await world.book.record_power_cycle("pi", "cycle: it was called")
    await world.book.forget("pi")
    other = await world.book.record_power_cycle("phone", "other: it was called")
    assert other.number == cycle.number
    await world.book.record_power_cycled(cycle, "cycle: it ended", 0)
    bodies = await world.database.read(lambda connection: connection.execute(select(schema.health_events.c.body)).scalars().all())
    assert [HealthEvent.FromString(body).message for body in bodies] == ["other: it was called"]
