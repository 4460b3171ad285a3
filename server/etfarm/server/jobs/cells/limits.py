"""Limits of waiting: a job's deadline, and the time for which its cells may wait for a device."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from etfarm.server.devices.scheduling.waiting import MAX_PRIORITY, MIN_PRIORITY
from etfarm.server.jobs.model import BadJob
from etfarm.v1.job_pb2 import JobSpec
from etfarm.wire.errors import EtfarmError, Kind, UserError, error_for

MAX_WAIT_S: Final = 30 * 86_400.0
"""Maximum of JobSpec.max_wait_s."""

MAX_DEADLINE_S: Final = 366 * 86_400.0
"""Maximum time from a submission to its deadline."""


class DeadlinePassed(UserError):
    """A deadline that is over: a job is submitted after it, or a cell had not started at it."""

    reason = "DEADLINE_PASSED"


class DeadlineMissed(DeadlinePassed):
    """A cell that had not started at its job's deadline."""

    kind = Kind.FAILED_PRECONDITION

    def __init__(self, why: str = "", waited_s: float | None = None) -> None:
        waited = "" if waited_s is None else f" after it had waited {_duration(waited_s)} for a device{_because(why)}"
        super().__init__(
            f"The cell had not started at its deadline{waited}.",
            "Give a later --deadline, a higher --priority or other devices; `etfarm queue` shows what waits.",
        )


def waited_too_long(why: str, waited_s: float) -> EtfarmError:
    """Return the error of a cell that found no device within the time for which its job lets it wait."""
    return error_for(
        "MAX_WAIT_OVER",
        f"The cell waited {_duration(waited_s)} for a device, the maximum that its job allows{_because(why)}.",
        "Give a longer --max-wait, a higher --priority or other devices; `etfarm queue` shows what waits.",
        waited_s=round(waited_s, 3),
    )


def check_waiting(spec: JobSpec, at: datetime) -> None:
    """Check a job's priority and limits of waiting.

    Args:
        spec: the job's spec.
        at: the time of the submission.

    Raises:
        BadJob: a value is out of range.
        DeadlinePassed: the deadline is not in the future.
    """
    require_priority(spec.priority)
    if spec.HasField("max_wait_s") and not 0 < spec.max_wait_s <= MAX_WAIT_S:
        raise BadJob(
            f"`max_wait_s` must be above 0 and at most {MAX_WAIT_S:,.0f} (30 days), got {spec.max_wait_s:g}.",
            "Give --max-wait within this range.", field="max_wait_s",
        )  # fmt: skip
    deadline_s = deadline_of(spec)
    if deadline_s is None:
        return
    if not 0 <= spec.deadline_time.nanos < 1_000_000_000:
        raise BadJob(
            f"`deadline_time.nanos` must be 0 to 999,999,999, got {spec.deadline_time.nanos}.",
            "Give the deadline's fraction of a second.", field="deadline_time",
        )  # fmt: skip
    left_s = deadline_s - at.timestamp()
    if left_s <= 0:
        raise DeadlinePassed("The deadline must be in the future by the server's clock.", "Give a later --deadline.")
    if left_s > MAX_DEADLINE_S:
        raise BadJob("The deadline must be within a year.", "Give an earlier --deadline, or none.", field="deadline_time")


def require_priority(priority: int) -> None:
    """Check a priority.

    Raises:
        BadJob: it is out of range.
    """
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise BadJob(
            f"`priority` must be {MIN_PRIORITY} to {MAX_PRIORITY}, got {priority}.",
            "Choose a value in this range; every ten minutes of waiting count as one level.", field="priority",
        )  # fmt: skip


def deadline_of(spec: JobSpec) -> float | None:
    """Return a job's deadline in seconds since the epoch; None without one."""
    # Not with the message's own conversions, which raise for times that are out of range.
    return spec.deadline_time.seconds + spec.deadline_time.nanos / 1e9 if spec.HasField("deadline_time") else None


def require_in_time(spec: JobSpec, now: datetime) -> None:
    """Check that a job's deadline is not over.

    Raises:
        DeadlineMissed: it is.
    """
    deadline_s = deadline_of(spec)
    if deadline_s is not None and now.astimezone(UTC).timestamp() >= deadline_s:
        raise DeadlineMissed


def _because(why: str) -> str:
    """Return what it waited for, without the limit itself."""
    causes = [cause for cause in why.split("; ") if cause and not cause.startswith("it ")]
    return f": {'; '.join(causes)}" if causes else ""


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
