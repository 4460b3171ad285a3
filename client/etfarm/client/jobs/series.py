"""Download of the series of reports: the samples, and the times of the traced pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from etfarm.client.errors import Kind
from etfarm.client.transport import transfers
from etfarm.v1 import common_pb2, report_pb2
from etfarm.wire.errors import EtfarmError
from etfarm.wire.report import report_json
from etfarm.wire.series import BadSeries, Series, decode_samples, decode_trace_times

if TYPE_CHECKING:
    from etfarm.client.transport.stubs import Stubs

Values = TypeVar("Values")

NOT_STORED: Final = "SERIES_NOT_STORED"
"""Code of the warning in a document whose series is no longer in the farm's store."""

_PARALLEL: Final = 8
"""Number of reports whose series are downloaded at a time."""

_UNAVAILABLE: Final = (Kind.NOT_FOUND, Kind.DATA_LOSS, Kind.FAILED_PRECONDITION)
"""Kinds of errors about an artifact that was deleted or damaged. Other errors concern the connection."""


async def documents(stubs: Stubs, reports: Sequence[report_pb2.Report]) -> list[dict[str, Any]]:
    """Return the REPORTs of etfarm.report/1 with their series.

    A series that is no longer stored is empty, and adds a warning to the report's `compile.warnings`.

    Raises:
        EtfarmError: SERVER_UNREACHABLE.
    """
    turns = asyncio.Semaphore(_PARALLEL)

    async def of(report: report_pb2.Report) -> dict[str, Any]:
        async with turns:
            series, missing = await _fetch(stubs, report)
        shown = report_pb2.Report()
        shown.CopyFrom(report)
        for sentence in missing:
            shown.compile.warnings.add(code=NOT_STORED, message=sentence)
        return report_json(shown, series)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(of(report), name=f"series of {report.id}") for report in reports]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _fetch(stubs: Stubs, report: report_pb2.Report) -> tuple[Series, list[str]]:
    """Return a report's series, and a sentence for each that is not available."""
    missing: list[str] = []

    async def read(artifact: common_pb2.Artifact, what: str, decode: Callable[[bytes], Sequence[Values]]) -> Sequence[Values]:
        try:
            return decode(await transfers.download_bytes(stubs, artifact))
        except EtfarmError as error:
            if not isinstance(error, BadSeries) and error.kind not in _UNAVAILABLE:
                raise
            missing.append(f"The {what} cannot be read: {error.message}")
            return ()

    samples: Sequence[int] = ()
    times: Sequence[Sequence[int] | None] = ()
    if report.HasField("latency") and report.HasField("samples"):
        samples = await read(report.samples, "samples", decode_samples)
    if report.HasField("profile") and report.HasField("trace_times"):
        rows = 1 + len(report.operators)
        times = await read(report.trace_times, "times of the traced pass", lambda data: decode_trace_times(data, rows))
    return Series(samples, times), missing
