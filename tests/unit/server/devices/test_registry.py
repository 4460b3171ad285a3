"""Which devices are known and connected, over Hellos, breaks and replacements."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC
from pathlib import Path

import pytest

from etfarm.server.access.projects import Projects
from etfarm.server.access.scope import Scope
from etfarm.server.devices import admission
from etfarm.server.devices.errors import (
    AgentConnected,
    DeviceNotFound,
    DeviceOffline,
    DeviceServed,
    DeviceTooLarge,
    TooManyDevices,
)
from etfarm.server.devices.records import DeviceRecords
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import AttemptLost
from etfarm.server.devices.session import HEARTBEAT_INTERVAL_S, AgentSession
from etfarm.server.state.engine import Database, DatabaseFull
from etfarm.v1.agent_pb2 import Heartbeat, Hello, RunnerBundle
from etfarm.v1.common_pb2 import Error, RunnerKind
from etfarm.v1.device_pb2 import (
    Device,
    DeviceDrain,
    DeviceHealth,
    DeviceRunner,
    DeviceState,
    DeviceTelemetry,
    HealthState,
    Reservation,
)
from etfarm.wire.errors import Kind, error_for
from tests.support.databases import Refusal
from tests.support.golden import Golden
from tests.support.registries import RegistryWorld, board

IDLE, BUSY, OFFLINE = DeviceState.DEVICE_STATE_IDLE, DeviceState.DEVICE_STATE_BUSY, DeviceState.DEVICE_STATE_OFFLINE
UNUSABLE = DeviceState.DEVICE_STATE_UNUSABLE


@pytest.fixture
def world(tmp_path: Path, database: Database) -> RegistryWorld:
    return RegistryWorld(tmp_path, database)


def states(world: RegistryWorld) -> dict[str, int]:
    return {device.id: device.state for device in world.registry.devices()}


@pytest.mark.remedy("BUNDLE_MISSING")
async def test_a_device_without_a_runner_is_described_as_unusable_with_the_remedy(world: RegistryWorld) -> None:
    session = await world.connect("pi")
    shown = world.registry.describe(world.registry.get("pi"))
    assert (shown.state, shown.problem.reason) == (UNUSABLE, "BUNDLE_MISSING")
    assert "etfarm bundle build --arch aarch64" in shown.problem.remedy
    own = board("own", own_runners=[DeviceRunner(kind=RunnerKind.RUNNER_KIND_OWN)])
    await world.registry.update(session, own)
    assert not world.registry.describe(world.registry.get("own")).HasField("problem")
    world.bundles.use(RunnerBundle(arch="aarch64"))
    shown = world.registry.describe(world.registry.get("pi"))
    assert (shown.state, shown.HasField("problem")) == (IDLE, False)


@pytest.mark.remedy("DEVICE_OFFLINE")
async def test_a_device_is_idle_busy_and_offline(world: RegistryWorld) -> None:
    session = await world.connect("pi", "xl")
    assert states(world) == {"pi": IDLE, "xl": IDLE}
    world.runs.begin("a1", "pi", lambda _: None)
    assert states(world) == {"pi": BUSY, "xl": IDLE}
    assert world.registry.get("pi").attempt_id == "a1"
    assert world.registry.session_of("pi") is session
    await world.registry.disconnect(session)
    assert states(world) == {"pi": OFFLINE, "xl": OFFLINE}
    with pytest.raises(DeviceOffline):
        world.registry.session_of("pi")
    again = await world.connect("pi", "xl")
    assert world.registry.session_of("pi") is again


async def test_a_device_with_a_problem_is_unusable_after_its_run_until_the_problem_or_the_device_is_gone(
    world: RegistryWorld,
) -> None:
    session = await world.connect("phone")
    problem = Error(reason="PHONE_NOT_READY", message="The phone does not trust its host.", remedy="Allow it.")
    world.runs.begin("a1", "phone", lambda _: None)
    await world.registry.update(session, board("phone", problem=problem))
    assert states(world) == {"phone": BUSY}
    world.runs.end("a1")
    assert states(world) == {"phone": UNUSABLE} and world.registry.get("phone").problem == problem
    await world.registry.update(session, board("phone"))
    assert states(world) == {"phone": IDLE} and not world.registry.get("phone").HasField("problem")
    await world.registry.update(session, board("phone", problem=problem))
    world.registry.gone(session, "phone")
    assert states(world) == {"phone": OFFLINE} and not world.registry.get("phone").HasField("problem")


async def test_of_two_agents_the_one_that_can_serve_a_phone_says_what_it_is(world: RegistryWorld) -> None:
    problem = Error(reason="PHONE_NOT_READY")
    one, other = await world.connect("pi", agent="one"), await world.connect("xl", agent="other")
    phone, stuck = board("phone"), board("phone", problem=problem)
    await world.registry.update(one, stuck)
    await world.registry.update(other, phone)
    assert states(world)["phone"] == IDLE and world.registry.serves(other, "phone")
    world.runs.begin("a1", "phone", lambda _: None)
    await world.registry.update(one, stuck)
    assert states(world)["phone"] == BUSY and world.registry.serves(other, "phone")
    with pytest.raises(AgentConnected) as refused:
        await world.registry.update(one, phone)
    assert refused.value.reason == "DEVICE_SERVED" and world.registry.serves(other, "phone")
    world.registry.gone(one, "phone")
    assert states(world)["phone"] == BUSY


async def test_listeners_are_notified_of_connections_and_disconnections(world: RegistryWorld) -> None:
    received: list[dict[str, int]] = []
    world.registry.on_change(lambda: received.append(states(world)))
    session = await world.connect("pi")
    await world.registry.update(session, Device(id="xl", name="xl"))
    world.registry.gone(session, "pi")
    await world.registry.disconnect(session)
    assert received == [{"pi": IDLE}, {"pi": IDLE, "xl": IDLE}, {"pi": OFFLINE, "xl": IDLE}, {"pi": OFFLINE, "xl": OFFLINE}]


async def test_a_known_device_stays_known_after_a_restart_as_offline(world: RegistryWorld) -> None:
    await world.connect("pi")
    (device,) = (await world.restart()).devices()
    assert (device.id, device.agent_id, device.state, device.name) == ("pi", "agent", OFFLINE, "board-pi")
    assert device.last_seen_time.ToDatetime(UTC) == world.now()


@pytest.mark.parametrize("key", ["4f00aa", "4f", "board-4f00aa"])
async def test_a_device_is_found_by_id_prefix_and_name(world: RegistryWorld, key: str) -> None:
    await world.connect("4f00aa", "5a")
    assert world.registry.get(key).id == "4f00aa"


@pytest.mark.remedy("DEVICE_NOT_FOUND")
@pytest.mark.parametrize("key", ["nothing", "4f", ""])
async def test_a_device_that_is_not_or_not_one_is_refused_with_what_there_is(
    golden: Golden, world: RegistryWorld, key: str
) -> None:
    await world.connect("4f01", "4f02")
    with golden.refuses("DEVICE_NOT_FOUND") as refused:
        world.registry.get(key)
    assert "board-4f01 (4f01)" in refused.value.remedy
    assert refused.value.kind is Kind.NOT_FOUND
    assert world.registry.get("4f01").id == world.registry.get("board-4f01").id == "4f01"


@pytest.mark.remedy("AGENT_CONNECTED")
async def test_a_second_agent_of_an_id_is_refused_beside_a_live_one_and_replaces_a_silent_one(world: RegistryWorld) -> None:
    first = await world.connect("pi")
    with pytest.raises(AgentConnected, match="--data") as refused:
        await world.connect("pi")
    assert refused.value.kind is Kind.ALREADY_EXISTS
    assert world.registry.session_of("pi") is first
    world.later(3 * HEARTBEAT_INTERVAL_S - 0.1)
    assert first.is_alive()
    first.mark_alive()
    world.later(3 * HEARTBEAT_INTERVAL_S)
    second = await world.connect("pi")
    assert world.registry.session_of("pi") is second
    assert not first.is_alive()
    await world.registry.disconnect(first)
    assert states(world) == {"pi": IDLE}, "the former connection's end is not the new one's"
    await world.connect("copy", agent="with-an-id-of-its-own")
    assert states(world) == {"pi": IDLE, "copy": IDLE}


async def test_a_restarted_machine_replaces_an_agent_that_no_longer_responds(world: RegistryWorld) -> None:
    former = await world.connect("pi", boot="monday")
    world.later(10)
    waiting = [asyncio.create_task(world.connect("pi", boot="tuesday")) for _ in range(2)]
    done, _ = await asyncio.wait(waiting, timeout=0.2)
    assert not done and world.registry.session_of("pi") is former
    world.later(3 * HEARTBEAT_INTERVAL_S)
    former.end()  # As whoever listens to it does after so long a silence.
    sessions = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(session) for session in sessions] == [AgentSession, AgentConnected], "of two, one"
    assert world.registry.session_of("pi") is sessions[0]
    assert sessions[0].silence_left_s() == 3 * HEARTBEAT_INTERVAL_S, "who waited was not silent"  # type: ignore[union-attr]


async def test_a_run_survives_a_reconnection_that_still_has_it(world: RegistryWorld) -> None:
    session = await world.connect("pi")
    world.runs.begin("a1", "pi", lambda _: None, sent=True)
    await world.registry.disconnect(session)
    await world.connect("pi", active_attempts=["a1"])
    world.runs.begin("a2", "pi2", lambda _: None)
    await world.registry.disconnect(world.registry.session_of("pi"))
    await world.connect("pi", unacknowledged_attempts=["a1"])
    assert states(world) == {"pi": BUSY}


async def test_a_run_is_lost_with_its_device_but_not_with_another_agents_claim(world: RegistryWorld) -> None:
    session, other = await world.connect("pi"), await world.connect("xl", agent="other")
    world.runs.begin("a1", "pi", lambda _: None, sent=True)
    world.registry.gone(other, "pi")
    assert states(world)["pi"] == BUSY
    world.registry.gone(session, "pi")
    with pytest.raises(AttemptLost):
        await world.runs.result("a1")


async def test_a_run_that_begins_while_its_agent_is_being_registered_is_not_lost(world: RegistryWorld) -> None:
    """The Hello knows nothing of it: it was sent before."""
    gate = threading.Event()
    blocked = asyncio.create_task(world.database.write(lambda _: gate.wait(60)))
    connecting = asyncio.create_task(world.connect("pi", "xl"))
    try:
        await asyncio.sleep(0)  # the task's first step, as far as its write
        assert states(world) == {"pi": IDLE}
        world.runs.begin("a1", "pi", lambda _: None)
    finally:
        gate.set()
        await asyncio.gather(blocked, connecting)
    assert not world.runs._runs["a1"].result.done()


async def test_telemetry_counts_while_its_own_agent_is_connected(world: RegistryWorld) -> None:
    session, other = await world.connect("pi"), await world.connect("xl", agent="other")
    world.later(5)
    await world.registry.heartbeat(session, Heartbeat(telemetry={"pi": DeviceTelemetry(load_1m=0.5)}))
    await world.registry.heartbeat(other, Heartbeat(telemetry={"pi": DeviceTelemetry(load_1m=9), "none": DeviceTelemetry()}))
    device = world.registry.get("pi")
    assert device.telemetry.load_1m == 0.5
    assert device.last_seen_time.ToDatetime(UTC) == device.telemetry.time.ToDatetime(UTC) == world.now()
    await world.registry.disconnect(session)
    assert not world.registry.get("pi").HasField("telemetry")


async def test_an_agent_connects_and_goes_on_while_the_disk_is_full(
    world: RegistryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(*_: object, **__: object) -> None:
        raise DatabaseFull("The server's disk is full.")

    with monkeypatch.context() as full:
        full.setattr(world.database, "write", write)
        session = await world.connect("pi")
        await world.registry.update(session, Device(id="pi", name="renamed"))
        assert (world.registry.get("pi").name, world.registry.get("pi").state) == ("renamed", IDLE)


async def test_unknown_fields_of_telemetry_are_dropped(world: RegistryWorld) -> None:
    session = await world.connect("pi")
    padding = b"\xc2\x3e" + b"\x80\x80\x40" + bytes(1 << 20)  # field 1,000, of 1 MiB
    padded = DeviceTelemetry.FromString(DeviceTelemetry(load_1m=0.5).SerializeToString() + padding)
    assert padded.ByteSize() > 1 << 20
    await world.registry.heartbeat(session, Heartbeat(telemetry={"pi": padded}))
    kept = world.registry.get("pi").telemetry
    assert kept.load_1m == 0.5 and kept.ByteSize() < 100


async def test_a_device_has_its_own_runners_backends_where_the_farm_has_no_bundle_for_it(world: RegistryWorld) -> None:
    session = world.session()
    own = DeviceRunner(kind=RunnerKind.RUNNER_KIND_PYTHON, backends=["XnnpackBackend"], operators=["a"])
    for arch, settled in (("aarch64", False), (platform.machine(), False), (platform.machine(), True)):
        if settled:
            world.bundles.settled.set()
        await world.registry.disconnect(session)
        session = await world.connect(Device(id=arch, arch=arch, own_runners=[own]))
        device = world.registry.get(arch)
        is_coming = arch == platform.machine() and not settled
        assert device.is_runner_coming == is_coming
        assert (device.runner, list(device.backends)) == (
            (RunnerKind.RUNNER_KIND_UNSPECIFIED, []) if is_coming else (own.kind, own.backends)
        )
    world.bundles.use(RunnerBundle(arch=arch, backends=["Other"], operators=["a", "b"]))
    device = world.registry.get(arch)
    assert (device.runner, list(device.backends), device.operator_count) == (RunnerKind.RUNNER_KIND_NATIVE, ["Other"], 2), (
        "the farm's is better"
    )


@pytest.mark.remedy("DEVICE_SERVED")
async def test_a_copy_of_a_disk_is_refused_once_the_original_responds_and_a_machine_that_lost_power_is_replaced(
    golden: Golden, world: RegistryWorld
) -> None:
    first = await world.connect("pi", boot="here")
    waiting = asyncio.create_task(world.connect("pi", agent="clone", boot="there"))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    first.mark_alive()
    with golden.refuses("DEVICE_SERVED"):
        await waiting
    waiting = asyncio.create_task(world.connect("pi", agent="reinstalled", boot="there"))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    world.later(3 * HEARTBEAT_INTERVAL_S)
    first.end()
    assert world.registry.serves(await waiting, "pi")


@pytest.mark.remedy("DEVICE_NOT_YOURS")
async def test_a_device_of_another_token_is_a_copy_while_it_is_served_and_has_moved_when_it_left(
    golden: Golden, world: RegistryWorld
) -> None:
    owners = {agent: f"owner-of-{agent}" for agent in ("a1", "a2")}
    farm = Registry(world.database, world.bundles, world.runs, world.now, owners.__getitem__)
    pi = Device(id="pi", name="pi")
    session = world.session("a1", principal="owner-of-a1")
    await farm.connect(session, Hello(agent_id="a1", devices=[pi]))
    other = world.session("a2", principal="owner-of-a2")
    with pytest.raises(DeviceServed):
        await farm.accept(other, [pi])
    await farm.disconnect(session)
    with golden.refuses("DEVICE_NOT_YOURS"):
        await farm.accept(other, [pi])
    owners["a1"] = "owner-of-a2"  # an admin has bound it
    await farm.accept(other, [pi])


async def test_a_farewell_loses_what_runs_at_once(world: RegistryWorld) -> None:
    session = await world.connect("pi")
    world.runs.begin("a1", "pi", lambda _: None, sent=True)
    world.registry.farewell(session)
    with pytest.raises(AttemptLost):
        await world.runs.result("a1")


VISION, AUDIO = Scope(frozenset({"vision"})), Scope(frozenset({"audio"}))


async def make_projects(world: RegistryWorld) -> None:
    projects = Projects(world.database, world.now)
    for name in ("audio", "vision"):
        await projects.create(name, [], None, by="root")


async def test_what_only_the_server_may_say_of_a_device_is_not_taken_from_its_agent(world: RegistryWorld) -> None:
    liar = board(
        "pi", agent_id="other", state=BUSY, attempt_id="a1", attempt_ids=["a1", "a2"], projects=["audio"],
        backends=["QnnBackend"], operator_count=9, runner=RunnerKind.RUNNER_KIND_NATIVE, is_runner_coming=True,
        health=DeviceHealth(state=HealthState.HEALTH_STATE_QUARANTINED), drain=DeviceDrain(reason="mine"),
        reservation=Reservation(id="r1", owner="ann"), telemetry=DeviceTelemetry(load_1m=1.0), concurrent_runs=4,
    )  # fmt: skip
    session = await world.connect(liar)
    known = [world.registry.get("pi"), (await DeviceRecords(world.database).load())[0][0]]
    await world.registry.update(session, liar)
    known.append(world.registry.get("pi"))
    await DeviceRecords(world.database).save([liar])
    known.append((await world.restart()).get("pi"))
    for device in known:
        assert device.concurrent_runs == 4, "an agent's own to say"
        assert not any(device.HasField(name) for name in ("health", "drain", "reservation", "telemetry", "operator_count"))
        assert (device.attempt_id, list(device.attempt_ids), list(device.projects)) == ("", [], [])
        assert (list(device.backends), device.runner, device.is_runner_coming) == ([], RunnerKind.RUNNER_KIND_UNSPECIFIED, False)
    for device in (known[0], known[2]):
        assert (device.agent_id, device.state) == ("agent", IDLE)
    assert known[3].state == OFFLINE


async def test_all_attempts_of_a_device_are_listed_except_those_of_other_projects(world: RegistryWorld) -> None:
    await world.connect("pi")
    for attempt, project in (("a1", "audio"), ("a2", "vision"), ("a3", "audio")):
        world.runs.begin(attempt, "pi", lambda _: None, project=project, exclusive=False)
    assert list(world.registry.get("pi").attempt_ids) == ["a1", "a2", "a3"]
    for scope, attempts in ((VISION, ["a2"]), (Scope(frozenset({"default"})), []), (Scope(None), ["a1", "a2", "a3"])):
        theirs = world.registry.get("pi", scope)
        assert (theirs.attempt_id, list(theirs.attempt_ids), theirs.state) == ((attempts or [""])[0], attempts, BUSY)
    world.runs.end("a1")
    assert world.registry.get("pi").attempt_id == "a2" and world.runs.exclusive_on("pi") == [False, False]


async def test_followers_learn_which_devices_changed(world: RegistryWorld) -> None:
    changes: list[list[str]] = []
    world.registry.follow(lambda device_ids: changes.append(sorted(device_ids)))
    session = await world.connect("pi", "xl")
    await world.registry.drain("pi", "", "root")
    world.registry.gone(session, "xl")
    world.bundles.use(RunnerBundle(arch="aarch64"))
    assert changes == [["pi", "xl"], ["pi"], ["xl"], []]
    assert set(world.registry.known(["pi", "nothing"])) == {"pi"}


async def test_a_restricted_device_does_not_exist_for_other_projects(world: RegistryWorld) -> None:
    await make_projects(world)
    await world.connect("pi", "xl")
    assert list((await world.registry.restrict("board-pi", ["vision", "vision"])).projects) == ["vision"]
    assert [device.id for device in world.registry.devices(VISION)] == ["pi", "xl"]
    assert [device.id for device in world.registry.devices(AUDIO)] == ["xl"]
    for key in ("pi", "board-pi", "p"):
        with pytest.raises(DeviceNotFound) as refused:
            world.registry.get(key, AUDIO)
        assert str(refused.value) == f"There is no device {key!r}. Known: board-xl (xl)."
    await world.registry.restrict("pi", [])
    assert world.registry.get("pi", AUDIO).id == "pi"


async def test_a_restriction_outlives_the_server_and_the_agents_word(world: RegistryWorld) -> None:
    await make_projects(world)
    session = await world.connect("pi")
    await world.registry.restrict("pi", ["vision", "audio"])
    await world.registry.update(session, Device(id="pi", name="board-pi", projects=["audio"]))
    assert list(world.registry.get("pi").projects) == ["audio", "vision"]
    # A caller sees its own projects only.
    assert list(world.registry.get("pi", VISION).projects) == ["vision"]
    assert list((await world.restart()).get("pi").projects) == ["audio", "vision"]
    assert world.registry.devices(Scope(frozenset({"default"}))) == []


def owned(world: RegistryWorld) -> tuple[Callable[..., Awaitable[AgentSession]], Registry]:
    """Return how agents connect whose tokens have owners, to a registry that knows them, and the registry."""
    owners = {"a1": "thief", "a2": "thief", "b": "rack"}
    world.registry = Registry(world.database, world.bundles, world.runs, world.now, owners.__getitem__)
    return lambda agent, *devices: world.connect(*devices, agent=agent, principal=owners[agent]), world.registry


@pytest.mark.remedy("TOO_MANY_DEVICES")
async def test_agents_of_one_token_do_not_take_the_farms_room(
    golden: Golden, world: RegistryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_DEVICES_OF_PRINCIPAL", 3)
    connect, farm = owned(world)
    await connect("a1", "x", "y")
    with golden.refuses("TOO_MANY_DEVICES"):
        await connect("a2", "z", "w")
    # As an enrolment asks, before its token is used.
    with pytest.raises(TooManyDevices):
        enrolling = world.session("a2", principal="thief")
        await farm.accept(enrolling, [Device(id=each) for each in ("z", "w")])
    await connect("b", "pi", "xl")
    assert [device.id for device in farm.devices()] == ["pi", "x", "xl", "y"]
    await farm.end_agent("a1")
    for gone in ("x", "y"):
        await farm.forget(gone)
    await connect("a2", "z", "w")


@pytest.mark.remedy("DEVICE_TOO_LARGE")
async def test_large_descriptions_of_one_token_have_a_limit_together(
    world: RegistryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_LARGE_BYTES", 3 * admission.MAX_DEVICE_BYTES)
    connect, farm = owned(world)
    features = ["f" * 1_000] * 125
    await connect("a1", Device(id="x", features=features), Device(id="y", features=features), Device(id="small"))
    with pytest.raises(DeviceTooLarge, match="thief's devices with over 12288 bytes"):
        await connect("a2", Device(id="z", features=features), Device(id="w", features=features))
    await connect("a2", Device(id="z", features=features[:10]))
    await connect("b", Device(id="pi", features=features))
    assert {device.id for device in farm.devices()} == {"x", "y", "small", "z", "pi"}


async def test_a_new_device_is_restricted_as_all_others_of_its_token_are(world: RegistryWorld) -> None:
    await make_projects(world)
    session = await world.connect("pi", "xl", principal="rack")
    await world.registry.restrict("pi", ["vision"])
    await world.registry.update(session, Device(id="a"))
    assert list(world.registry.get("a").projects) == [], "as xl"
    for device_id, project in (("a", "audio"), ("xl", "vision")):
        await world.registry.restrict(device_id, [project])
    await world.registry.update(session, Device(id="b"))
    assert list((await world.restart()).get("b").projects) == ["audio", "vision"]


async def test_a_server_that_no_longer_leads_lets_its_agents_go(world: RegistryWorld) -> None:
    session = await world.connect("pi")
    world.database.guard = refusal = Refusal(error_for("FENCED", "This server no longer leads the farm.", "Try again."))
    await world.registry.disconnect(session)
    assert refusal.has_refused.is_set() and not world.registry.serves(session, "pi")
