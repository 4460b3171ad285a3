"""The documents of notices, etfarm.notice/1: pure functions of what happened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from etfarm.server.notices.errors import BadWebhook
from etfarm.v1.common_pb2 import CellState
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Cell, Job, JobState
from etfarm.v1.report_pb2 import VerdictStatus

SCHEMA: Final = "etfarm.notice/1"
JOB_ENDED: Final = "job.ended"
GATE_FAILED: Final = "gate.failed"
DEVICE_QUARANTINED: Final = "device.quarantined"
DEVICE_OFFLINE: Final = "device.offline"
TEST: Final = "webhook.test"
EVENTS: Final = (JOB_ENDED, GATE_FAILED, DEVICE_QUARANTINED, DEVICE_OFFLINE)
"""The events that a webhook can be for."""

MAX_BODY: Final = 32 << 10
"""Maximum size of a document in bytes."""
_CELLS: Final = 50
"""Maximum number of cells in a document."""
_TEXT: Final = 300


@dataclass(frozen=True)
class Notice:
    """One event, the same for all receivers."""

    event: str
    id: str
    body: str
    """The JSON document."""
    job_id: str = ""
    project: str = ""
    owner: str = ""


def validate_events(events: Collection[str]) -> tuple[str, ...]:
    """Return the events of a webhook in order; all events for an empty collection.

    Raises:
        BadWebhook: an event does not exist.
    """
    if unknown := sorted(set(events) - set(EVENTS)):
        raise BadWebhook(f"There is no event {unknown[0][:80]!r}.", f"Events: {', '.join(EVENTS)}.")
    return tuple(event for event in EVENTS if event in events or not events)


def job_ended(job: Job, at: datetime) -> Notice:
    """Return the notice of a job's end."""
    return _of_job(JOB_ENDED, job, at, _summary(job), event_id(JOB_ENDED, job.id), {})


def gate_failed(job: Job, gate: str, failures: Sequence[str], at: datetime) -> Notice:
    """Return the notice of a gate that a job's result does not pass."""
    what = f"{gate}: " if gate else ""
    more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    text = f"{_title(job)} does not pass a gate. {what}{failures[0] if failures else 'failed'}{more}"
    details = {"gate": {"required": gate, "failures": list(failures)}}
    return _of_job(GATE_FAILED, job, at, text, event_id(GATE_FAILED, job.id, gate, *failures), details)


def device_event(event: str, device: Device, at: datetime, since: datetime | None, why: str) -> Notice:
    """Return the notice of a device's event.

    Args:
        since: when it began, which distinguishes it from an equal event later.
        why: one sentence for people.
    """
    details = {
        "device": {
            "id": device.id, "name": device.name, "arch": device.arch, "soc": device.soc, "agent_id": device.agent_id,
            "labels": dict(device.labels), "since": _time(since), "reason": why[:_TEXT],
        }
    }  # fmt: skip
    what = "is quarantined" if event == DEVICE_QUARANTINED else "is offline"
    text = f"Device {device.name or device.id} {what}: {why}"
    identity = event_id(event, device.id, _time(since) or "")
    return Notice(event, identity, _document(event, identity, at, text, details))


def test_notice(webhook_id: str, at: datetime) -> Notice:
    """Return the notice that a test sends."""
    identity = event_id(TEST, webhook_id, at.isoformat())
    return Notice(TEST, identity, _document(TEST, identity, at, "A test of this webhook.", {}))


def event_id(*parts: str) -> str:
    """Return an id that is equal for equal parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _of_job(event: str, job: Job, at: datetime, text: str, identity: str, details: Mapping[str, Any]) -> Notice:
    facts = {
        "id": job.id, "name": job.name or None, "owner": job.owner, "project": job.project,
        "labels": dict(job.labels), "state": _name(JobState, job.state, "JOB_STATE_"),
        "submitted_at": _of_message(job, "create_time"), "finished_at": _of_message(job, "end_time"),
        "cell_count": len(job.cells), "cells": [_cell(cell) for cell in job.cells[:_CELLS]],
    }  # fmt: skip
    body = _document(event, identity, at, text, {**details, "job": facts})
    if len(body.encode()) > MAX_BODY:
        body = _document(event, identity, at, text, {**details, "job": {**facts, "labels": {}, "cells": []}})
    return Notice(event, identity, body, job.id, job.project, job.owner)


def _document(event: str, identity: str, at: datetime, text: str, details: Mapping[str, Any]) -> str:
    # `text` is what Slack, Mattermost and others show of a document that they receive.
    document = {"schema": SCHEMA, "id": identity, "event": event, "time": _time(at), "text": text[:2_000], **details}
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "index": cell.index,
        "model": cell.candidate_name[:_TEXT],
        "recipe": cell.recipe_name[:_TEXT],
        "method": cell.method[:_TEXT] or None,
        "state": _name(CellState, cell.state, "CELL_STATE_"),
        "report": cell.report_id or None,
        "p50_ns": cell.p50_ns if cell.HasField("p50_ns") else None,
        "verdict": _name(VerdictStatus, cell.verdict, "VERDICT_STATUS_") if cell.verdict else None,
        "error": {"reason": cell.error.reason, "message": cell.error.message[:_TEXT]} if cell.HasField("error") else None,
    }


def _title(job: Job) -> str:
    return f"Job {f'{job.name} ({job.id})' if job.name else job.id} of {job.owner}"


def _summary(job: Job) -> str:
    done = sum(cell.state == CellState.CELL_STATE_SUCCEEDED for cell in job.cells)
    state = _name(JobState, job.state, "JOB_STATE_").lower()
    invalid = sum(cell.verdict == VerdictStatus.VERDICT_STATUS_INVALID for cell in job.cells)
    text = f"{_title(job)} {'was cancelled' if state == 'cancelled' else state}: {done} of {len(job.cells)} cells succeeded"
    text += f", {invalid} INVALID" if invalid else ""
    first = next((cell.error for cell in job.cells if cell.HasField("error")), None)
    return f"{text}. {first.reason}: {first.message[:_TEXT]}" if first is not None else f"{text}."


def _name(enum: Any, value: int, prefix: str) -> str:
    return str(enum.Name(value)).removeprefix(prefix)


def _of_message(message: Any, field: str) -> str | None:
    return _time(getattr(message, field).ToDatetime(UTC)) if message.HasField(field) else None


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
