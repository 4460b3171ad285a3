"""Subscriptions: journaled events whole and in order, of everything else the latest."""

from __future__ import annotations

import pytest

from etfarm.server.jobs.records.watch import Announcer
from etfarm.v1.job_pb2 import Cell, Job, JobEvent, LogLine, Progress


@pytest.fixture
def announcer() -> Announcer:
    return Announcer()


def changed(sequence: int, cell: str = "c") -> JobEvent:
    return JobEvent(sequence=sequence, cell=Cell(id=cell))


def progress(phase: str, cell: str = "c", done: int | None = None, duration_ms: float | None = None) -> JobEvent:
    return JobEvent(progress=Progress(cell_id=cell, phase=phase, done=done, duration_ms=duration_ms))


def line(number: int) -> JobEvent:
    return JobEvent(log=LogLine(number=number))


async def test_the_newest_journaled_events_are_kept_in_order_for_a_slow_watcher(announcer: Announcer) -> None:
    with announcer.subscribe("j") as subscription:
        for number in range(5000):
            announcer.announce("j", changed(number))
        assert [event.sequence for event in await subscription.take()] == list(range(4000, 5000))


async def test_phases_that_an_agent_makes_up_do_not_grow_without_end(announcer: Announcer) -> None:
    with announcer.subscribe("j") as subscription:
        for number in range(20_000):
            announcer.announce("j", progress(f"PHASE_{number}"))
        reported = [event.progress.phase for event in await subscription.take()]
    assert (len(reported), reported[-1]) == (5000, "PHASE_19999")


async def test_of_progress_the_latest_of_each_phase_is_kept_and_ends_are_kept_apart(announcer: Announcer) -> None:
    with announcer.subscribe("j") as subscription:
        for done in range(100):
            announcer.announce("j", progress("TIMED", done=done))
        announcer.announce("j", progress("TIMED", duration_ms=3.0))
        announcer.announce("j", progress("TRACED"))
        announcer.announce("j", progress("TIMED", cell="other"))
        reported = [
            (e.progress.cell_id, e.progress.phase, e.progress.done, e.progress.duration_ms) for e in await subscription.take()
        ]
    assert reported == [("c", "TIMED", 99, 0), ("c", "TIMED", 0, 3.0), ("c", "TRACED", 0, 0), ("other", "TIMED", 0, 0)]


async def test_a_slow_watcher_misses_old_log_lines_only(announcer: Announcer) -> None:
    with announcer.subscribe("j") as subscription:
        for number in range(1, 2501):
            announcer.announce("j", line(number))
        assert [event.log.number for event in await subscription.take()] == list(range(1501, 2501))


async def test_progress_comes_before_the_change_that_follows_it(announcer: Announcer) -> None:
    with announcer.subscribe("j") as subscription:
        announcer.announce("j", progress("TO_EXECUTORCH", duration_ms=1.0))
        announcer.announce("j", changed(2))
        assert [event.WhichOneof("event") for event in await subscription.take()] == ["progress", "cell"]


async def test_a_new_watcher_gets_the_latest_progress_of_each_live_cell(announcer: Announcer) -> None:
    announcer.announce("j", progress("LOAD", "a"))
    announcer.announce("j", progress("TIMED", "a"))
    announcer.announce("j", progress("LOAD", "b"))
    announcer.announce("j", changed(1, "b"))
    announcer.announce("k", progress("LOAD", "z"))
    with announcer.subscribe("j") as subscription:
        assert [(event.progress.cell_id, event.progress.phase) for event in await subscription.take()] == [("a", "TIMED")]
    announcer.announce("j", JobEvent(sequence=2, job=Job(id="j")))
    with announcer.subscribe("j") as subscription:
        announcer.announce("j", line(1))
        assert [event.WhichOneof("event") for event in await subscription.take()] == ["log"]


async def test_every_subscription_of_a_job_hears_and_none_of_another(announcer: Announcer) -> None:
    with announcer.subscribe("j") as one, announcer.subscribe("j") as two, announcer.subscribe("k") as other:
        announcer.announce("j", changed(1))
        announcer.announce("k", changed(9))
        assert [[event.sequence for event in await each.take()] for each in (one, two, other)] == [[1], [1], [9]]
    announcer.announce("j", changed(2))
    assert announcer._subscriptions == {}
