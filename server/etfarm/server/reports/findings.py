"""Step 9: what analyses found, kept under a digest of all that it hangs on, and found by children where it is not known yet.

A child reads what users' programs made of users' models, so it may hang, die or eat its memory. What it had found until then
is found again by another one that is not given what the first one died of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError
from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.workers.errors import BadAnswer, ChildDied, ChildOutOfMemory, ChildTimedOut
from etfarm.server.workers.pool import Workers
from etfarm.v1 import compile_pb2, report_pb2
from etfarm.wire import digest as digests
from etfarm.wire.errors import FarmError

log = structlog.get_logger()

ANALYZE_TASK: Final = "etfarm.server.reports.analyze:analyze"

KEPT_BYTES: Final = 256 << 20
"""What the kept findings may take together; the oldest go. One is as large as its samples and operators: 10 KiB to some MiB."""

FILE_MISSING: Final = "ANALYSIS_FILE_MISSING"
CUT_SHORT: Final = "ANALYSIS_CUT_SHORT"
"""Codes of warnings: of a part that was left out because a file is no longer stored, and because a child ended over it."""


class BadAnalysis(FarmError):
    """The analysis child's answer cannot be read."""

    reason = "BAD_WORKER_ANSWER"


@dataclass(frozen=True)
class _Part:
    """A part of the findings."""

    what: str
    """For people."""
    stage: str
    """Of the child."""
    needs: tuple[str, ...]
    """Fields of the request. There is no such part where the first is None, and none without a file that one of them names."""
    gives_up: tuple[str, ...]
    """Fields to leave out when a child ended in this stage, one more each time."""


_PARTS: Final = (
    _Part("check of the inputs", "INPUTS", ("inputs",), ("inputs",)),
    _Part("latency", "STATISTICS", ("samples",), ()),
    _Part("comparison of the interleaved programs", "COMPARISON", ("base_samples", "samples"), ("base_samples",)),
    _Part("accuracy", "ACCURACY", ("model", "inputs", "outputs"), ("model",)),
    _Part("accuracy against the quantized program", "QUANTIZED_ACCURACY", ("quantized", "inputs", "outputs"), ("quantized",)),
    _Part("profile by operator", "JOIN", ("etdump", "etrecord", "pte"), ("etrecord", "etdump")),
    _Part("numeric gap", "NUMERICS", ("numerics", "inputs"), ("numerics",)),
)

_LOSES: Final = {
    "inputs": "the accuracy of the outputs",
    "base_samples": "the comparison of the interleaved programs",
    "model": "the comparison with the program before quantization",
    "quantized": "the comparison with the quantized program",
    "etrecord": "modules and source lines of the operators",
    "etdump": "the profile by operator",
    "numerics": "the numeric gap",
}
"""By the field that is left out."""

_DEADLY: Final = (ChildDied, ChildTimedOut, ChildOutOfMemory, BadAnswer, BadAnalysis)


class Findings:
    """What analyses found.

    Args:
        deadline_s: of one child, wall clock.
        kept_bytes: what findings may take in the database; the oldest go.
        screen: as `AnalyzeRequest.screen`.
    """

    def __init__(
        self,
        workers: Workers,
        database: Database,
        now: Callable[[], datetime],
        *,
        deadline_s: float,
        kept_bytes: int = KEPT_BYTES,
        screen: Callable[[Path], None] | None = None,
    ) -> None:
        self._workers = workers
        self._database = database
        self._now = now
        self._deadline_s = deadline_s
        self._kept_bytes = kept_bytes
        self._screen = screen

    async def of(
        self, request: AnalyzeRequest, on_log: Callable[[str], None], *, fresh: bool = False, project: str = ""
    ) -> report_pb2.Report:
        """The measured parts of a report, as `etfarm.server.reports.analyze` finds them, and `analysis`.

        A part whose file is not stored any more, or that a child ended over, is left out, and a warning says so.

        Args:
            fresh: found again though it is known.
            project: who asks.

        Raises:
            EtfarmError: a child ended over the samples themselves, or none can be had.
        """
        request, warnings = await asyncio.to_thread(_stored, request)
        key = await asyncio.to_thread(key_of, request)
        known = None if fresh else await self._known(key)
        if known is not None:
            report = known
        else:
            report, cut_short = await self._found(request, on_log, project)
            report.analysis.CopyFrom(report_pb2.Analysis(version=_version("etfarm"), key=key))
            report.analysis.at.FromDatetime(self._now())
            if cut_short:
                report.compile.warnings.extend(cut_short)
            elif not any(warning.code.endswith("_FAILED") for warning in report.compile.warnings):
                await self._keep(key, report)
        report.analysis.cached = known is not None
        report.compile.warnings.extend(warnings)
        return report

    async def _found(
        self, request: AnalyzeRequest, on_log: Callable[[str], None], project: str
    ) -> tuple[report_pb2.Report, list[compile_pb2.Warning]]:
        warnings: list[compile_pb2.Warning] = []
        while True:
            try:
                return await self._child(request, on_log, project), warnings
            except _DEADLY as error:
                left_out = _left_out(request, error.stage)
                if not left_out:
                    raise
                what = " and ".join(_LOSES[name] for name in left_out)
                log.warning("an analysis is done again without a part", left_out=left_out, reason=error.reason, error=str(error))
                said = f"{error.message} The report is without {what}. `etfarm report analyze` tries again."
                warnings.append(compile_pb2.Warning(code=CUT_SHORT, message=said))
                nothing: dict[str, Any] = dict.fromkeys(left_out)
                request = replace(request, **nothing)

    async def _child(self, request: AnalyzeRequest, on_log: Callable[[str], None], project: str) -> report_pb2.Report:
        # No parts of the key: a whole result does not hang on them.
        request = replace(request, limit_s=self._deadline_s, screen=self._screen)
        finished = await self._workers.run(ANALYZE_TASK, request, deadline_s=self._deadline_s, whose=project, on_log=on_log)
        async with finished:
            try:
                return await asyncio.to_thread(report_pb2.Report.FromString, finished.result)
            except DecodeError as error:
                raise BadAnalysis(f"The analysis child's answer is no report: {error}.") from None

    async def _known(self, key: str) -> report_pb2.Report | None:
        query = select(schema.analyses.c.body).where(schema.analyses.c.key == key)
        body = await self._database.read(lambda connection: connection.execute(query).scalar())
        return None if body is None else await asyncio.to_thread(report_pb2.Report.FromString, body)

    async def _keep(self, key: str, report: report_pb2.Report) -> None:
        table = schema.analyses
        news = {"body": await asyncio.to_thread(report.SerializeToString), "made_at": self._now()}
        row = insert(table).values({"key": key, **news}).on_conflict_do_update(index_elements=["key"], set_=news)
        newer_bytes = func.sum(func.length(table.c.body)).over(order_by=(table.c.made_at.desc(), table.c.key))
        sized = select(table.c.key, newer_bytes.label("bytes")).subquery()
        too_old = select(sized.c.key).where(sized.c.bytes > self._kept_bytes)

        def write(connection: Connection) -> None:
            connection.execute(row)
            connection.execute(delete(table).where(table.c.key.in_(too_old)))

        await self._database.write(write)


def key_of(request: AnalyzeRequest) -> str:
    """A digest of all that the findings hang on: every file, every argument, and the code that looks at them.

    Files are in the store, which names them by their digests.
    """
    return digests.of_value({"schema": "etfarm.analysis/1", "code": _code(), "request": _plain(request)})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@cache
def _code() -> dict[str, str]:
    """Return digests of the sources that an analysis runs, which differ between two versions under development as well, and
    the versions of the packages that they call."""
    sources: dict[str, str] = {}
    for package in ("etfarm.server.reports", "etfarm.server.graphs", "etfarm.wire"):
        found = find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            files = sorted(Path(folder).rglob("*.py"))
            sources[package] = digests.of_value([[path.name, digests.of_file(path)] for path in files])
    return sources | {package: _version(package) for package in ("etfarm", "torch", "executorch", "torchao", "numpy", "protobuf")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _stored(request: AnalyzeRequest) -> tuple[AnalyzeRequest, list[compile_pb2.Warning]]:
    """The request without what is not stored any more, and a warning for each part that lacks it."""
    without: dict[str, Any] = {}
    warnings = []
    for part in _PARTS:
        missing = {name: [path for path in _files(getattr(request, name)) if not path.exists()] for name in part.needs}
        digests_of = sorted({path.name[:12] for paths in missing.values() for path in paths})
        if not digests_of or getattr(request, part.needs[0]) is None:
            continue
        without |= {name: None for name, paths in missing.items() if paths}
        if part.stage == "JOIN":
            without["etdump"] = None  # without the others there would be rows, and they would say less than those of before
        said = f"The {part.what} cannot be worked out: the farm no longer stores {', '.join(digests_of)}."
        warnings.append(compile_pb2.Warning(code=FILE_MISSING, message=said))
    return replace(request, **without), warnings


def _files(value: Any) -> list[Path]:
    if isinstance(value, Path):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [path for field in fields(value) for path in _files(getattr(value, field.name))]
    return []


def _left_out(request: AnalyzeRequest, stage: str) -> tuple[str, ...]:
    """What the next child is not given; empty where there is nothing more to leave out."""
    said = [part for part in _PARTS if part.stage == stage]
    if said:
        # Its own word for where it ended is a child's, who knows: then the rest goes as well.
        for name in said[0].gives_up:
            if getattr(request, name) is not None:
                return (name,)
    return tuple(name for part in _PARTS for name in part.gives_up if getattr(request, name) is not None)


def is_of_analysis(warning: compile_pb2.Warning) -> bool:
    """Whether a report's warning comes from its analysis."""
    return warning.code.startswith("ANALYSIS_")
