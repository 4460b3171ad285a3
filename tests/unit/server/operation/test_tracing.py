"""Spans of jobs: derived from events, in one trace for each job, whichever server sends them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from etfarm.server.operation.tracing import Tracing
from etfarm.v1 import common_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent, JobState, Progress

START_S = 1_700_000_000


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    error: str
    attributes: dict[str, str]


class Recorder:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tracing = Tracing(self._send)

    def _send(
        self, name: str, trace_id: int, span_id: int, parent_id: int, start_ns: int, end_ns: int, error: str, **attributes: str
    ) -> None:
        self.spans.append(Span(name, trace_id, span_id, parent_id, start_ns, end_ns, error, attributes))

    def span(self, name: str) -> Span:
        (span,) = [each for each in self.spans if each.name == name]
        return span


def event(at_s: float, **kind: object) -> JobEvent:
    created = JobEvent(**kind)  # type: ignore[arg-type]
    created.time.FromNanoseconds(round((START_S + at_s) * 1e9))
    return created


def submitted() -> JobEvent:
    job = Job(id="j", owner="ann", project="vision", state=JobState.JOB_STATE_QUEUED)
    job.create_time.FromSeconds(START_S)
    return event(0.5, sequence=1, job=job)


def finished_cell() -> JobEvent:
    cell = Cell(id="c", report_id="r", candidate_name="net", state=common_pb2.CELL_STATE_FAILED)
    cell.error.reason = "PROGRAM_CRASHED"
    cell.timeline.add(actor=common_pb2.ACTOR_CLIENT, phase="TORCH_EXPORT", start_ms=-2000, duration_ms=2000)
    cell.timeline.add(actor=common_pb2.ACTOR_SERVER, phase="COMPILE", start_ms=600, duration_ms=400)
    cell.timeline.add(actor=common_pb2.ACTOR_DEVICE, phase="TIMED", start_ms=1500, duration_ms=1000)
    attempt = cell.attempts.add(id="a", device_id="pi")
    attempt.start_time.FromSeconds(START_S + 1)
    attempt.end_time.FromSeconds(START_S + 3)
    return event(4.0, sequence=9, cell=cell)


def test_a_jobs_spans_are_one_trace_with_phases_below_their_attempt() -> None:
    recorder = Recorder()
    on_event = recorder.tracing.on_event
    on_event("j", submitted())
    stage = Progress(cell_id="c", actor=common_pb2.ACTOR_SERVER, phase="TO_EDGE", duration_ms=100)
    on_event("j", event(1.0, progress=stage))
    on_event("j", event(1.0, progress=Progress(cell_id="c", actor=common_pb2.ACTOR_SERVER, phase="LOWER")))
    cached = Progress(cell_id="c", actor=common_pb2.ACTOR_SERVER, phase="QUANTIZE", duration_ms=9, message="from an earlier one")
    on_event("j", event(1.0, progress=cached))
    on_event("j", finished_cell())
    ended = Job(id="j", state=JobState.JOB_STATE_FAILED)
    ended.create_time.FromSeconds(START_S)
    ended.end_time.FromSeconds(START_S + 4)
    on_event("j", event(4.0, sequence=10, job=ended))
    assert {span.name for span in recorder.spans} == {
        "submit", "compile TO_EDGE", "client TORCH_EXPORT", "server COMPILE", "device TIMED", "attempt", "cell", "job",
    }  # fmt: skip
    assert len({span.trace_id for span in recorder.spans}) == 1
    assert len({span.span_id for span in recorder.spans}) == len(recorder.spans)
    job, cell, attempt, timed = (recorder.span(name) for name in ("job", "cell", "attempt", "device TIMED"))
    assert (job.parent_id, cell.parent_id, attempt.parent_id, timed.parent_id) == (0, job.span_id, cell.span_id, attempt.span_id)
    assert recorder.span("compile TO_EDGE").parent_id == recorder.span("client TORCH_EXPORT").parent_id == cell.span_id
    start_ns = START_S * 10**9
    assert (timed.start_ns - start_ns, timed.end_ns - start_ns) == (1_500_000_000, 2_500_000_000)
    assert recorder.span("client TORCH_EXPORT").start_ns == start_ns - 2 * 10**9
    assert (cell.error, job.error, attempt.error) == ("PROGRAM_CRASHED", "FAILED", "")
    assert attempt.attributes == {"job": "j", "cell": "c", "attempt": "a", "device": "pi"}


def test_a_server_that_resumes_a_job_continues_its_trace() -> None:
    first, second = Recorder(), Recorder()
    first.tracing.on_event("j", submitted())
    second.tracing.on_event("j", finished_cell())
    assert {span.trace_id for span in first.spans} == {span.trace_id for span in second.spans}
    timed = second.span("device TIMED")
    assert timed.end_ns - timed.start_ns == 10**9


def test_nothing_large_is_imported_without_need() -> None:
    """Each costs a server time and memory at its start, for which its fleet waits."""
    large = ("opentelemetry", "prometheus", "numpy", "torch", "executorch", "alembic")
    code = f"import sys, etfarm.server.main; print([name for name in sys.modules if name.startswith({large})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
