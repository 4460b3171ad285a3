"""The rules of a device's health: faults that add up and fade, quarantine, and the way back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.devices.health import standing
from etfarm.server.devices.health.book import weight_of
from etfarm.server.devices.health.standing import (
    GOOD,
    QUARANTINED,
    SUSPECT,
    UNKNOWN,
    HealthPolicy,
    Standing,
    policy_of,
)
from etfarm.wire.errors import DeviceError, FarmError, UserError, error_of
from etfarm.wire.errors import Fault as Party
from tests.support.refusals import refuses

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
POLICY = HealthPolicy()
NEW = Standing(since=NOON)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def passed(known: Standing, at: datetime = NOON, slower: str = "") -> Standing:
    return standing.after_passed(known, slower, at, POLICY)


def failed(known: Standing, at: datetime = NOON) -> Standing:
    return standing.after_failed(known, "9 elements are wrong.", at, POLICY)


def fault(known: Standing, weight: float = 1.0, at: datetime = NOON) -> Standing:
    return standing.after_fault(known, weight, "The runner does not answer.", at, POLICY)


def test_a_new_device_is_unknown_until_a_health_run_passes() -> None:
    assert (NEW.state, standing.due(NEW, POLICY)) == (UNKNOWN, (NOON, standing.ENROLMENT))
    known = passed(NEW, after(5))
    assert (known.state, known.reason, known.since) == (GOOD, "", after(5))
    assert standing.due(known, POLICY) == (after(5 + 86_400), standing.PERIODIC)


def test_faults_lead_to_suspicion_and_then_to_quarantine() -> None:
    known = fault(passed(NEW))
    assert known.state == SUSPECT
    assert known.reason == "1 device fault, the last at 2026-06-01 12:00 UTC: The runner does not answer"
    assert fault(known).state == SUSPECT
    quarantined = fault(fault(known), at=after(1))
    assert quarantined.state == QUARANTINED
    assert quarantined.reason.startswith("3 device faults, the last at")
    assert standing.due(quarantined, POLICY) == (after(1 + POLICY.probe_s), standing.PROBE)


def test_lost_connections_count_less_than_a_failing_self_test() -> None:
    lost = error_of(Party.DEVICE, "ATTEMPT_LOST", "gone", metadata={"cause": "silent"})
    broken = error_of(Party.DEVICE, "DEVICE_SELF_TEST_FAILED", "broken")
    assert 0 < weight_of(lost) < 1 < weight_of(broken)
    known = passed(NEW)
    for _ in range(3):
        known = fault(known, weight_of(lost))
    assert known.state == GOOD
    assert fault(known, weight_of(lost)).state == SUSPECT, "but they add up"
    assert fault(passed(NEW), weight_of(broken)).state == SUSPECT


@pytest.mark.parametrize(
    "error",
    [
        UserError("The program crashed."),
        FarmError("The server has a bug."),
        error_of(Party.DEVICE, "ATTEMPT_LOST", "its agent was stopped", metadata={"cause": "stopped"}),
        error_of(Party.DEVICE, "ATTEMPT_LOST", "the server was away", metadata={"cause": "server-restart"}),
        error_of(Party.DEVICE, "DEVICE_OFFLINE", "It is offline."),
    ],
)
def test_what_is_not_the_devices_fault_costs_no_health(error: DeviceError) -> None:
    assert weight_of(error) == 0


def test_a_fault_fades_and_the_device_is_good_again_by_itself() -> None:
    suspect = fault(passed(NEW))
    assert suspect.score_at(after(POLICY.half_life_s), POLICY) == pytest.approx(0.5)
    settles_at = standing.settles_at(suspect, POLICY)
    assert settles_at is not None
    assert settles_at - after(POLICY.half_life_s) < timedelta(seconds=1)
    assert standing.settled(suspect, settles_at - timedelta(seconds=1), POLICY).state == SUSPECT
    recovered = standing.settled(suspect, settles_at, POLICY)
    assert (recovered.state, recovered.reason, recovered.faults) == (GOOD, "", 0)
    assert standing.settles_at(recovered, POLICY) is None


def test_a_clock_that_is_set_back_does_not_raise_the_score() -> None:
    assert fault(passed(NEW)).score_at(after(-3600), POLICY) == 1.0


def test_a_passed_health_run_halves_what_its_faults_weigh() -> None:
    known = passed(fault(passed(NEW), 1.5), after(1))
    assert (known.state, round(known.score, 2)) == (SUSPECT, 0.75)
    assert passed(known, after(2)).state == GOOD


def test_wrong_outputs_quarantine_at_once_and_good_runs_in_a_row_readmit() -> None:
    known = failed(passed(NEW), after(1))
    assert (known.state, known.since) == (QUARANTINED, after(1))
    assert known.reason == "its health run failed at 2026-06-01 12:00 UTC: 9 elements are wrong"
    known = passed(passed(known, after(40)), after(80))
    assert known.state == QUARANTINED
    known = failed(known, after(120))
    for seconds in (200, 240):
        known = passed(known, after(seconds))
        assert known.state == QUARANTINED, "the failure has begun a new sequence"
    known = passed(known, after(280))
    assert (known.state, known.reason, known.since, known.probe_at) == (GOOD, "", after(280), None)


def test_a_device_that_was_quarantined_for_faults_is_readmitted_with_few_of_them_left() -> None:
    known = NEW
    for _ in range(6):
        known = fault(known)
    assert known.state == QUARANTINED
    for _ in range(POLICY.good_runs):
        known = passed(known, after(60))
    assert known.state == GOOD
    assert fault(known, 0.3, after(60)).state == GOOD
    assert fault(known, 1.0, after(60)).state == SUSPECT


def test_only_scheduled_runs_and_requested_ones_in_their_place_count_for_the_pace_of_a_device() -> None:
    def why(trigger: standing.HealthRunTrigger.ValueType, known: Standing, hours: float, *, was_idle: bool = True) -> str | None:
        return standing.why_uncounted(known, trigger, after(hours * 3600), POLICY, was_idle=was_idle)

    known = passed(NEW)
    assert why(standing.ENROLMENT, NEW, 0) is None and why(standing.PERIODIC, known, 0, was_idle=False) is None
    assert why(standing.AFTER_FAULT, known, 24) == why(standing.PROBE, known, 24) == standing.UNSCHEDULED
    assert why(standing.REQUEST, NEW, 0) is None, "a first run"
    assert why(standing.REQUEST, NEW, 0, was_idle=False) == standing.NOT_IDLE
    assert why(standing.REQUEST, known, 11) == standing.UNSCHEDULED
    assert why(standing.REQUEST, known, 12) is None
    assert why(standing.REQUEST, known, 12, was_idle=False) == standing.NOT_IDLE
    assert HealthPolicy(interval_s=0).spacing_s == 43_200, "though no runs are scheduled"


def test_runs_that_do_not_count_put_off_no_scheduled_run() -> None:
    known = passed(NEW)
    due = standing.due(known, POLICY)
    for hours in range(1, 30):
        known = standing.after_passed(known, "", after(hours * 3600), POLICY, is_scheduled=False)
        assert standing.due(known, POLICY) == due
    unscheduled = standing.after_passed(NEW, "", NOON, POLICY, is_scheduled=False)
    assert (unscheduled.state, standing.due(unscheduled, POLICY)) == (GOOD, (NOON, standing.ENROLMENT))


def test_a_clock_that_was_ahead_blocks_no_probe_and_no_recovery() -> None:
    ahead = after(10 * 365 * 86_400)
    known = standing.corrected(failed(passed(NEW, ahead), ahead), NOON, POLICY)
    assert standing.due(known, POLICY) == (NOON, standing.PROBE)
    known = standing.corrected(fault(passed(NEW, ahead), at=ahead), NOON, POLICY)
    assert known.score_at(after(POLICY.half_life_s), POLICY) == pytest.approx(0.5)
    known = standing.corrected(passed(NEW, ahead), NOON, POLICY)
    assert standing.due(known, POLICY) == (after(86_400), standing.PERIODIC)
    usual = failed(fault(passed(NEW)), after(1))
    assert standing.corrected(usual, after(2), POLICY) == usual


def test_probes_of_a_failing_device_become_rarer_up_to_a_maximum() -> None:
    known, pauses = passed(NEW), []
    for _ in range(12):
        known = failed(known)
        due = standing.due(known, POLICY)
        assert due is not None
        pauses.append((due[0] - NOON).total_seconds())
    assert pauses[:4] == [30, 60, 120, 240]
    assert pauses[-1] == POLICY.max_probe_s


def test_an_admin_clears_everything_and_the_baseline_begins_anew() -> None:
    known = standing.cleared(failed(passed(NEW)), after(9))
    assert (known.state, known.reason, known.score, known.cleared_at) == (GOOD, "", 0.0, after(9))
    assert standing.cleared(fault(NEW), after(9)).state == UNKNOWN, "it has never been checked"


def test_a_device_that_is_slower_than_itself_is_suspect_until_it_is_not() -> None:
    known = passed(passed(NEW), after(1), slower="slower than itself: 41.2 us against 33 us, since 2026-05-28")
    assert (known.state, known.reason) == (SUSPECT, "slower than itself: 41.2 us against 33 us, since 2026-05-28")
    both = fault(known, at=after(2))
    assert both.reason == "1 device fault, the last at 2026-06-01 12:00 UTC: The runner does not answer; " + known.reason
    assert passed(known, after(3)).state == GOOD


def test_without_an_interval_only_quarantined_devices_are_probed() -> None:
    never = HealthPolicy(interval_s=0)
    assert standing.due(NEW, never) is None
    assert standing.due(standing.after_fault(NEW, 1.0, "", NOON, never), never) is None
    assert standing.due(standing.after_failed(NEW, "", NOON, never), never) == (after(30), standing.PROBE)


def test_a_fault_asks_for_a_health_run_at_once() -> None:
    assert standing.due(fault(passed(NEW), at=after(5)), POLICY) == (after(5), standing.AFTER_FAULT)


@given(st.lists(st.tuples(st.sampled_from(["fault", "pass", "fail", "clear", "settle"]), st.integers(0, 100_000)), max_size=30))
def test_whatever_happens_the_states_mean_what_they_say(steps: list[tuple[str, int]]) -> None:
    known, at = NEW, NOON
    for step, seconds in steps:
        at += timedelta(seconds=seconds)
        former = known
        match step:
            case "fault":
                known = fault(known, 1.0, at)
            case "pass":
                known = passed(known, at)
            case "fail":
                known = failed(known, at)
            case "clear":
                known = standing.cleared(known, at)
            case _:
                known = standing.settled(known, at, POLICY)
        assert bool(known.reason) == (known.state in (SUSPECT, QUARANTINED))
        assert known.since <= at
        assert (known.since == former.since) == (known.state == former.state) or known.since == at == former.since
        if former.state == QUARANTINED and known.state != QUARANTINED:
            assert step in ("pass", "clear")
        if known.state == GOOD:
            assert known.last_run_at is not None
            assert known.score_at(at, POLICY) < POLICY.suspect_at
        if known.state == QUARANTINED:
            due = standing.due(known, POLICY)
            assert due is not None and due[1] == standing.PROBE, "it can always come back"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"quarantine": 3}, "There is no health setting 'quarantine'"),
        ({"half_life_s": 0}, "half_life_s must be"),
        ({"good_runs": 1.5}, "good_runs must be a whole number"),
        ({"good_runs": True}, "good_runs must be"),
        ({"interval_s": float("nan")}, "interval_s must be"),
        ({"suspect_at": 4.0}, "suspect_at at most quarantine_at"),
        ({"probe_s": "30"}, "probe_s must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, object], why: str) -> None:
    with refuses("BAD_HEALTH_POLICY", match=why):
        policy_of(values)
