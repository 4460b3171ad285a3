"""Jobs that a test watches until they are where a fault is to hit them."""

from __future__ import annotations

from etfarm.client import Job
from etfarm.client.models import CellChanged, Progress


def until_phase(job: Job, phase: str, actor: str = "") -> tuple[Progress, int]:
    """Wait until a cell of a job is in a phase, with `actor` on the device of that name.

    Returns:
        The event that tells of it, and the last sequence number before.
    """
    sequence = 0
    for event in job.watch():
        sequence = event.sequence or sequence
        if isinstance(event, Progress) and event.phase == phase and actor in ("", event.actor):
            return event, sequence
        assert not (isinstance(event, CellChanged) and event.cell.state.is_terminal), f"the cell ended before {phase}: {event}"
    raise AssertionError(f"the job ended before {phase}")
