"""Servers and agents that stand still for longer than the keepalive, and links that are cut, stalled or slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from etfarm.client import Farm, Job
from etfarm.client.models import DeviceState, Event, JobState, Progress
from tests.support.farm import FarmProcess, etfarm, frozen, wait_until
from tests.support.programs import program
from tests.support.proxy import Link, link_to
from tests.support.receivers import receiver
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="waits until a frozen process counts as lost")

FAULTS: Final = ("cut", "stall", "slow")
BRIEF = {"iterations": 20, "warmup": 1, "min_time_s": 0.0, "profile": False, "threads": 1}
SECONDS = BRIEF | {"min_time_s": 2.0}
"""A run that a fault can hit in the middle."""
LOST_S = 60.0
"""For the pings of `etfarm.wire.channel`, 10 s without a message and 5 s without an answer, or for three missed heartbeats."""
TRYING_AGAIN = "Trying again."


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm with two agents, which soon places again what an agent that is away ran; notices may go to this machine."""
    serve = ["--patience", "5", "--webhook-allow", "127.0.0.1"]
    with FarmProcess(tmp_path_factory.mktemp("frozen"), serve=serve) as running:
        yield running.start(agents=2)


def bench(client: Farm, how: dict[str, Any], **more: Any) -> Job:
    return client.bench(program("conv").path, **how, **more)


def require_contiguous(events: Iterable[Event]) -> None:
    sequences = [event.sequence for event in events if event.sequence]
    assert sequences == list(range(1, len(sequences) + 1))


def test_the_run_of_a_frozen_agent_goes_elsewhere_and_its_late_result_is_dropped(farm: FarmProcess) -> None:
    results = farm.folder / "agent-0" / "results"
    with farm.client() as client, farm.admin() as admin:
        admin.drain_device("board-1")
        job = bench(client, SECONDS)
        until_phase(job, "TIMED")
        admin.undrain_device("board-1")
        with frozen([farm.agents[0].pid]):
            report = job.result().report
            assert report.device is not None and report.device.name == "board-1"
            assert client.device("board-0").state is DeviceState.OFFLINE
            events = [event for event in job.watch() if event.sequence]
        # Its runner went on: the agent has a result of an attempt that is over.
        assert wait_until(lambda: client.device("board-0").state is DeviceState.IDLE)
        assert bench(client, BRIEF, devices="name=board-0").wait() is JobState.SUCCEEDED
        assert wait_until(lambda: not list(results.iterdir()))
        assert [event for event in job.watch() if event.sequence] == events
        assert client.job(job.id).info.cells[0].attempts == 2
        assert job.result().report == report


def test_agents_and_watchers_of_a_frozen_server_come_back(farm: FarmProcess) -> None:
    assert farm.server is not None

    def tries() -> list[int]:
        return [agent.log.read_text().count(TRYING_AGAIN) for agent in farm.agents]

    with farm.client() as client:
        job = bench(client, SECONDS, devices="name=board-0")
        until_phase(job, "TIMED")
        events: list[Event] = []
        watcher = threading.Thread(target=lambda: events.extend(job.watch()), daemon=True)
        watcher.start()
        before = tries()
        with frozen([farm.server.pid]):
            assert wait_until(lambda: all(now > then for now, then in zip(tries(), before, strict=True)), LOST_S)
        assert job.result().report.state == "SUCCEEDED"
        watcher.join()
        require_contiguous(events)
        assert client.job(job.id).info.cells[0].attempts == 1
        assert wait_until(lambda: all(device.state is DeviceState.IDLE for device in client.devices()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_behind_a_bad_link_submits_once_and_sees_each_event_once(farm: FarmProcess, fault: str) -> None:
    with link_to(farm.address) as link, Farm(link.address) as client:
        with broken(link, fault):
            job = bench(client, SECONDS, name=f"behind-{fault}")
        events: list[Event] = []
        for event in job.watch():
            events.append(event)
            if isinstance(event, Progress) and event.phase == "TIMED" and event.done:
                break
        with broken(link, fault):
            events = list(job.watch())
        require_contiguous(events)
        assert job.result().report.state == "SUCCEEDED"
        assert [known.name for known in client.jobs(500)].count(f"behind-{fault}") == 1


def test_a_notice_arrives_once_over_each_bad_link(farm: FarmProcess, tmp_path: Path) -> None:
    assert farm.server is not None
    with receiver() as there, ExitStack() as closing:
        links = {fault: closing.enter_context(link_to(f"127.0.0.1:{there.port}")) for fault in FAULTS}
        for fault, link in links.items():
            fail(link, fault)
        with farm.client() as client:
            job = bench(client, BRIEF, notify=[f"http://{link.address}/{fault}" for fault, link in links.items()])
            assert job.wait() is JobState.SUCCEEDED
        log = farm.server.log
        assert wait_until(lambda: "a notice was not delivered" in log.read_text())
        for link in links.values():
            link.heal()
        received = [there.requests.get(timeout=LOST_S) for _ in FAULTS]

        def deliveries() -> list[dict[str, Any]]:
            command = ["webhooks", "deliveries", "--job", job.id, "--json", "-", "--server", farm.address]
            rows: list[dict[str, Any]] = json.loads(etfarm(*command, cwd=tmp_path).stdout)["deliveries"]
            return rows

        assert wait_until(lambda: {row["state"] for row in deliveries()} == {"DELIVERED"})
        assert there.requests.empty()
    assert sorted(request.path for request in received) == sorted(f"/{fault}" for fault in FAULTS)
    assert len({request.body for request in received}) == 1


def fail(link: Link, fault: str) -> None:
    """Cut, stall or slow a link."""
    {"cut": link.cut, "stall": link.stall, "slow": lambda: link.limit(2_000)}[fault]()


@contextmanager
def broken(link: Link, fault: str) -> Iterator[None]:
    """A link that is healed a second after it broke, whatever is done meanwhile."""
    fail(link, fault)
    healing = threading.Timer(1.0, link.heal)
    healing.start()
    try:
        yield
    finally:
        healing.join()
