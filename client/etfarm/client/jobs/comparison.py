"""Comparisons of two sides: jobs of a farm, report files or results.

Files need no farm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from etfarm.client import reports
from etfarm.client.jobs import report_file
from etfarm.wire import comparison
from etfarm.wire.comparison import Gate, Side
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.reports import Comparison, JobResult
    from etfarm.client.transport.stubs import Stubs


class JobHandle(Protocol):
    """A job of the library, `Job` or `AsyncJob`."""

    @property
    def id(self) -> str:
        """The job's id."""


Compared: TypeAlias = "str | Path | JobResult | JobHandle"
"""A job (itself, its id, unique prefix, tag or `latest`), a report file (x.json, or a path with a folder), or a result. A text
may end in `#` and a cell's number from 0, a recipe or a model: `latest#1`, `base.json#xnnpack_fp32`.
"""


def needs_farm(*sides: Compared) -> bool:
    """Return whether a side is a job, which requires a farm."""
    return any(isinstance(side, str) and not report_file.is_named(comparison.split_choice(side)[0]) for side in sides)


def gate_of(texts: str | Sequence[str], *, strict: bool = False, accept_invalid: bool = False) -> Gate | None:
    """Return the gate of `3%` or `["latency=3%", "size=1%"]`; None for an empty sequence.

    Raises:
        BAD_GATE: a limit cannot be parsed.
    """
    listed = [texts] if isinstance(texts, str) and texts else list(texts)
    return Gate.parse(listed, strict=strict, accept_invalid=accept_invalid)


async def compare(stubs: Stubs | None, base: Compared, candidate: Compared, gate: Gate | None = None) -> Comparison:
    """Compare the candidate with the base.

    Args:
        stubs: the farm of the jobs; may be None if `needs_farm` is False.

    Raises:
        BadDocument: a file does not exist, or has other content.
        REPORT_NOT_FOUND, NothingToCompare: no report matches the selection; no report has a counterpart on the other
            side.
        EtfarmError: JOB_NOT_FOUND; SERVER_UNREACHABLE.
    """
    base, candidate = (side if isinstance(side, str | Path | reports.JobResult) else side.id for side in (base, candidate))
    if stubs is not None and isinstance(base, str) and isinstance(candidate, str) and needs_farm(base) and needs_farm(candidate):
        from etfarm.v1 import comparison_pb2

        # Compared on the server: reports contain all samples, a comparison only a few numbers.
        answer = await stubs.reports.Compare(comparison_pb2.CompareRequest(base=base, candidate=candidate))
        compared = answer.comparison
    else:
        sides = await _side(stubs, base), await _side(stubs, candidate)
        compared = await asyncio.to_thread(comparison.compare, *sides)
    return reports.Comparison.from_dict(await asyncio.to_thread(comparison.document, compared, gate))


async def _side(stubs: Stubs | None, what: Compared) -> Side:
    if isinstance(what, reports.JobResult):
        document = what.to_dict()
        return Side(document["reports"], document["job"])
    name, choice = comparison.split_choice(str(what))
    if isinstance(what, Path) or report_file.is_named(name):
        document = await asyncio.to_thread(report_file.read, Path(name))
        return Side(document["reports"], document["job"], name, choice)
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.v1 import job_pb2

    if stubs is None:
        raise error_for(
            "NOT_CONNECTED", f"{name} is a job, but no farm is connected.", "Compare files, or connect to the job's farm."
        )
    request = job_pb2.GetJobRequest(job_id=name)
    job = AsyncJob(stubs, await stubs.jobs.Get(request))
    document = await job.document(with_series=False)
    return Side(document["reports"], document["job"], None, choice)
