"""Metrics of a server: what events become, that labels are bounded, and the page that serves them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import pytest

from etfarm.server.artifacts.room import DiskSpace
from etfarm.server.operation.metrics import MAX_PROJECTS, Metrics
from etfarm.server.operation.metrics_page import MetricsPage, Page, probe
from etfarm.server.operation.snapshot import Snapshot
from etfarm.v1 import common_pb2, compile_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent, JobState
from etfarm.wire.channel import Address
from tests.support.refusals import refuses


def lines(metrics: Metrics) -> list[str]:
    _, text = metrics.render("")
    return [line for line in text.decode().splitlines() if not line.startswith("#")]


def finished_cell(state: common_pb2.CellState.ValueType = common_pb2.CELL_STATE_SUCCEEDED) -> Cell:
    cell = Cell(id="c", state=state, report_id="r")
    cell.timeline.add(actor=common_pb2.ACTOR_SERVER, phase="WAIT_FOR_DEVICE", duration_ms=3000)
    cell.timeline.add(actor=common_pb2.ACTOR_DEVICE, phase="an agent's own name", duration_ms=1)
    cell.attempts.add(id="a", error=common_pb2.Error(reason="GONE", fault=common_pb2.FAULT_DEVICE))
    cell.attempts.add(id="b")
    return cell


def test_events_of_jobs_are_counted_with_queue_times_and_faults() -> None:
    metrics = Metrics("1.2", lambda job_id: {"j": "vision"}[job_id])
    metrics.on_event("j", JobEvent(sequence=1, job=Job(project="vision", state=JobState.JOB_STATE_QUEUED)))
    metrics.on_event("j", JobEvent(sequence=2, cell=Cell(id="c", state=common_pb2.CELL_STATE_RUNNING)))
    metrics.on_event("j", JobEvent(sequence=3, cell=finished_cell()))
    ended = Job(project="vision", state=JobState.JOB_STATE_SUCCEEDED)
    ended.end_time.GetCurrentTime()
    metrics.on_event("j", JobEvent(sequence=4, job=ended))
    text = lines(metrics)
    for expected in (
        'etfarm_jobs_submitted_total{project="vision"} 1.0',
        'etfarm_jobs_finished_total{project="vision",state="SUCCEEDED"} 1.0',
        'etfarm_cells_finished_total{fault="NONE",project="vision",state="SUCCEEDED"} 1.0',
        'etfarm_cell_phase_seconds_sum{phase="WAIT_FOR_DEVICE"} 3.0',
        'etfarm_attempts_total{fault="DEVICE"} 1.0',
        'etfarm_attempts_total{fault="NONE"} 1.0',
        'etfarm_build_info{version="1.2"} 1.0',
    ):
        assert expected in text
    assert not any("own name" in line for line in text), "agents choose the names of their phases"
    assert any(line.startswith("process_resident_memory_bytes ") for line in text)


def test_compilations_and_calls_are_counted() -> None:
    metrics = Metrics("1", lambda _: "")
    compilation = compile_pb2.Compilation()
    compilation.stages.add(stage="QUANTIZE", duration_ms=500, cached=True, where=common_pb2.ACTOR_SERVER)
    compilation.stages.add(stage="TO_EDGE", duration_ms=1500, where=common_pb2.ACTOR_SERVER)
    metrics.on_compiled(compilation, cached=False)
    metrics.on_compiled(compilation, cached=True)
    metrics.began("JobService.Submit")
    metrics.ended("JobService.Submit", "OK", 0.02, is_stream=False)
    metrics.began("JobService.Watch")
    text = lines(metrics)
    assert 'etfarm_compilations_total{outcome="ok"} 1.0' in text and 'etfarm_compilations_total{outcome="hit"} 1.0' in text
    assert 'etfarm_compile_stage_seconds_sum{stage="TO_EDGE"} 1.5' in text
    assert not any('stage="QUANTIZE"' in line for line in text)
    assert 'etfarm_rpcs_total{code="OK",rpc="JobService.Submit"} 1.0' in text
    assert 'etfarm_rpcs_open{rpc="JobService.Watch"} 1.0' in text


def test_projects_beyond_the_limit_share_a_series() -> None:
    metrics = Metrics("1", lambda _: "")
    cells = {("RUNNING", f"project-{number}"): 1 for number in range(MAX_PROJECTS + 30)}
    metrics.snapshot = Snapshot(cells=cells, live_jobs={project: 1 for _, project in cells}, disk=DiskSpace(5, 7, True))
    text = lines(metrics)
    assert sum(line.startswith("etfarm_cells{") for line in text) == MAX_PROJECTS + 1
    assert 'etfarm_cells{project="other",state="RUNNING"} 30.0' in text
    assert 'etfarm_jobs{project="other"} 30.0' in text
    assert "etfarm_disk_full 1.0" in text and "etfarm_disk_free_bytes 5.0" in text


@asynccontextmanager
async def serving(pages: dict[str, Page], **options: Any) -> AsyncIterator[tuple[MetricsPage, str, int]]:
    """Yield a page with its host and its port."""
    created = MetricsPage(pages, **options)
    host, _, port = (await created.start(Address("127.0.0.1:0"))).rpartition(":")
    try:
        yield created, host, int(port)
    finally:
        await created.close()


@pytest.fixture
async def page() -> AsyncIterator[tuple[MetricsPage, str, int]]:
    async def echo(accept: str) -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, "text/plain", accept.encode()

    async with serving({"/metrics": echo, "/readyz": probe(lambda: "stopping"), "/healthz": probe(lambda: "")}) as created:
        yield created


async def request(host: str, port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    answer = b""
    with suppress(ConnectionResetError):  # the server closed it with bytes unread
        async with asyncio.timeout(30):
            answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: localhost:80\r\nAccept: text/x\r\n\r\n", b"200 OK", b"text/x"),
        (b"GET /metrics?a=b HTTP/1.0\r\n\r\n", b"200 OK", b""),
        (b"HEAD /healthz HTTP/1.1\r\n\r\n", b"200 OK", b""),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"200 OK", b"ok\n"),
        (b"GET /readyz HTTP/1.1\r\n\r\n", b"503 Service Unavailable", b"stopping\n"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found", b"/metrics\n/readyz\n/healthz\n"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed", b"only GET\n"),
        (b"\x16\x03\x01 hello\r\n\r\n", b"400 Bad Request", b"not HTTP/1\n"),
    ],
)
async def test_the_page_answers_one_request(page: tuple[MetricsPage, str, int], sent: bytes, status: bytes, body: bytes) -> None:
    _, host, port = page
    answer = await request(host, port, sent)
    head, _, got = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and got == body


async def test_endless_requests_and_crowds_are_cut_and_others_are_served(page: tuple[MetricsPage, str, int]) -> None:
    _, host, port = page
    assert await request(host, port, b"GET /" + b"x" * 50_000) == b""
    crowd = [await asyncio.open_connection(host, port) for _ in range(16)]
    answer = await request(host, port, b"GET /healthz HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), "the oldest idle connection ends for the next one"
    assert await crowd[0][0].read() == b""
    for _, writer in crowd:
        writer.close()


async def test_clients_that_read_nothing_keep_no_place() -> None:
    async def large(accept: str) -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, "text/plain", bytes(32 << 20)

    pages = {"/metrics": large, "/healthz": probe(lambda: "")}
    async with serving(pages, timeout_s=0.5) as (created, host, port):
        with ExitStack() as crowd:
            for _ in range(16):
                crowd.enter_context(socket.create_connection((host, port))).sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = await request(host, port, b"GET /healthz HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            async with asyncio.timeout(30):
                while created._open:
                    await asyncio.wait(created._open)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", b"200"), ("127.0.0.1:9464", b"200"), ("10.9.8.7:9464", b"200"), ("[::1]:9464", b"200"),
        ("LocalHost:1", b"200"), (f"{socket.gethostname()}:9464", b"200"), ("farm.example:9464", b"200"),
        ("evil.example", b"421"), ("evil.example:9464", b"421"), ("127.0.0.1.evil.example", b"421"), ("", b"421"),
        ("localhost.", b"421"), ("localhost@evil.example", b"421"), ("localhost:80:evil.example", b"421"), ("[::1]evil", b"421"),
        ("localhost\r\nHost: evil.example", b"421"),
    ],
)  # fmt: skip
async def test_a_name_that_is_led_here_gets_no_metrics(host: str, status: bytes) -> None:
    async with serving({"/healthz": probe(lambda: "")}, hosts=["Farm.example"]) as (_, address, port):
        answer = await request(address, port, b"GET /healthz HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode())
        assert answer[9:12] == status


@pytest.mark.remedy("CANNOT_LISTEN")
async def test_an_address_in_use_is_refused(page: tuple[MetricsPage, str, int]) -> None:
    _, host, port = page
    with refuses("CANNOT_LISTEN", match="for metrics"):
        await MetricsPage({}).start(Address(f"{host}:{port}"))
    other = MetricsPage({})
    await other.start(Address(f"{host}:0"))
    await other.close()
