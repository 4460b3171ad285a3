"""A farm whose S3 server is slow, fails or is away while jobs run: calls end with an error, and jobs go on afterwards."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from etfarm.client.models import DeviceState, JobState
from tests.support import models
from tests.support.clock import skewed_by
from tests.support.credentials import ADMIN, Credentials
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.farm_calls import farm_calls
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.s3 import S3Server, reach
from tests.support.s3_proxy import S3Proxy, proxy_to
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="starts an S3 server, and breaks farms of its own")

LONG = {"threads": [1], "iterations": 50, "min_time_s": 2.0}
SHORT = {"threads": [1], "iterations": 20, "warmup": 2, "min_time_s": 0.01}
AWAY = "the artifacts' S3 server is unavailable; trying again"


@dataclass
class Shaken:
    """A farm, and the proxy between its server and the S3 server."""

    farm: FarmProcess
    proxy: S3Proxy
    serve: list[str]
    """The options of its server."""

    @property
    def log(self) -> str:
        assert self.farm.server is not None
        return self.farm.server.log.read_text()

    def forget_copies(self) -> None:
        """Restart the server without its copies of artifacts."""
        assert self.farm.server is not None
        self.farm.server.stop()
        shutil.rmtree(self.farm.folder / "server" / "artifacts" / "cache")
        self.farm.restart()

    def check(self, job_id: str) -> None:
        """Check that a job has succeeded with one attempt, and that no artifact is missing or damaged."""
        with self.farm.client() as client:
            (report,) = client.job(job_id).result().reports
            assert report.state == "SUCCEEDED", report.error
            assert client.job(job_id).info.cells[0].attempts == 1
        assert Credentials.in_use is not None
        environment = Credentials.in_use.environment(ADMIN) | {"ETFARM_SERVER": self.farm.address}
        done = etfarm("artifacts", "verify", cwd=self.farm.folder, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def shaken(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shaken]:
    with proxy_to(s3_server.address) as proxy:
        location = s3_server.new_location(proxy.address)
        reach(location, monkeypatch)
        serve = ["--blobs", location.url, "--blobs-wait", "1"]
        farm = FarmProcess(tmp_path, serve=serve)
        try:
            yield Shaken(farm, proxy, serve)
        finally:
            proxy.heal()
            farm.stop()


async def put_bytes(farm: FarmProcess, data: bytes) -> None:
    async with farm_calls(farm.address) as calls:
        await calls.put(data)


async def test_a_result_waits_for_the_s3_server_and_calls_do_not(shaken: Shaken) -> None:
    shaken.farm.start()
    with shaken.farm.client() as client:
        job = client.bench(program("conv").path, **LONG)
        until_phase(job, "TIMED")
        shaken.proxy.refuse_all()
        error = await refusal(put_bytes(shaken.farm, b"new" * 1000))
        assert (error.reason, error.metadata["why"]) == ("BLOBS_UNAVAILABLE", "SlowDown")
        agent = shaken.farm.agents[0]
        assert wait_until(lambda: "a transfer was cut (UNAVAILABLE)" in agent.log.read_text()), agent.log.read_text()
        shaken.proxy.heal()
        job.result()
        await put_bytes(shaken.farm, b"new" * 1000)
    shaken.check(job.id)


def test_a_program_waits_for_the_s3_server(shaken: Shaken) -> None:
    (agent,) = shaken.farm.start().agents
    agent.stop()
    with shaken.farm.client() as client:
        job = client.bench(program("add").path, **SHORT)
        until_phase(job, "WAIT_FOR_DEVICE")
    shaken.forget_copies()
    shaken.proxy.refuse_all()
    agent.start()
    assert wait_until(lambda: "a transfer was cut (UNAVAILABLE)" in agent.log.read_text()), agent.log.read_text()
    shaken.proxy.heal()
    shaken.check(job.id)


def test_a_compilation_waits_for_the_s3_server(shaken: Shaken, tmp_path: Path) -> None:
    shaken.farm.start()
    with shaken.farm.client() as client:
        job = client.bench(models.save(models.conv, tmp_path / "conv.pt2"), **SHORT)
        until_phase(job, "TO_EDGE_TRANSFORM_AND_LOWER")
        shaken.proxy.answer_503("PUT")
        assert wait_until(lambda: AWAY in shaken.log), shaken.log
        shaken.proxy.heal()
    shaken.check(job.id)


FAULTS: dict[str, Callable[[S3Proxy], None]] = {
    "slow": lambda proxy: proxy.stall(),
    "cut": lambda proxy: [proxy.cut(method, 20) for method in ("GET", "PUT")] and None,
    "503": lambda proxy: [proxy.answer_503(method, 5) for method in ("GET", "PUT", "HEAD")] and None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_goes_on_after_a_fault(shaken: Shaken, fault: str) -> None:
    shaken.farm.start()
    with shaken.farm.client() as client:
        job = client.bench(program("conv").path, **LONG)
        until_phase(job, "TIMED")
        before = len(shaken.proxy.requests)
        FAULTS[fault](shaken.proxy)
        assert wait_until(lambda: len(shaken.proxy.requests) > before + (0 if fault == "slow" else 4))
        shaken.proxy.heal()
        job.result()
    shaken.check(job.id)


def test_a_server_starts_while_its_bucket_is_away(shaken: Shaken) -> None:
    """It lists, cancels and leads the agents on; a result waits at its agent, and nothing fails."""
    shaken.farm.start(agents=1)
    with shaken.farm.client() as client:
        job = client.bench(program("conv").path, **LONG)
        until_phase(job, "TIMED")
        waiting = client.bench(program("add").path, **SHORT)
    shaken.farm.kill9()
    shaken.proxy.refuse_all()
    before = len(shaken.proxy.requests)
    shaken.farm.restart()
    assert "starting without the artifacts' S3 server" in shaken.log and "SlowDown" in shaken.log
    with shaken.farm.client() as client:
        assert wait_until(lambda: any("owner" in request for request in shaken.proxy.requests[before:]))
        assert wait_until(lambda: [device.state for device in client.devices()] == [DeviceState.BUSY])
        client.job(waiting.id).cancel()
        states = {each.id: each.state for each in client.jobs()}
        assert states == {job.id: JobState.RUNNING, waiting.id: JobState.CANCELLED}
    shaken.proxy.heal()
    shaken.check(job.id)


async def test_a_wrong_clock_counts_as_an_s3_server_that_is_away(shaken: Shaken) -> None:
    """S3 servers refuse signatures that are a quarter of an hour off."""
    with FarmProcess(shaken.farm.folder, serve=shaken.serve, environment=skewed_by(3600)) as wrong:
        wrong.restart()
        await asyncio.to_thread(wrong.create_projects)
        error = await refusal(put_bytes(wrong, b"new" * 1000))
    assert error.reason == "BLOBS_UNAVAILABLE" and "the clock of the farm's server differs too much" in error.message
    assert "set the clock of the farm's server" in error.remedy
    shaken.farm.restart()
    await put_bytes(shaken.farm, b"new" * 1000)
