"""OpenTelemetry spans of jobs, derived from their journaled events: submit, compile stages, queue, attempts with their phases.

A job's trace id is a hash of its id, so that the spans of a job which a restarted server continues stay in one trace. Only
`open_tracing` imports OpenTelemetry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from etfarm.server.extras import ExtraMissing
from etfarm.v1 import common_pb2
from etfarm.v1.job_pb2 import Cell, JobEvent, JobState

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

_MAX_JOBS: Final = 10_000
"""Maximum number of live jobs whose submission times are kept; the spans of further ones start at their first event."""
_MAX_QUEUED: Final = 8_192
_MAX_TEXT: Final = 500
_SEND_S: Final = 5.0
"""Time limit of one export to the collector."""

_ACTORS: Final = {common_pb2.ACTOR_CLIENT: "client", common_pb2.ACTOR_SERVER: "server", common_pb2.ACTOR_DEVICE: "device"}


class SendSpan(Protocol):
    """A function that sends a finished span."""

    def __call__(
        self, name: str, trace_id: int, span_id: int, parent_id: int, start_ns: int, end_ns: int, error: str, **attributes: str
    ) -> None:
        """Send a span; `parent_id` 0 is for the root, and an empty `error` for success."""


class Tracing:
    """The spans of all jobs.

    Args:
        send: sends a finished span.
        close: sends what is left, and ends the exporter.
    """

    def __init__(self, send: SendSpan, close: Callable[[], None] = lambda: None) -> None:
        self._send = send
        self.close = close
        self._submitted_ns: dict[str, int] = {}

    def on_event(self, job_id: str, event: JobEvent) -> None:
        """Send the spans that an event ends."""
        kind = event.WhichOneof("event")
        if kind == "job":
            self._on_job(job_id, event)
        elif kind == "cell" and event.cell.report_id:
            self._on_end(job_id, event.cell, _ns(event.time))
        elif kind == "progress" and event.progress.actor == common_pb2.ACTOR_SERVER and event.progress.HasField("duration_ms"):
            progress, end_ns = event.progress, _ns(event.time)
            if progress.message:
                return  # a stage that an earlier compilation did
            start_ns = end_ns - round(progress.duration_ms * 1e6)
            self._add(f"compile {progress.phase}", job_id, _id(progress.cell_id), start_ns, end_ns, cell=progress.cell_id)

    def _on_job(self, job_id: str, event: JobEvent) -> None:
        job = event.job
        created_ns = _ns(job.create_time)
        if event.sequence == 1:
            if len(self._submitted_ns) < _MAX_JOBS:
                self._submitted_ns[job_id] = created_ns
            self._add("submit", job_id, _id(job_id), created_ns, _ns(event.time), owner=job.owner, project=job.project)
        elif job.HasField("end_time"):
            self._submitted_ns.pop(job_id, None)
            state = JobState.Name(job.state).removeprefix("JOB_STATE_")
            self._send(
                "job", _trace(job_id), _id(job_id), 0, created_ns, _ns(job.end_time), "" if state == "SUCCEEDED" else state,
                job=job_id, job_name=job.name, owner=job.owner, project=job.project, state=state,
            )  # fmt: skip

    def _on_end(self, job_id: str, cell: Cell, end_ns: int) -> None:
        origin_ns = self._submitted_ns.get(job_id)
        if origin_ns is None:
            # An earlier server accepted the job. The timeline's phases are relative to its submission, and end with this event.
            latest_ms = max((phase.start_ms + phase.duration_ms for phase in cell.timeline), default=0.0)
            origin_ns = end_ns - round(latest_ms * 1e6)
        parent = _id(cell.id)
        for phase in cell.timeline:
            start_ns = origin_ns + round(phase.start_ms * 1e6)
            actor = _ACTORS.get(phase.actor, "")
            is_attempt = phase.actor == common_pb2.ACTOR_DEVICE and bool(cell.attempts)
            owner = _id(cell.attempts[-1].id) if is_attempt else parent
            self._add(f"{actor} {phase.phase}", job_id, owner, start_ns, start_ns + round(phase.duration_ms * 1e6), cell=cell.id)
        for attempt in cell.attempts:
            until_ns = _ns(attempt.end_time) if attempt.HasField("end_time") else end_ns
            self._send(
                "attempt", _trace(job_id), _id(attempt.id), parent, _ns(attempt.start_time), until_ns, attempt.error.reason,
                job=job_id, cell=cell.id, attempt=attempt.id, device=attempt.device_id,
            )  # fmt: skip
        self._send(
            "cell", _trace(job_id), parent, _id(job_id), origin_ns, end_ns, cell.error.reason,
            job=job_id, cell=cell.id, model=cell.candidate_name, recipe=cell.recipe_name, method=cell.method,
        )  # fmt: skip

    def _add(self, name: str, job_id: str, parent: int, start_ns: int, end_ns: int, **attributes: str) -> None:
        self._send(
            name, _trace(job_id), _id(f"{parent:x} {name} {start_ns}"), parent, start_ns, max(start_ns, end_ns), "", job=job_id,
            **attributes,
        )  # fmt: skip


def open_tracing(endpoint: str, version: str) -> Tracing:
    """Return the tracing to an OTLP collector.

    Args:
        endpoint: URL of the collector for OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`.

    Raises:
        ExtraMissing: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ExtraMissing("--otlp", "otel", error.name or "a part of OpenTelemetry") from None
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S), max_queue_size=_MAX_QUEUED)
    return Tracing(_sender(processor, version), processor.shutdown)


def _sender(processor: Any, version: str) -> SendSpan:
    """Return a function that passes finished spans to a span processor of OpenTelemetry's SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource = Resource.create({"service.name": "etfarm", "service.version": version})
    scope = InstrumentationScope("etfarm", version)
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def send(
        name: str, trace_id: int, span_id: int, parent_id: int, start_ns: int, end_ns: int, error: str, **attributes: str
    ) -> None:
        processor.on_end(
            ReadableSpan(
                name=name,
                context=SpanContext(trace_id, span_id, is_remote=False, trace_flags=sampled),
                parent=SpanContext(trace_id, parent_id, is_remote=False, trace_flags=sampled) if parent_id else None,
                resource=resource,
                attributes={f"etfarm.{key}": value[:_MAX_TEXT] for key, value in attributes.items() if value},
                kind=SpanKind.SERVER if not parent_id else SpanKind.INTERNAL,
                instrumentation_scope=scope,
                status=Status(StatusCode.ERROR, error[:_MAX_TEXT]) if error else Status(StatusCode.OK),
                start_time=start_ns,
                end_time=max(start_ns, end_ns),
            )
        )

    return send


def _ns(stamp: Timestamp) -> int:
    return stamp.seconds * 10**9 + stamp.nanos


def _trace(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"trace {job_id}".encode()).digest()[:16]) or 1


def _id(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) or 1
