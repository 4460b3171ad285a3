"""Attempts on devices: they outlive connections, end once, and are given up only for a reason."""

from __future__ import annotations

import asyncio

import pytest

from etfarm.server.devices.runs import AttemptLost, Runs
from etfarm.v1.agent_pb2 import CandidateResult, RunProgress, RunResult
from etfarm.wire.errors import Fault
from tests.support.golden import Golden
from tests.support.refusals import refuses

FOREVER_S = 3600.0
AT_ONCE_S = 0.001
WAIT_S = 60.0


def ignore(progress: RunProgress) -> None:
    """Ignore progress."""


def begun(patience_s: float = FOREVER_S) -> Runs:
    runs = Runs(patience_s)
    runs.begin("a1", "pi", ignore, sent=True)
    return runs


async def result(runs: Runs, attempt: str = "a1") -> RunResult:
    async with asyncio.timeout(WAIT_S):
        return await runs.result(attempt)


def is_pending(runs: Runs) -> bool:
    """Whether nothing has come of the attempt yet; what would, has been set synchronously."""
    return not runs._runs["a1"].result.done()


async def test_an_attempt_occupies_its_device_until_it_ends() -> None:
    runs = begun()
    assert runs.on_device("pi") == ["a1"]
    assert runs.on_device("other") == []
    assert runs.busy() == {"pi": "a1"}
    assert runs.knows("a1")
    runs.end("a1")
    runs.end("a1")
    assert runs.busy() == {}
    assert not runs.knows("a1")


async def test_the_first_delivery_counts_and_a_second_changes_nothing() -> None:
    runs = begun()
    assert runs.deliver(RunResult(attempt_id="a1", device_id="pi", candidates=[CandidateResult(cell_id="c")]))
    assert runs.deliver(RunResult(attempt_id="a1", device_id="pi"))
    assert [one.cell_id for one in (await result(runs)).candidates] == ["c"]


async def test_an_agent_that_comes_back_without_the_attempt_has_lost_it(golden: Golden) -> None:
    runs = begun()
    runs.device_went("pi")
    runs.reconcile({"pi", "other"}, {"a2"})
    with golden.refuses("ATTEMPT_LOST") as lost:
        await result(runs)
    assert lost.value.fault is Fault.DEVICE
    assert lost.value.metadata == {"device": "pi", "attempt": "a1", "cause": "server-restart"}  # this server did not send it


async def test_another_agents_hello_says_nothing_of_the_attempt() -> None:
    runs = begun()
    runs.reconcile({"other"}, set())
    assert is_pending(runs)


async def test_a_device_that_stays_away_longer_than_the_patience_has_lost_it(golden: Golden) -> None:
    runs = begun(AT_ONCE_S)
    runs.device_went("pi")
    with golden.refuses("ATTEMPT_LOST"):
        await result(runs)
    assert runs.on_device("pi") == ["a1"], "the device is free only when the attempt was ended"


async def test_patience_is_counted_anew_after_each_return() -> None:
    runs = begun(AT_ONCE_S)
    for _ in range(3):
        runs.device_went("pi")
        runs.reconcile({"pi"}, {"a1"})
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    # Timers fire in the order of their times: this one after any that was left running.
    loop.call_later(20 * AT_ONCE_S, passed.set_result, None)
    await passed
    assert is_pending(runs)
    runs.device_went("pi")
    with pytest.raises(AttemptLost):
        await result(runs)


async def test_a_second_break_does_not_prolong_the_patience_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = begun()
    timers: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda delay, *rest: (timers.append(delay), later(delay, *rest))[1])
    runs.device_went("pi")
    runs.device_went("pi")
    runs.device_went("other")
    assert timers == [FOREVER_S]


async def test_a_result_that_came_before_the_loss_stays() -> None:
    runs = begun()
    runs.deliver(RunResult(attempt_id="a1", device_id="pi"))
    runs.reconcile({"pi"}, set())
    assert (await result(runs)).attempt_id == "a1"


async def test_the_end_of_an_attempt_ends_its_patience() -> None:
    runs = begun()
    runs.device_went("pi")
    timer = runs._runs["a1"].giving_up
    assert timer is not None
    runs.end("a1")
    assert timer.cancelled()


async def test_a_run_that_was_not_sent_yet_cannot_be_lost() -> None:
    runs = Runs(AT_ONCE_S)
    runs.begin("a1", "pi", ignore)
    runs.device_went("pi")
    runs.reconcile({"pi"}, set())
    assert is_pending(runs) and runs._runs["a1"].giving_up is None
    runs.mark_sent("a1")
    runs.reconcile({"pi"}, set())
    with pytest.raises(AttemptLost):
        await result(runs)


async def test_progress_and_results_count_for_their_own_attempt_and_from_its_device_only() -> None:
    reported: list[str] = []
    runs = Runs(FOREVER_S)
    runs.begin("a1", "pi", lambda progress: reported.append(progress.phase), sent=True)
    for attempt, device, phase in (("a1", "pi", "LOAD"), ("a2", "pi", "WARMUP"), ("a1", "other", "TIMED")):
        runs.progressed(RunProgress(attempt_id=attempt, device_id=device, phase=phase))
    assert reported == ["LOAD"]
    assert not runs.deliver(RunResult(attempt_id="never"))
    assert not runs.deliver(RunResult(attempt_id="a1", device_id="other"))
    assert is_pending(runs) and not runs.has_answer("a1")


@pytest.mark.remedy("ATTEMPT_NOT_RESUMED")
async def test_the_files_of_an_attempt_are_given_once_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etfarm.server.devices.runs.PERMIT_TIMEOUT_S", AT_ONCE_S)
    runs = begun()
    with refuses("ATTEMPT_NOT_RESUMED"):
        await runs.is_permitted("d", lambda _: True)
    runs.permit("a1", ["d"])
    assert await runs.is_permitted("d", lambda _: True)
