"""Jobs and queued runs in a few words, for tables of them."""

from __future__ import annotations

from collections import Counter
from typing import Final

from etfarm.client.formats import phases, units
from etfarm.client.models import Cell, CellState, JobInfo, JobState, QueuedRun

WAITING: Final = "WAITING"
"""The word for jobs that are RUNNING and whose live cells all wait."""
STATES: Final = (*(state.value for state in JobState), WAITING)
"""The words of `describe_state`."""


def describe_contents(job: JobInfo) -> str:
    """Return models and recipes of a job, each once: `resnet8, ds_cnn · xnnpack_fp32`."""
    models = dict.fromkeys(cell.model for cell in job.cells)
    recipes = dict.fromkeys(cell.recipe for cell in job.cells if cell.recipe)
    return " · ".join(filter(None, (", ".join(models), ", ".join(recipes))))


def describe_latencies(job: JobInfo) -> str:
    """Return the job's median, or the least and the largest one of its cells; empty without a measurement."""
    medians = [cell.p50_ns for cell in job.cells if cell.p50_ns is not None]
    if not medians:
        return ""
    least, most = units.time(min(medians)), units.time(max(medians))
    return least if least == most else f"{least} to {most}"


def describe_invalid(job: JobInfo) -> str:
    """Return how many of the job's measurements cannot be trusted: `INVALID`, or `2 of 3 INVALID`; empty if all can."""
    measured = [cell for cell in job.cells if cell.verdict]
    invalid = sum(cell.verdict == "INVALID" for cell in measured)
    return "" if not invalid else "INVALID" if invalid == len(measured) else f"{invalid} of {len(measured)} INVALID"


def describe_measurements(job: JobInfo) -> str:
    """Return the job's medians and how many are INVALID: `1.84 ms`, `1.02 ms to 1.84 ms, 1 of 2 INVALID`; empty without any."""
    invalid = describe_invalid(job)
    between = ", " if " of " in invalid else " "
    return f"{describe_latencies(job)}{between}{invalid}".strip(", ")


def describe_progress(job: JobInfo) -> str:
    """Return how many cells are done: `2 of 3`."""
    return f"{sum(cell.state.is_terminal for cell in job.cells)} of {len(job.cells)}"


def describe_state(job: JobInfo) -> str:
    """Return the job's state: `WAITING` instead of `RUNNING` for a job whose live cells all wait."""
    live = [cell for cell in job.cells if not cell.state.is_terminal]
    is_waiting = job.state is JobState.RUNNING and live and all(cell.is_waiting for cell in live)
    return WAITING if is_waiting else job.state.value


def describe_work(job: JobInfo) -> str:
    """Return what the live cells of a job do now: `2 waiting for device, 1 running`; empty for a job that has ended."""
    words = Counter(_describe_cell(cell) for cell in job.cells if not cell.state.is_terminal)
    return ", ".join(f"{number} {word}" for word, number in words.items())


def _describe_cell(cell: Cell) -> str:
    is_said = cell.state is CellState.WAITING_FOR_DEVICE or not phases.is_wait(cell.phase)
    return phases.describe_state(cell.state.value) if is_said else phases.describe(cell.phase)


def describe_duration(job: JobInfo) -> str:
    """Return the time from the submission to the end; empty for a live job."""
    return units.clock((job.finished_at - job.submitted_at).total_seconds()) if job.finished_at else ""


def describe_run(run: QueuedRun) -> str:
    """Return what a run is: `resnet8 · xnnpack_fp32`, with the number of interleaved cells, or that it is a session."""
    if run.session_id:
        return " · ".join(filter(None, ("session", run.method)))
    more = f" and {len(run.cell_ids) - 1} more" if len(run.cell_ids) > 1 else ""
    method = run.method if run.method != "forward" else ""
    return " · ".join(filter(None, (run.model, run.recipe or "", method))) + more
