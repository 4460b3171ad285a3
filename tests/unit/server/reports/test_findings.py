"""What analyses found: known again by what it hangs on, and what is left when a child hangs over a file, dies or is cancelled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from sqlalchemy import func, select, update

from etfarm.server.artifacts.store import Store
from etfarm.server.reports import findings as findings_module
from etfarm.server.reports.analysis_parts import FILE_MISSING
from etfarm.server.reports.findings import Findings, key_of, require_encoders, require_runs
from etfarm.server.reports.latency.samples import Block
from etfarm.server.reports.request import CUT_SHORT, SAMPLES_LEFT_OUT, AnalyzeRequest, Further, Numerics, Trace
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.workers.child_pool import Finished
from etfarm.server.workers.errors import BadWorkerAnswer, ChildTimedOut
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.v1 import report_pb2
from etfarm.wire import digest
from tests.support.analyses import analyze_request, traced_request
from tests.support.farm import wait_until
from tests.support.traces import traced
from tests.support.worker_pools import worker_pool

ROOT = Path(__file__).parents[4]
NOW = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
DEADLINE_S = 6.0
"""So late that a child is where it hangs, on a machine that stands still for seconds too."""


@pytest.fixture
async def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    limits = Limits(memory_bytes=1 << 30, cpu_s=60, threads=1)
    async with worker_pool(tmp_path, preload=["etfarm.server.reports.analyze"], limits=limits, concurrency=2) as pool:
        yield pool


@pytest.fixture
async def store(tmp_path: Path, database: Database) -> AsyncIterator[Store]:
    created = Store(tmp_path / "store", database)
    yield created
    created.close()


@pytest.fixture
def findings(workers: Workers, store: Store, database: Database) -> Findings:
    return Findings(workers, store, database, Clock(), deadline_s=60)


class Clock:
    """Instants, a second apart."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> datetime:
        self.seconds += 1
        return NOW + timedelta(seconds=self.seconds)


def stored(folder: Path, data: bytes) -> Path:
    """Return a file as the store has it, named by its digest."""
    path = folder / digest.of_bytes(data)
    path.write_bytes(data)
    return path


def hanging(folder: Path, name: str) -> Path:
    """Return a file whose readers wait forever."""
    path = folder / digest.of_bytes(name.encode())
    os.mkfifo(path)
    return path


def request(folder: Path, first_ns: int = 1000) -> AnalyzeRequest:
    samples = np.arange(first_ns, first_ns + 200, dtype="<i8").tobytes()
    return analyze_request(samples=stored(folder, samples), output_names=("logits",))


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended, reaped or not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def quiet(_: str) -> None:
    """Ignore the log."""


async def test_the_same_files_are_analyzed_once(findings: Findings, workers: Workers, tmp_path: Path) -> None:
    first = await findings.of(request(tmp_path), quiet)
    assert (first.latency.min_ns, first.analysis.cached) == (1000, False)
    assert first.analysis.key == key_of(request(tmp_path)) and first.analysis.version
    await workers.stop()  # from here on there are no children to be had
    again = await findings.of(request(tmp_path), quiet)
    assert again.analysis.cached
    again.analysis.cached = False
    assert again == first


class Children:
    """A pool whose children compare a model's outputs, and keep what they were asked for."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.code = code
        """Code of the warning that comes with an accuracy."""
        self.compared: list[bool] = []

    async def run(self, task: str, asked: AnalyzeRequest, **options: object) -> Finished:
        self.compared.append(asked.model is not None)
        report = report_pb2.Report()
        report.latency.p50_ns = len(self.compared)
        if asked.model is not None:
            report.accuracy.add(output="y")
            report.compile.warnings.add(code=self.code)
        return Finished(report.SerializeToString(), self.folder / "child", 0, 0.0)


@pytest.mark.parametrize(("code", "is_complete"), [(SAMPLES_LEFT_OUT, True), ("ANALYSIS_JOIN_FAILED", False), ("OTHER", False)])
async def test_the_accuracy_of_equal_outputs_on_several_samples_is_computed_once(
    store: Store, database: Database, tmp_path: Path, code: str, is_complete: bool
) -> None:
    children: Any = Children(tmp_path, code)
    findings = Findings(children, store, database, Clock(), deadline_s=60)
    files = [stored(tmp_path, name.encode()) for name in ("model", "x", "x 2", "y", "y 2")]
    one = replace(request(tmp_path), model=files[0], inputs=files[1], outputs=files[3], further=Further((files[2],), files[4]))
    two = replace(one, samples=request(tmp_path, 2000).samples)  # with another thread count
    first, second = await findings.of(one, quiet), await findings.of(two, quiet)
    assert children.compared == [True, not is_complete]
    assert (second.accuracy, second.compile.warnings) == (first.accuracy, first.compile.warnings)
    assert second.latency.p50_ns == 2 and not second.analysis.cached
    await findings.of(replace(two, further=Further((files[2],), files[3])), quiet)
    await findings.of(two, quiet, fresh=True)
    # These need the model for something else, or have nothing that takes long.
    for other in ({"numerics": Numerics(files[0], files[0], files[0], files[0], None, None, True)}, {"further": None}):
        for measured in (one, two):
            await findings.of(replace(measured, **other), quiet)
    assert children.compared[2:] == [True] * 6


async def test_a_result_whose_traced_times_are_gone_is_computed_again(findings: Findings, store: Store, tmp_path: Path) -> None:
    run = traced("xnnpack")
    asked = traced_request(run, samples=request(tmp_path).samples)
    first = await findings.of(asked, quiet)
    assert first.operators and not first.analysis.cached
    times = store.path(first.trace_times.digest)
    assert (await findings.of(asked, quiet)).analysis.cached
    times.unlink()
    again = await findings.of(asked, quiet)
    assert not again.analysis.cached and again.trace_times == first.trace_times
    assert times.stat().st_size == first.trace_times.size_bytes
    assert (await findings.of(asked, quiet)).analysis.cached


async def test_what_is_asked_for_anew_is_found_anew(findings: Findings, tmp_path: Path) -> None:
    first = await findings.of(request(tmp_path), quiet)
    again = await findings.of(request(tmp_path), quiet, fresh=True)
    assert not again.analysis.cached and again.analysis.time.seconds > first.analysis.time.seconds
    known = await findings.of(request(tmp_path), quiet)
    assert known.analysis.time == again.analysis.time


@pytest.mark.parametrize(
    "other",
    [
        lambda asked, folder: replace(asked, samples=stored(folder, b"12345678")),
        lambda asked, folder: replace(asked, etdump=stored(folder, b"dump")),
        lambda asked, folder: replace(asked, method="encode"),
        lambda asked, folder: replace(asked, output_names=("scores",)),
        lambda asked, folder: replace(asked, traced_ns=(5, 6)),
        lambda asked, folder: replace(asked, blocks=(Block(0, 0, 200),)),
        lambda asked, folder: replace(asked, numerics=Numerics(*[stored(folder, b"n")] * 4, None, None, True)),
        lambda asked, folder: replace(asked, numerics=Numerics(*[stored(folder, b"n")] * 4, None, None, False)),
    ],
)
def test_whatever_it_hangs_on_is_in_the_key(other: Callable[[AnalyzeRequest, Path], AnalyzeRequest], tmp_path: Path) -> None:
    asked = request(tmp_path)
    assert key_of(other(asked, tmp_path)) != key_of(asked)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert key_of(request(elsewhere)) == key_of(asked), "where the store lies says nothing"


def _statistics(*runs: tuple[float, list[float]]) -> report_pb2.Report:
    return report_pb2.Report(runs=[report_pb2.Run(p50_ns=p50_ns, p50_ci95_ns=ends) for p50_ns, ends in runs])


def test_a_child_returns_the_statistics_of_each_run_or_of_no_run(tmp_path: Path) -> None:
    single = request(tmp_path)
    repeated, interleaved = replace(single, runs=(100, 100)), replace(single, blocks=(Block(0, 0, 200),))
    run = (1000.0, [990.0, 1010.0])
    for asked, counts in ((single, {0, 1}), (repeated, {0, 2}), (interleaved, {0}), (replace(single, samples=None), {0})):
        for count in range(4):
            if count in counts:
                require_runs(_statistics(*[run] * count), asked)
            else:
                with pytest.raises(BadWorkerAnswer, match=f"got {count}"):
                    require_runs(_statistics(*[run] * count), asked)


@pytest.mark.parametrize(
    "run", [(1e300, []), (-1.0, []), (1e-300, []), (1.0, [1.0]), (1.0, [2.0, 1.0]), (1.0, [1e-300, 2.0]), (1.0, [1.0, 2.0, 3.0])]
)
def test_a_child_returns_times_and_intervals_of_runs(run: tuple[float, list[float]], tmp_path: Path) -> None:
    with pytest.raises(BadWorkerAnswer, match="must return"):
        require_runs(_statistics(run), request(tmp_path))
    require_runs(_statistics((0.0, [0.0, 1.0])), request(tmp_path))


def test_a_child_returns_the_encoders_that_were_traced(tmp_path: Path) -> None:
    asked = replace(request(tmp_path), encoders=(Trace(None, (4000,), "vision_encoder"),))

    def returned(*methods: str) -> report_pb2.Report:
        encoders = [report_pb2.TracedEncoder(method=method) for method in methods]
        return report_pb2.Report(generation=report_pb2.Generation(encoders=encoders))

    require_encoders(returned("vision_encoder"), asked)
    require_encoders(returned(), asked)
    for methods, of in ((("other",), asked), (("vision_encoder",) * 2, asked), (("vision_encoder",), request(tmp_path))):
        with pytest.raises(BadWorkerAnswer, match="each traced encoder once"):
            require_encoders(returned(*methods), of)


@pytest.mark.usefixtures("each_database")
async def test_the_oldest_findings_make_room(workers: Workers, store: Store, database: Database, tmp_path: Path) -> None:
    findings = Findings(workers, store, database, Clock(), deadline_s=60, kept_bytes=500)
    keys = [(await findings.of(request(tmp_path, first), quiet)).analysis.key for first in (1000, 2000, 3000)]
    table = schema.analyses.c
    rows = await database.read(
        lambda connection: connection.execute(select(table.key, func.length(table.body)).order_by(table.made_at)).all()
    )
    assert 0 < sum(size for _, size in rows) <= 500
    kept = [key for key, _ in rows]
    assert 0 < len(kept) < 3 and kept == keys[-len(kept) :]


async def test_a_damaged_finding_is_computed_again(findings: Findings, database: Database, tmp_path: Path) -> None:
    first = await findings.of(request(tmp_path), quiet)
    assert (await findings.of(request(tmp_path), quiet)).analysis.cached
    for change in (lambda body: b"\xff" * 4 + body[4:], lambda body: body[:-20] + bytes([body[-20] ^ 1]) + body[-19:]):
        body = await database.read(lambda connection: connection.execute(select(schema.analyses.c.body)).scalar_one())
        damage = update(schema.analyses).values(body=change(body))
        await database.write(lambda connection, damage=damage: connection.execute(damage))  # type: ignore[misc]
        again = await findings.of(request(tmp_path), quiet)
        assert not again.analysis.cached and again.latency == first.latency


async def test_a_result_that_its_child_calls_incomplete_is_computed_again(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings_module, "ANALYZE_TASK", "tests.support.worker_tasks:analyze_in_too_little_time")
    for _ in range(2):
        result = await findings.of(request(tmp_path), quiet)
        assert [warning.code for warning in result.compile.warnings] == [CUT_SHORT] and not result.analysis.cached
        assert result.latency.min_ns == 1000


@pytest.mark.slow(reason="waits for the deadline of an analysis that hangs")
async def test_a_child_that_hangs_over_its_files_costs_what_they_are_for(
    workers: Workers, store: Store, database: Database, tmp_path: Path
) -> None:
    await workers.ready()
    findings = Findings(workers, store, database, Clock(), deadline_s=DEADLINE_S)
    asked = replace(request(tmp_path), etdump=hanging(tmp_path, "etdump"), traced_ns=(7000, 8000, 9000))
    result = await findings.of(asked, quiet)
    assert result.latency.min_ns == 1000 and result.profile.p50_ns == 8000
    (warning,) = [warning for warning in result.compile.warnings if warning.code == CUT_SHORT]
    assert "not done after 6 s of wall time in JOIN" in warning.message
    assert "lacks the profile by operator" in warning.message
    again = await findings.of(asked, quiet)
    assert not again.analysis.cached, "it may have been the machine: nothing of it is kept"


@pytest.mark.slow(reason="waits for the deadline of an analysis that hangs")
async def test_a_child_that_hangs_over_the_samples_is_an_error(
    workers: Workers, store: Store, database: Database, tmp_path: Path
) -> None:
    await workers.ready()
    findings = Findings(workers, store, database, Clock(), deadline_s=DEADLINE_S)
    with pytest.raises(ChildTimedOut) as failed:
        await findings.of(replace(request(tmp_path), samples=hanging(tmp_path, "samples")), quiet)
    assert failed.value.stage == "STATISTICS"


async def test_an_analysis_without_callers_leaves_no_process(findings: Findings, workers: Workers, tmp_path: Path) -> None:
    await workers.ready()
    assert workers.forkserver_pid is not None
    forkserver = psutil.Process(workers.forkserver_pid)
    asked = replace(request(tmp_path), etdump=hanging(tmp_path, "etdump"))
    writing = asyncio.create_task(asyncio.to_thread(asked.etdump.open, "wb"))  # type: ignore[union-attr]
    analysis = asyncio.create_task(findings.of(asked, quiet))
    opened = await writing  # the child reads by now
    assert forkserver.children(recursive=True)
    analysis.cancel()
    with pytest.raises(asyncio.CancelledError):
        await analysis
    assert await asyncio.to_thread(wait_until, lambda: not any(map(runs, forkserver.children(recursive=True))), 10.0)
    opened.close()


async def test_a_file_that_is_not_stored_any_more_costs_what_it_is_for(findings: Findings, tmp_path: Path) -> None:
    asked = replace(request(tmp_path), etdump=tmp_path / ("e" * 64), etrecord=stored(tmp_path, b"record"))
    result = await findings.of(asked, quiet)
    assert result.latency.min_ns == 1000 and not result.operators
    (warning,) = result.compile.warnings
    assert warning.code == FILE_MISSING
    assert "profile by operator" in warning.message and "eeeeeeeeeeee" in warning.message
