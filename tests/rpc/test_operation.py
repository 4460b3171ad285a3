"""A server that is operated: metrics, traces and logs of a job, and a stop in the middle of it, on real processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from etfarm.v1 import job_pb2, session_pb2
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support import models
from tests.support.contract import call
from tests.support.farm import FarmProcess, serve, wait_until
from tests.support.farm_calls import FarmCalls
from tests.support.programs import program
from tests.support.receivers import Receiver, receiver, status
from tests.support.refusals import refusal
from tests.support.runner import runner_archive
from tests.support.session_ends import Caller, session_on, welcomed
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="stops servers in the middle of a measurement")

LONG = {"iterations": 100, "min_time_s": 2.0}


class Collector:
    """An OpenTelemetry collector on loopback."""

    def __init__(self, running: Receiver) -> None:
        self._running = running
        self.url = running.url("/v1/traces")

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(received.body) for received in self._running.requests.queue]
        return [span for request in requests for of in request.resource_spans for each in of.scope_spans for span in each.spans]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with receiver(status(200, "")) as running:
        yield Collector(running)


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[FarmProcess]:
    """A farm with everything on, whose server tells the test what it would tell systemd."""
    folder = tmp_path_factory.mktemp("operated")
    config = folder / "farm.toml"
    config.write_text(
        f'metrics = "127.0.0.1:0"\nlog-format = "json"\notlp = "{collector.url}"\ndrain-timeout = 120\npatience = 600\n'
    )
    farm = FarmProcess(folder, serve=["--config", str(config)])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        environment.setenv("WATCHDOG_USEC", "1000000")
        try:
            farm.restart()
            with farm.client() as client:
                client.add_bundle(runner_archive())
            farm.add_agent("--log-format", "json")
            yield farm
        finally:
            farm.stop()


def page(farm: FarmProcess, path: str) -> tuple[int, str]:
    assert farm.server is not None
    line = next(line for line in farm.server.lines if "metrics on" in line)
    try:
        with urllib.request.urlopen(f"http://{line.rpartition(' ')[2]}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, each of which must be JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


async def refusal_of_jobs(farm: FarmProcess) -> EtfarmError:
    """Return how the server refuses a new job."""
    async with open_channel(Access(farm.address)) as channel:
        request = job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="another")
        return await refusal(call(channel, "JobService.Submit", request))


@pytest.mark.remedy("SERVER_STOPPING")
async def test_a_job_is_in_metrics_logs_and_traces_and_ends_while_the_server_drains(
    operated: FarmProcess, collector: Collector
) -> None:
    server = operated.server
    assert server is not None
    assert page(operated, "/readyz") == (200, "ok\n")
    with operated.client() as farm:
        job = farm.bench(program("conv").path, name="drained", **LONG)
        until_phase(job, "TIMED")
        status, text = page(operated, "/metrics")
        assert status == 200
        assert 'etfarm_cells{project="default",state="RUNNING"} 1.0' in text
        assert 'etfarm_devices{health="UNKNOWN",state="BUSY"} 1.0' in text
        assert re.search(r'etfarm_rpcs_total\{code="OK",rpc="JobService.Submit"\} \d', text)
        server.signal(signal.SIGTERM)
        server.expect("finishing 1 cell, for up to 120 s")
        assert page(operated, "/readyz") == (503, "stopping\n")
        refused = await refusal_of_jobs(operated)
        assert (refused.reason, refused.kind.value) == ("SERVER_STOPPING", "UNAVAILABLE")
        assert farm.info().is_stopping
        assert 'etfarm_rpcs_total{code="UNAVAILABLE",rpc="JobService.Submit"} 1.0' in page(operated, "/metrics")[1]
    assert server.process is not None
    assert server.process.wait(timeout=60) == 0

    spans = {span.name: span for span in collector.spans()}
    assert {"submit", "cell", "attempt", "job", "server WAIT_FOR_DEVICE", "device TIMED"} <= spans.keys()
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["device TIMED"].parent_span_id == spans["attempt"].span_id
    timed = spans["device TIMED"]
    assert spans["job"].start_time_unix_nano < timed.start_time_unix_nano < timed.end_time_unix_nano
    assert timed.end_time_unix_nano - timed.start_time_unix_nano > 1.9e9

    begins = next(each for each in records(server.log) if each["message"] == "an attempt begins")
    assert begins.keys() >= {"job", "cell", "attempt", "device", "request", "principal", "timestamp", "level"}
    submitted = next(each for each in records(server.log) if each.get("rpc") and each["request"] == begins["request"])
    assert (submitted["rpc"], submitted["principal"], submitted["code"]) == ("JobService.Submit", "local", "OK")
    of_agent = [each for each in records(operated.agents[0].log) if each.get("attempt") == begins["attempt"]]
    assert of_agent and all((each["cell"], each["device"]) == (begins["cell"], begins["device"]) for each in of_agent)

    operated.restart()
    operated.agents[0].expect("connected to")
    with operated.client() as farm:
        assert farm.job(job.id).result().report.state == "SUCCEEDED"
        assert farm.job(job.id).info.cells[0].attempts == 1
        assert farm.bench(program("conv").path, iterations=1, profile=False).result().report.state == "SUCCEEDED"


def test_a_second_signal_stops_at_once_and_the_next_server_finishes_the_job(operated: FarmProcess) -> None:
    server = operated.server
    assert server is not None
    with operated.client() as farm:
        job = farm.bench(program("conv").path, **LONG)
        until_phase(job, "TIMED")
        server.signal(signal.SIGTERM)
        server.expect("finishing 1 cell")
        server.signal(signal.SIGTERM)
        assert server.process is not None
        assert server.process.wait(timeout=15) == 0
        operated.restart()
        operated.agents[0].expect("connected to")
        assert job.result().report.state == "SUCCEEDED"
        assert farm.job(job.id).info.cells[0].attempts == 1


def test_each_metric_that_counts_counts_something_of_a_job(operated: FarmProcess, tmp_path: Path) -> None:
    with operated.client() as farm:
        assert farm.bench(models.save(models.conv, tmp_path / "conv.pt2"), iterations=1).result().report.state == "SUCCEEDED"
    families = [*text_string_to_metric_families(page(operated, "/metrics")[1])]
    counting = [each for each in families if each.name.startswith("etfarm_") and each.type in ("counter", "histogram")]
    counted = {each.name for each in counting if any(sample.value > 0 for sample in each.samples)}
    assert {each.name for each in counting} == counted
    assert len(counted) >= 10


def test_the_service_manager_hears_of_the_start_the_life_and_the_stop(operated: FarmProcess) -> None:
    assert operated.server is not None
    assert operated.server.stop() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(operated.folder / "notify"))
        manager.settimeout(30)
        operated.restart()
        assert manager.recv(4096) == f"READY=1\nSTATUS=listening on {operated.address}".encode()
        assert manager.recv(4096) == b"WATCHDOG=1"
        operated.server.signal(signal.SIGTERM)
        messages: list[bytes] = []
        assert wait_until(lambda: messages.append(manager.recv(4096)) or messages[-1].startswith(b"STOPPING=1"))
        assert b"EXTEND_TIMEOUT_USEC=" in messages[-1]
        assert operated.server.process is not None
        assert operated.server.process.wait(timeout=60) == 0


async def test_a_call_of_a_session_is_answered_before_the_server_stops(operated: FarmProcess) -> None:
    assert operated.server is not None
    operated.server.stop()
    operated.restart()
    assert operated.server.process is not None
    async with open_channel(Access(operated.address)) as channel:
        agent = await welcomed(channel, "played")
        wanted = session_on(agent, await FarmCalls(channel).put(program("add").bytes))
        caller = Caller(channel, wanted)
        serving = agent.serve(await agent.started())
        await caller.event("ready")
        calling = caller.call("x")
        sent = await serving.call()
        operated.server.signal(signal.SIGTERM)
        await asyncio.to_thread(operated.server.expect, "finishing 1 call of a session")
        refused = Caller(channel, session_pb2.OpenSessionRequest(program=wanted.program))
        assert (await refusal(refused.events.read())).reason == "SERVER_STOPPING"
        serving.answer(sent.call_id, 7)
        assert (await calling).answer.run_ns == 7
        assert await asyncio.to_thread(operated.server.process.wait, 60) == 0
        agent.stream.cancel()


async def test_a_hangup_lets_a_server_read_its_renewed_certificate(tmp_path: Path) -> None:
    def issue(ca: trustme.CA) -> Path:
        certificate = ca.issue_cert("localhost", "127.0.0.1")
        certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
        (tmp_path / "key.pem").chmod(0o600)
        certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        ca.cert_pem.write_to_path(tmp_path / "ca.pem")
        return tmp_path / "ca.pem"

    issue(trustme.CA())
    with serve(tmp_path, "--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")) as server:
        address = server.expect("listening on").rpartition(" ")[2]
        renewed = issue(trustme.CA())
        server.signal(signal.SIGHUP)
        assert wait_until(lambda: "read the TLS files again" in server.log.read_text())
        async with open_channel(Access(address, tls_ca=renewed)) as channel:
            (info,) = await call(channel, "FarmService.GetServerInfo")
        assert info.HasField("certificate_expire_time")
