"""Which cell goes to which device: properties of a pure function."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.server.devices.scheduling.board import Assignment, Board
from etfarm.server.devices.scheduling.ranking import AGEING_S, LEAD_S, LONGEST_OVERTAKEN_S, Shares, aged_priority, seniority_s
from etfarm.server.devices.scheduling.reasons import why_waiting
from etfarm.server.devices.scheduling.usage import HALF_LIFE_S, MAX_SENT, Ledger, SentPrograms, Usage
from etfarm.server.devices.scheduling.waiting import Waiting, open_to
from etfarm.server.devices.selection import select_devices
from etfarm.v1.common_pb2 import Error
from etfarm.v1.device_pb2 import Device, DeviceDrain, DeviceHealth, DeviceState, HealthState, Reservation
from etfarm.wire import selectors
from etfarm.wire.errors import Kind
from tests.support.golden import Golden
from tests.support.scheduling import schedule

IDLE, BUSY, OFFLINE, DRAINING, UNUSABLE = (
    DeviceState.DEVICE_STATE_IDLE,
    DeviceState.DEVICE_STATE_BUSY,
    DeviceState.DEVICE_STATE_OFFLINE,
    DeviceState.DEVICE_STATE_DRAINING,
    DeviceState.DEVICE_STATE_UNUSABLE,
)
GOOD, SUSPECT, QUARANTINED = (
    HealthState.HEALTH_STATE_GOOD,
    HealthState.HEALTH_STATE_SUSPECT,
    HealthState.HEALTH_STATE_QUARANTINED,
)
FULL = Error(reason="DEVICE_FULL", message="Its storage is full.", remedy="Make room on it.")
IDS = ["d0", "d1", "d2", "d3"]

devices = st.lists(
    st.builds(
        Device,
        id=st.sampled_from(IDS), arch=st.sampled_from(["aarch64", "x86_64"]), emulated=st.booleans(),
        state=st.sampled_from([IDLE, IDLE, BUSY, OFFLINE, DRAINING, UNUSABLE]), concurrent_runs=st.integers(-1, 3),
        health=st.builds(DeviceHealth, state=st.sampled_from([GOOD, GOOD, SUSPECT, QUARANTINED])),
        reservation=st.sampled_from([None, None, None, Reservation(id="r1")]),
    ),
    max_size=4, unique_by=lambda device: device.id,
)  # fmt: skip
rows = st.tuples(
    st.sampled_from(["", "arch=aarch64", "arch=x86_64", "id=d1", "emulated=false", "label.rack=1,arch=aarch64"]),
    st.integers(-1, 2),
    st.integers(0, 3), st.frozensets(st.sampled_from(IDS), max_size=2), st.booleans(), st.sampled_from(["ann", "bob"]),
    st.sampled_from(["", "p1", "p2"]), st.sampled_from(["", "", "r1"]), st.sampled_from([None, 10.0, 1e6]),
)  # fmt: skip


def waiting_of(number: int, row: tuple[Any, ...]) -> Waiting:
    text, priority, order, avoid, exclusive, owner, program, reservation, deadline_s = row
    return Waiting(
        f"c{number}", selectors.parse(text), priority, (order * 10**9, number), avoid, exclusive=exclusive, owner=owner,
        program=program, reservation=reservation, deadline_s=deadline_s,
    )  # fmt: skip


queues = st.lists(rows, max_size=7).map(lambda each: [waiting_of(number, row) for number, row in enumerate(each)])
usages = st.builds(
    Usage,
    lately=st.dictionaries(st.tuples(st.just("default"), st.sampled_from(["ann", "bob"])), st.floats(0, 1e5)),
    running=st.dictionaries(st.sampled_from(IDS), st.lists(st.booleans(), max_size=2)),
    sent=st.dictionaries(st.sampled_from(IDS), st.frozensets(st.sampled_from(["p1", "p2"]))),
)


@given(queues, devices, usages, st.randoms())
def test_equal_arguments_in_any_order_give_equal_answers(
    waiting: list[Waiting], known: list[Device], usage: Usage, random: Random
) -> None:
    answer = schedule(waiting, known, usage)
    random.shuffle(waiting)
    random.shuffle(known)
    assert schedule(waiting, known, usage) == answer


@given(queues, devices, usages)
def test_no_device_is_booked_twice_and_each_cell_gets_one_that_fits(
    waiting: list[Waiting], known: list[Device], usage: Usage
) -> None:
    answer = schedule(waiting, known, usage)
    by_id, by_cell = {device.id: device for device in known}, {cell.cell_id: cell for cell in waiting}
    assert len({each.cell_id for each in answer}) == len(answer)
    for device_id, device in by_id.items():
        placed = [by_cell[each.cell_id].exclusive for each in answer if each.device_id == device_id]
        running = [*usage.running.get(device_id, ()), *placed]
        if placed:
            assert device.state == IDLE or (device.state == BUSY and usage.running.get(device_id))
            assert len(running) == 1 or (not any(running) and len(running) <= device.concurrent_runs)
            assert device.health.state != QUARANTINED
    for each in answer:
        cell, device = by_cell[each.cell_id], by_id[each.device_id]
        assert cell.selector.matches(device)
        assert (device.reservation.id if device.HasField("reservation") else "") == cell.reservation


@given(queues, devices, usages)
def test_no_cell_waits_while_a_healthy_device_that_fits_is_idle(
    waiting: list[Waiting], known: list[Device], usage: Usage
) -> None:
    answer = schedule(waiting, known, usage)
    used = {each.device_id for each in answer} | {device_id for device_id, running in usage.running.items() if running}
    left = [device for device in known if device.state == IDLE and device.id not in used and device.health.state == GOOD]
    for cell in waiting:
        if cell.cell_id not in {each.cell_id for each in answer}:
            assert not any(cell.fits(device) for device in left)


lively_cells = st.lists(
    st.builds(
        lambda text, exclusive, owner, order: (text, 0, order, frozenset[str](), exclusive, owner, "", "", None),
        st.sampled_from(["", "id=d0", "id=d1"]), st.booleans(), st.sampled_from(["ann", "bob"]), st.integers(0, 9),
    ),
    min_size=8, max_size=12,
).map(lambda each: [waiting_of(number, row) for number, row in enumerate(each)])  # fmt: skip
healths = st.sampled_from([GOOD, GOOD, SUSPECT, QUARANTINED])


@settings(max_examples=150)
@given(lively_cells, st.data())
def test_changes_one_by_one_lead_to_what_a_new_board_decides(waiting: list[Waiting], data: st.DataObject) -> None:
    """After each change the board assigns what a new one with the same contents would, although it considers less."""
    board, added = Board(), iter(waiting)
    running: dict[str, list[bool]] = {device_id: [] for device_id in IDS[:3]}
    lately = {("default", "ann"): 500.0}
    for _ in range(data.draw(st.integers(15, 30))):
        change = data.draw(st.sampled_from(["add", "add", "put", "end", "end", "remove", "gone"]))
        device_id = data.draw(st.sampled_from(IDS[:3]))
        if change == "add" and (cell := next(added, None)) is not None:
            board.add(cell)
        elif change == "remove" and board.cells:
            board.remove(data.draw(st.sampled_from(sorted(board.cells))))
        elif change == "gone":
            board.discard(device_id)
        elif change == "put" or (change == "end" and running[device_id] and device_id in board.pool.records):
            if change == "end":
                running[device_id].pop()
            former = board.pool.records.get(device_id)
            state = former.device.health.state if change == "end" and former is not None else data.draw(healths)
            known = device(
                device_id, BUSY if running[device_id] else IDLE, concurrent_runs=2, health=health(state), labels={"n": device_id}
            )
            board.put(known, running[device_id])
        anew = schedule(
            list(board.cells.values()),
            [record.device for record in board.pool.records.values()],
            Usage(lately, {each: list(record.running) for each, record in board.pool.records.items()}),
        )
        assert board.assign(lately) == anew
        for each in anew:
            running[each.device_id] = list(board.pool.records[each.device_id].running)


@given(rows, rows, st.floats(0, 1e5), st.floats(0, 1e5), st.integers(1, 10**6))
def test_nobody_starves(old: tuple[Any, ...], new: tuple[Any, ...], old_use: float, new_use: float, later: int) -> None:
    """After the documented time no new cell goes first, whatever its priority, deadline or party's use."""
    start = 1_700_000_000
    submitted = round(start + LONGEST_OVERTAKEN_S) + later
    first = replace(waiting_of(0, old), priority=-100, order=(start * 10**9, 0), owner="ann", deadline_s=None)
    last = replace(waiting_of(1, new), priority=100, order=(submitted * 10**9, 1), owner="bob", deadline_s=submitted + 1.0)
    shares = Shares({("default", "ann"): old_use, ("default", "bob"): new_use})
    assert seniority_s(first) + shares.delay_s(first.party) < seniority_s(last) + shares.delay_s(last.party)


def cell(name: str = "c", text: str = "", priority: int = 0, order: tuple[int, int] = (0, 0), avoid: str = "") -> Waiting:
    return Waiting(name, selectors.parse(text), priority, order, frozenset(avoid.split()))


def device(name: str, state: DeviceState.ValueType = IDLE, **more: object) -> Device:
    return Device(id=name, name=name, state=state, **more)  # type: ignore[arg-type]


def test_priority_goes_before_age_and_age_before_the_rest() -> None:
    waiting = [cell("young", order=(9, 0)), cell("old", order=(1, 1)), cell("older", order=(1, 0)), cell("high", priority=1)]
    for count, first in enumerate(["high", "older", "old", "young"], 1):
        known = [device(f"d{number}") for number in range(count)]
        assert schedule(waiting, known)[-1].cell_id == first


@pytest.mark.parametrize(
    ("avoid", "chosen"),
    [("", "real-a"), ("real-a", "real-b"), ("real-a real-b", "emulated"), ("real-a real-b emulated", "real-a")],
)
def test_a_device_that_failed_the_cell_comes_last_then_an_emulated_one(avoid: str, chosen: str) -> None:
    known = [device("emulated", emulated=True), device("real-b"), device("real-a")]
    assert schedule([cell(avoid=avoid)], known) == [Assignment("c", chosen)]


def test_matching_takes_devices_that_are_offline_or_cannot_be_used_too_and_puts_emulated_ones_last() -> None:
    known = [device("a", emulated=True), device("d", UNUSABLE, problem=FULL), device("c", OFFLINE), device("b", BUSY)]
    assert [one.id for one in select_devices(selectors.parse(""), "", known)] == ["b", "c", "d", "a"]


@pytest.mark.remedy("NO_SUCH_DEVICE")
def test_no_match_is_refused_with_what_there_is(golden: Golden) -> None:
    known = [device("pi", OFFLINE, arch="aarch64", soc="BCM", cores=4), device("emu", emulated=True)]
    with golden.refuses("NO_SUCH_DEVICE") as refused:
        select_devices(selectors.parse("arch=riscv"), "arch=riscv", known)
    assert refused.value.kind is Kind.FAILED_PRECONDITION
    assert "emu" in refused.value.metadata["known"] and "offline" in refused.value.metadata["known"]
    with golden.refuses("NO_SUCH_DEVICE"):
        select_devices(selectors.parse(""), "", [])
    assert [one.id for one in select_devices(selectors.parse("arch=aarch64"), "arch=aarch64", known)] == ["pi"]


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
    assert why_waiting(cell(), known, busy) == says


def test_a_device_of_other_projects_does_not_exist_for_a_cell() -> None:
    theirs = device("a", projects=["audio"])
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0), project="vision")
    assert schedule([waiting], [theirs]) == []
    assert why_waiting(waiting, [theirs], {"a": "attempt"}) == "no known device matches any more"
    assert schedule([waiting], [theirs, device("b")]) == [Assignment("c", "b")]
    both = device("c", projects=["audio", "vision"])
    assert schedule([waiting], [theirs, both]) == [Assignment("c", "c")]
    assert open_to("vision", [theirs, both, device("b")]) == [both, device("b")]


def test_a_device_with_fewer_cpus_than_threads_gets_no_cell_and_is_named_to_waiting_cells() -> None:
    small, large = device("small", cores=2), device("large", BUSY, cores=8)
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0), threads=4)
    assert schedule([waiting], [small, large]) == []
    assert why_waiting(waiting, [small, large], {"large": "x"}) == ("large is busy; too few cpus for 4 threads: small has 2")
    assert why_waiting(waiting, [small], {}) == "too few cpus for 4 threads: small has 2"
    assert schedule([waiting], [small, device("large", cores=8)]) == [Assignment("c", "large")]
    assert schedule([Waiting("c", selectors.parse(""), 0, (0, 0), threads=2)], [small]) == [Assignment("c", "small")]
    assert schedule([waiting], [device("unknown")]) == [Assignment("c", "unknown")], "its cpus are not known"


def test_a_drained_device_gets_no_cell_and_its_reason_is_told() -> None:
    drained = device("a", DRAINING, drain=DeviceDrain(reason="new cable"))
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0))
    assert schedule([waiting], [drained]) == []
    assert why_waiting(waiting, [drained], {}) == "a is drained: new cable"
    drained.drain.reason = ""
    assert why_waiting(waiting, [drained], {}) == "a is drained"
    both = [drained, device("b", BUSY)]
    assert why_waiting(waiting, both, {"a": "x", "b": "y"}) == "b is busy", "the drained one takes no turn"
    assert why_waiting(waiting, [drained, device("b", BUSY)], {"b": "x"}) == "b is busy"


def test_cells_with_other_threads_are_considered_separately() -> None:
    known = [device("a", cores=2), device("b", cores=8)]
    waiting = [Waiting(f"c{threads}", selectors.parse(""), 0, (0, threads), threads=threads) for threads in (1, 8)]
    assert schedule(waiting, known) == [Assignment("c1", "a"), Assignment("c8", "b")]


def at(second: float) -> int:
    return round(second * 1e9)


def test_a_waiting_cell_gains_a_level_of_priority_in_ten_minutes() -> None:
    old = Waiting("old", selectors.parse(""), 0, (at(0), 0))
    within, after = (Waiting("new", selectors.parse(""), 1, (at(AGEING_S + each), 1)) for each in (-1, 1))
    assert schedule([old, within], [device("a")]) == [Assignment("new", "a")]
    assert schedule([old, after], [device("a")]) == [Assignment("old", "a")]
    assert aged_priority(old, 3 * AGEING_S) == pytest.approx(3)


def test_the_nearer_a_deadline_the_sooner() -> None:
    now_s = 10 * LEAD_S
    waiting = [
        Waiting(name, selectors.parse(""), 0, (at(now_s + number), number), deadline_s=deadline_s)
        for number, (name, deadline_s) in enumerate(
            [("none", None), ("tomorrow", now_s + 1.9 * LEAD_S), ("soon", now_s + 60), ("later", now_s + 3600)]
        )
    ]
    known: list[Device] = []
    for count, last in enumerate(["soon", "later", "none", "tomorrow"], 1):
        known.append(device(f"d{count}"))
        assert {each.cell_id for each in schedule(waiting, known)} - {each.cell_id for each in schedule(waiting, known[:-1])} == {
            last
        }
    late = datetime.fromtimestamp(now_s + 61, UTC)
    assert "soon" not in {each.cell_id for each in schedule(waiting, [*known, device("d5")], now=late)}


def queued(owner: str, count: int, project: str = "default", start: int = 0) -> list[Waiting]:
    return [
        Waiting(f"{owner}-{number}", selectors.parse(""), 0, (at(start + number), number), owner=owner, project=project)
        for number in range(count)
    ]


def owners(assignments: list[Assignment]) -> list[str]:
    return [each.cell_id.partition("-")[0] for each in assignments]


def test_owners_take_turns_however_many_cells_the_first_one_has() -> None:
    known = [device(f"d{number}") for number in range(8)]
    placed = owners(schedule([*queued("ann", 50), *queued("bob", 50, start=100)], known))
    assert (placed.count("ann"), placed.count("bob")) == (4, 4)


def test_projects_share_before_owners_do() -> None:
    known = [device(f"d{number}") for number in range(8)]
    waiting = [*queued("ann", 9, "audio"), *queued("bob", 9, "audio"), *queued("cid", 9, "vision")]
    placed = owners(schedule(waiting, known))
    assert placed.count("cid") in (3, 4) and {placed.count("ann"), placed.count("bob")} <= {2, 3}


def test_who_used_devices_lately_comes_later_until_that_is_forgotten() -> None:
    ledger = Ledger()
    ledger.begin("a1", ("default", "ann"), 0.0)
    ledger.end("a1", 3600.0)
    waiting = [*queued("ann", 1), *queued("bob", 1, start=600)]
    used = ledger.lately(3600.0)
    assert used == {("default", "ann"): 3600.0}
    assert schedule(waiting, [device("a")], Usage(used)) == [Assignment("bob-0", "a")]
    assert ledger.lately(3600.0 + HALF_LIFE_S) == {("default", "ann"): pytest.approx(1800.0)}
    assert ledger.lately(0.0) == {("default", "ann"): 3600.0}, "a clock that was set back adds nothing"
    forgotten = ledger.lately(3600.0 + 20 * HALF_LIFE_S)
    assert forgotten == {}
    assert schedule(waiting, [device("a")], Usage(forgotten)) == [Assignment("ann-0", "a")]


def test_a_run_counts_from_its_start_and_the_ledger_is_bounded() -> None:
    ledger = Ledger()
    ledger.begin("a1", ("default", "ann"), 100.0)
    assert ledger.lately(101.0) == {("default", "ann"): 60.0}
    assert ledger.lately(400.0) == {("default", "ann"): 300.0}
    ledger.end("unknown", 400.0)
    sent = SentPrograms()
    for number in range(MAX_SENT + 5):
        sent.add("a", [f"p{number}"])
    assert len(sent.of("a")) == MAX_SENT and "p0" not in sent.of("a") and sent.of("b") == frozenset()


def test_of_equal_devices_the_one_with_the_program_is_used() -> None:
    known = [device("a"), device("b"), device("c", emulated=True)]
    waiting = Waiting("c", selectors.parse(""), 0, (0, 0), program="p1")
    for sent, chosen in (
        ({}, "a"), ({"b": {"p1"}}, "b"), ({"b": {"other"}}, "b"), ({"a": {"other"}, "b": {"p1"}}, "b"), ({"c": {"p1"}}, "a"),
        ({"a": {"p1"}, "b": {"p1"}}, "a"),
    ):  # fmt: skip
        assert schedule([waiting], known, Usage(sent=sent)) == [Assignment("c", chosen)], sent


def health(state: HealthState.ValueType, reason: str = "") -> DeviceHealth:
    return DeviceHealth(state=state, reason=reason)


def test_a_quarantined_device_is_never_used_and_a_suspect_one_if_no_healthy_one_matches() -> None:
    sick, odd = device("a", health=health(QUARANTINED, "3 faults")), device("b", health=health(SUSPECT, "slower than itself"))
    assert schedule([cell()], [sick]) == []
    assert why_waiting(cell(), [sick], {}) == "a is quarantined: 3 faults"
    assert schedule([cell()], [sick, odd]) == [Assignment("c", "b")]
    busy = device("c", BUSY)
    assert schedule([cell()], [sick, odd, busy]) == []
    assert why_waiting(cell(), [sick, odd, busy], {"c": "x"}) == (
        "c is busy; b is used only if no healthy device matches: slower than itself"
    )
    assert schedule([cell()], [odd, device("c", OFFLINE)]) == [Assignment("c", "b")], "it may be offline for weeks"
    assert schedule([cell(avoid="c")], [odd, busy]) == [Assignment("c", "b")], "the other has failed the cell"
    assert schedule([cell()], [odd, device("d", emulated=True)]) == [Assignment("c", "d")]


def test_a_suspect_device_is_used_once_the_healthy_one_is_quarantined() -> None:
    board = Board()
    board.put(device("odd", health=health(SUSPECT)))
    board.put(device("well", BUSY), [True])
    board.add(cell())
    assert board.assign({}) == []
    board.put(device("well", BUSY, health=health(QUARANTINED)), [True])
    assert board.assign({}) == [Assignment("c", "odd")]


def test_a_reserved_device_is_for_its_reservation_and_a_reservation_for_its_devices() -> None:
    held = device("a", reservation=Reservation(id="r1"))
    held.reservation.expire_time.FromDatetime(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    holder, other = replace(cell("holder"), reservation="r1"), cell("other")
    assert schedule([other], [held]) == []
    assert why_waiting(other, [held], {}) == "a is reserved until 2026-01-02 03:04:05 UTC"
    assert schedule([other, holder], [held, device("b")]) == [Assignment("holder", "a"), Assignment("other", "b")]
    assert schedule([holder], [device("b")]) == []
    assert why_waiting(holder, [device("b")], {}) == "no device of the reservation r1 matches"
    foreign = device("c", reservation=Reservation(id=""))
    assert schedule([other], [foreign]) == [], "an empty id is no permission"


def shared(name: str, order: int = 0, text: str = "") -> Waiting:
    return Waiting(name, selectors.parse(text), 0, (at(order), order), exclusive=False)


def test_unmeasured_runs_share_a_device_that_allows_it() -> None:
    board = device("a", concurrent_runs=3)
    waiting = [shared(f"c{number}", number) for number in range(5)]
    assert [each.cell_id for each in schedule(waiting, [board])] == ["c0", "c1", "c2"]
    two = Usage(running={"a": [False, False]})
    board.state = BUSY
    assert [each.cell_id for each in schedule(waiting, [board], two)] == ["c0"]
    assert schedule([cell()], [board], two) == [], "a measurement is alone"
    assert schedule(waiting, [board], Usage(running={"a": [True]})) == [], "nothing joins a measurement"
    assert schedule(waiting, [device("b", BUSY)], Usage(running={"b": [False]})) == []
    idle = device("b")
    assert schedule([shared("c0")], [board, idle], two) == [Assignment("c0", "a")], "the idle one stays for measurements"


def test_a_stream_of_unmeasured_runs_does_not_starve_a_measurement() -> None:
    board = device("a", BUSY, concurrent_runs=3)
    measurement = Waiting("m", selectors.parse(""), 0, (at(5), 5))
    before, after = shared("before", 1), shared("after", 9)
    assert schedule([measurement, after], [board], Usage(running={"a": [False]})) == []
    assert schedule([measurement, before, after], [board], Usage(running={"a": [False]})) == [Assignment("before", "a")]
    other = device("b", BUSY, concurrent_runs=3)
    use = Usage(running={"a": [False, False], "b": [False]})
    assert schedule([measurement, after], [board, other], use) == [Assignment("after", "a")], "it keeps the other one"
    board.state = IDLE
    assert schedule([measurement, after], [board]) == [Assignment("m", "a")]


def test_many_devices_are_counted_instead_of_named() -> None:
    many = [device(f"d{number}", BUSY) for number in range(20)]
    assert why_waiting(cell(), many, {each.id: "x" for each in many}) == "20 devices that match are busy"
    drained = [device(f"d{number}", DRAINING) for number in range(5)]
    assert why_waiting(cell(), drained, {}) == "d0 is drained; d1 is drained; d2 is drained; and so on for 2 more"
