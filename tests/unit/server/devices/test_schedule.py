"""Which cell goes to which device: properties of a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.devices import schedule
from etfarm.server.devices.schedule import Assignment, NoSuchDevice, Waiting
from etfarm.v1.common_pb2 import Error
from etfarm.v1.device_pb2 import Device, DeviceDrain, DeviceState
from etfarm.wire import selectors
from etfarm.wire.errors import Kind
from tests.support.golden import Golden

IDLE, BUSY, OFFLINE, DRAINING, UNUSABLE = (
    DeviceState.DEVICE_STATE_IDLE,
    DeviceState.DEVICE_STATE_BUSY,
    DeviceState.DEVICE_STATE_OFFLINE,
    DeviceState.DEVICE_STATE_DRAINING,
    DeviceState.DEVICE_STATE_UNUSABLE,
)
FULL = Error(reason="DEVICE_FULL", message="Its storage is full.", remedy="Make room on it.")
IDS = ["d0", "d1", "d2", "d3"]

devices = st.lists(
    st.builds(
        Device,
        id=st.sampled_from(IDS), arch=st.sampled_from(["aarch64", "x86_64"]), emulated=st.booleans(),
        state=st.sampled_from([IDLE, IDLE, BUSY, OFFLINE, DRAINING, UNUSABLE]),
    ),
    max_size=4, unique_by=lambda device: device.id,
)  # fmt: skip
queues = st.lists(
    st.tuples(
        st.sampled_from(["", "arch=aarch64", "arch=x86_64", "id=d1", "emulated=false"]), st.integers(-1, 2),
        st.integers(0, 3), st.frozensets(st.sampled_from(IDS), max_size=2),
    ),
    max_size=6,
).map(
    lambda rows: [
        Waiting(f"c{number}", selectors.parse(text), priority, (order, number), avoid)
        for number, (text, priority, order, avoid) in enumerate(rows)
    ]
)  # fmt: skip


@given(queues, devices, st.randoms())
def test_equal_arguments_in_any_order_give_equal_answers(waiting: list[Waiting], known: list[Device], random: object) -> None:
    answer = schedule.schedule(waiting, known)
    random.shuffle(waiting)  # type: ignore[attr-defined]
    random.shuffle(known)  # type: ignore[attr-defined]
    assert schedule.schedule(waiting, known) == answer


@given(queues, devices)
def test_each_cell_gets_at_most_one_idle_device_that_it_matches_and_each_device_one_cell(
    waiting: list[Waiting], known: list[Device]
) -> None:
    answer = schedule.schedule(waiting, known)
    by_id, by_cell = {device.id: device for device in known}, {cell.cell_id: cell for cell in waiting}
    assert len({one.device_id for one in answer}) == len({one.cell_id for one in answer}) == len(answer)
    for one in answer:
        assert by_id[one.device_id].state == IDLE
        assert by_cell[one.cell_id].selector.matches(by_id[one.device_id])


@given(queues, devices)
def test_no_cell_waits_while_a_device_that_fits_is_idle(waiting: list[Waiting], known: list[Device]) -> None:
    answer = schedule.schedule(waiting, known)
    taken = {one.device_id for one in answer}
    left = [device for device in known if device.state == IDLE and device.id not in taken]
    for cell in waiting:
        if cell.cell_id not in {one.cell_id for one in answer}:
            assert not any(cell.selector.matches(device) for device in left)


@given(queues, devices)
def test_the_first_cell_in_the_queue_chooses_as_if_alone(waiting: list[Waiting], known: list[Device]) -> None:
    order = sorted(waiting, key=lambda cell: (-cell.priority, cell.order))
    expected: list[Assignment] = []
    for cell in order:
        taken = {one.device_id for one in expected}
        expected += schedule.schedule([cell], [device for device in known if device.id not in taken])
    assert schedule.schedule(waiting, known) == expected


def cell(name: str = "c", text: str = "", priority: int = 0, order: tuple[int, int] = (0, 0), avoid: str = "") -> Waiting:
    return Waiting(name, selectors.parse(text), priority, order, frozenset(avoid.split()))


def device(name: str, state: DeviceState.ValueType = IDLE, **more: object) -> Device:
    return Device(id=name, name=name, state=state, **more)  # type: ignore[arg-type]


def test_priority_goes_before_age_and_age_before_the_rest() -> None:
    waiting = [cell("young", order=(9, 0)), cell("old", order=(1, 1)), cell("older", order=(1, 0)), cell("high", priority=1)]
    for count, first in enumerate(["high", "older", "old", "young"], 1):
        known = [device(f"d{number}") for number in range(count)]
        assert schedule.schedule(waiting, known)[-1].cell_id == first


@pytest.mark.parametrize(
    ("avoid", "chosen"),
    [("", "real-a"), ("real-a", "real-b"), ("real-a real-b", "emulated"), ("real-a real-b emulated", "real-a")],
)
def test_a_device_that_failed_the_cell_comes_last_then_an_emulated_one(avoid: str, chosen: str) -> None:
    known = [device("emulated", emulated=True), device("real-b"), device("real-a")]
    assert schedule.schedule([cell(avoid=avoid)], known) == [Assignment("c", chosen)]


def test_a_cell_that_waits_for_a_busy_device_delays_no_other() -> None:
    known = [device("pi", BUSY), device("other")]
    waiting = [cell("first", "id=pi", priority=9), cell("second")]
    assert schedule.schedule(waiting, known) == [Assignment("second", "other")]


def test_matching_takes_offline_devices_too_and_puts_emulated_ones_last() -> None:
    known = [device("a", emulated=True), device("c", OFFLINE), device("b", BUSY)]
    assert [one.id for one in schedule.matching(selectors.parse(""), "", known)] == ["b", "c", "a"]


def test_a_device_that_cannot_be_used_matches_and_gets_nothing() -> None:
    known = [device("phone", UNUSABLE, problem=FULL)]
    assert [one.id for one in schedule.matching(selectors.parse("id=phone"), "id=phone", known)] == ["phone"]
    assert schedule.schedule([cell(text="id=phone")], known) == []


def test_no_match_is_refused_with_what_there_is(golden: Golden) -> None:
    known = [device("pi", OFFLINE, arch="aarch64", soc="BCM", cores=4), device("emu", emulated=True)]
    with pytest.raises(NoSuchDevice) as refused:
        schedule.matching(selectors.parse("arch=riscv"), "arch=riscv", known)
    golden.check(refused.value)
    assert refused.value.kind is Kind.FAILED_PRECONDITION
    assert "emu" in refused.value.metadata["known"] and "offline" in refused.value.metadata["known"]
    with pytest.raises(NoSuchDevice) as refused:
        schedule.matching(selectors.parse(""), "", [])
    golden.check(refused.value)


@pytest.mark.parametrize(
    ("known", "busy", "says"),
    [
        ([], {}, "no known device matches any more"),
        ([device("a", OFFLINE)], {}, "a is known but offline"),
        ([device("b", OFFLINE), device("a", OFFLINE)], {}, "a, b are known but offline"),
        ([device("b", OFFLINE), device("a", BUSY)], {"a": "x"}, "a is busy"),
        ([device("b", BUSY), device("a", BUSY)], {"a": "x", "b": "y"}, "a, b are busy"),
        ([device("a")], {}, ""),
        ([device("c", UNUSABLE, problem=FULL)], {}, "c cannot be used: Its storage is full. Make room on it"),
        (
            [device("c", UNUSABLE, problem=FULL), device("b", OFFLINE)],
            {},
            "b is known but offline; c cannot be used: Its storage is full. Make room on it",
        ),
        ([device("c", UNUSABLE, problem=FULL), device("a", BUSY)], {"a": "x"}, "a is busy"),
        ([device("c", UNUSABLE, problem=FULL), device("a")], {}, ""),
    ],
)
def test_the_reason_why_a_cell_waits_is_reported(known: list[Device], busy: dict[str, str], says: str) -> None:
    assert schedule.why_waiting(cell(), known, busy) == says


def test_a_device_of_other_projects_does_not_exist_for_a_cell() -> None:
    theirs = device("a", projects=["audio"])
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0), project="vision")
    assert schedule.schedule([waiting], [theirs]) == []
    assert schedule.why_waiting(waiting, [theirs], {"a": "attempt"}) == "no known device matches any more"
    assert schedule.schedule([waiting], [theirs, device("b")]) == [Assignment("c", "b")]
    both = device("c", projects=["audio", "vision"])
    assert schedule.schedule([waiting], [theirs, both]) == [Assignment("c", "c")]
    assert schedule.open_to("vision", [theirs, both, device("b")]) == [both, device("b")]


def test_a_device_with_fewer_cpus_than_threads_gets_no_cell_and_is_named_to_waiting_cells() -> None:
    small, large = device("small", cores=2), device("large", BUSY, cores=8)
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0), threads=4)
    assert schedule.schedule([waiting], [small, large]) == []
    assert schedule.why_waiting(waiting, [small, large], {"large": "x"}) == (
        "large is busy; too few cpus for 4 threads: small has 2"
    )
    assert schedule.why_waiting(waiting, [small], {}) == "too few cpus for 4 threads: small has 2"
    assert schedule.schedule([waiting], [small, device("large", cores=8)]) == [Assignment("c", "large")]
    assert schedule.schedule([Waiting("c", selectors.parse(""), 0, (0, 0), threads=2)], [small]) == [Assignment("c", "small")]
    assert schedule.schedule([waiting], [device("unknown")]) == [Assignment("c", "unknown")], "its cpus are not known"


def test_a_drained_device_gets_no_cell_and_its_reason_is_told() -> None:
    drained = device("a", DRAINING, drain=DeviceDrain(reason="new cable"))
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0))
    assert schedule.schedule([waiting], [drained]) == []
    assert schedule.why_waiting(waiting, [drained], {}) == "a is drained: new cable"
    drained.drain.reason = ""
    assert schedule.why_waiting(waiting, [drained], {}) == "a is drained"
    both = [drained, device("b", BUSY)]
    assert schedule.why_waiting(waiting, both, {"a": "x", "b": "y"}) == "b is busy", "the drained one takes no turn"
    assert schedule.why_waiting(waiting, [drained, device("b", BUSY)], {"b": "x"}) == "b is busy"


def test_cells_with_other_threads_are_considered_separately() -> None:
    known = [device("a", cores=2), device("b", cores=8)]
    waiting = [Waiting(f"c{threads}", selectors.parse(""), 0, (0, threads), threads=threads) for threads in (1, 8)]
    assert schedule.schedule(waiting, known) == [Assignment("c1", "a"), Assignment("c8", "b")]
