"""The cache of analysis results, stored under a digest of all their dependencies and computed by jailed children on a miss.

A child reads output of users' programs, so it may hang, crash or run out of memory. Another child then computes the results again
without the file that the first one failed on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy import Connection, bindparam, delete, func, select

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.artifacts.store import Store
from etfarm.server.reports.analysis_parts import LOST_WITHOUT, choose_fields_to_drop, drop_missing_files, is_incomplete
from etfarm.server.reports.request import ACCURACY_CODES, CUT_SHORT, PREFILL_TRACE_TIMES, TRACE_TIMES, AnalyzeRequest
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.server.workers import answers, output_files
from etfarm.server.workers.child_pool import ChildPool, OnTurn
from etfarm.server.workers.errors import BadAnswer, BadWorkerAnswer, ChildDied, ChildOutOfMemory, ChildTimedOut, ParsingTimedOut
from etfarm.v1 import common_pb2, compile_pb2, report_pb2
from etfarm.wire import digest as digests
from etfarm.wire import series
from etfarm.wire.generation import METRICS as GENERATION_METRICS

log = structlog.get_logger()

ANALYZE_TASK: Final = "etfarm.server.reports.analyze:analyze"

KEPT_BYTES: Final = 256 << 20
"""Maximum size of all stored findings; the oldest are deleted. One has 10 KiB to a few MiB, depending on its operators."""

_DEADLY: Final = (ChildDied, ChildTimedOut, ParsingTimedOut, ChildOutOfMemory, BadAnswer, BadWorkerAnswer)

_MEASURED: Final = (
    "inputs.tensors", "latency", "runs", "interleaved", "accuracy", "profile", "operators", "numeric_gap", "compile.warnings",
    "numerics.threshold_db", "numerics.first_bad", "numerics.judged", "numerics.timed_sqnr_db", "numerics.sqnr_db",
    "numerics.wrong_only_when_fused", "trace_times", "generation.points",
    "generation.prefill_profile", "generation.prefill_operators", "generation.prefill_trace_times", "generation.encoders",
    "generation.accuracy.perplexity", "generation.accuracy.perplexity_tokens", "generation.accuracy.references",
)  # fmt: skip
"""The fields of a Report that a child computes."""

_MAX_ANSWER_BYTES: Final = 64 << 20
"""Maximum size of a child's report, which has a row for every operator."""

# Built once: SQLAlchemy takes several times longer to build it than to execute it.
_BODY: Final = select(schema.analyses.c.body).where(schema.analyses.c.key == bindparam("of_key"))
_MIN_NS: Final = 1e-3
_MAX_NS: Final = 2.0**63
"""Range of a run's median and of the ends of its interval, which are 0 or between samples: their logarithms stay small."""

_LEAST_RATE: Final = 1e-60
_MOST_RATE: Final = 1e60
"""Range of the numbers of generation and of the ends of their intervals, which lie far beyond the times if these differ by orders
of magnitude."""


@dataclass(frozen=True)
class _Caller:
    """The caller of an analysis."""

    project: str
    owner: str
    on_log: Callable[[str], None]
    on_turn: OnTurn


@dataclass(frozen=True)
class _TraceTimes:
    """A file of traced times, and the number of its rows and columns."""

    name: str
    artifact: common_pb2.Artifact
    operators: int
    iterations: int


def _series_of(report: report_pb2.Report) -> list[_TraceTimes]:
    """Return the files of traced times that a child has written, or that a stored result names."""
    files = []
    if report.HasField("trace_times"):
        files.append(_TraceTimes(TRACE_TIMES, report.trace_times, len(report.operators), report.profile.iterations))
    prefill = report.generation
    if prefill.HasField("prefill_trace_times"):
        files.append(
            _TraceTimes(
                PREFILL_TRACE_TIMES,
                prefill.prefill_trace_times,
                len(prefill.prefill_operators),
                prefill.prefill_profile.iterations,
            )
        )
    return files


class Findings:
    """The cache of analysis results.

    Args:
        deadline_s: wall-clock limit of one child.
        kept_bytes: maximum size of the findings in the database; the oldest are deleted.
        screen: as in `AnalyzeRequest.screen`.
    """

    def __init__(
        self,
        workers: ChildPool,
        store: Store,
        database: Database,
        now: Callable[[], datetime],
        *,
        deadline_s: float,
        kept_bytes: int = KEPT_BYTES,
        screen: Callable[[Path], None] | None = None,
    ) -> None:
        self._workers = workers
        self._store = store
        self._database = database
        self._now = now
        self._deadline_s = deadline_s
        self._kept_bytes = kept_bytes
        self._screen = screen

    async def of(
        self,
        request: AnalyzeRequest,
        on_log: Callable[[str], None],
        on_turn: OnTurn = lambda has_turn: None,
        *,
        fresh: bool = False,
        project: str = DEFAULT_PROJECT,
        owner: str = "",
    ) -> report_pb2.Report:
        """Return the measured parts of a report, as `etfarm.server.reports.analyze` computes them, and `analysis`.

        The project holds the file `trace_times`. A part whose file is no longer stored, or on which a child failed, is left
        out with a warning. The accuracy over several samples, which takes long, is stored by itself as well: other thread counts
        and later runs mostly have the same outputs.

        Args:
            on_turn: as in `ChildPool.run`.
            fresh: ignore stored results and compute again.
            project: the caller's project.
            owner: owner of new files.

        Raises:
            EtfarmError: a child failed on the samples themselves, or no child can be started.
        """
        request, warnings, key = await asyncio.to_thread(_stored_with_key, request)
        caller = _Caller(project or DEFAULT_PROJECT, owner, on_log, on_turn)
        known = None if fresh else await self._known(key, caller)
        if known is not None:
            report = known
        else:
            report, cut_short = await self._compute_with_known_accuracy(request, caller, fresh=fresh)
            report.analysis.CopyFrom(report_pb2.Analysis(version=_version("etfarm"), key=key))
            report.analysis.time.FromDatetime(self._now())
            if cut_short:
                report.compile.warnings.extend(cut_short)
            elif not any(is_incomplete(warning) for warning in report.compile.warnings):
                await self._keep(key, report)
        report.analysis.cached = known is not None
        report.compile.warnings.extend(warnings)
        return report

    async def _compute_with_known_accuracy(
        self, request: AnalyzeRequest, caller: _Caller, *, fresh: bool
    ) -> tuple[report_pb2.Report, list[compile_pb2.Warning]]:
        """Return what `_compute` does, with the accuracy over several samples from an earlier analysis if there is one."""
        alone = request.accuracy_alone
        if alone is None:
            return await self._compute(request, caller)
        key = key_of(alone)
        known = None if fresh else await self._known(key, caller)
        if known is not None:
            report, cut_short = await self._compute(replace(request, model=None, quantized=None, further=None), caller)
            report.accuracy.extend(known.accuracy)
            report.compile.warnings.extend(known.compile.warnings)
            return report, cut_short
        report, cut_short = await self._compute(request, caller)
        if not cut_short and {warning.code for warning in report.compile.warnings} <= ACCURACY_CODES:
            accuracy = report_pb2.Report(accuracy=report.accuracy)
            accuracy.compile.warnings.extend(report.compile.warnings)
            await self._keep(key, accuracy)
        return report, cut_short

    async def _compute(self, request: AnalyzeRequest, caller: _Caller) -> tuple[report_pb2.Report, list[compile_pb2.Warning]]:
        warnings: list[compile_pb2.Warning] = []
        while True:
            try:
                return await self._child(request, caller), warnings
            except _DEADLY as error:
                left_out = choose_fields_to_drop(request, error.stage)
                if not left_out:
                    raise
                what = " and ".join(LOST_WITHOUT[name] for name in left_out)
                log.warning("an analysis is done again without a part", left_out=left_out, reason=error.reason, error=str(error))
                message = f"{error.message} The report lacks {what}. Run `etfarm report analyze` to try again."
                warnings.append(compile_pb2.Warning(code=CUT_SHORT, message=message))
                nothing: dict[str, Any] = dict.fromkeys(left_out)
                request = replace(request, **nothing)

    async def _child(self, request: AnalyzeRequest, caller: _Caller) -> report_pb2.Report:
        # These are not in the key, since a complete result does not depend on them.
        request = replace(request, limit_s=self._deadline_s, screen=self._screen)
        finished = await self._workers.run(
            ANALYZE_TASK,
            request,
            deadline_s=self._deadline_s,
            light=not request.needs_torch,
            urgent=True,
            whose=caller.project,
            on_log=caller.on_log,
            on_turn=caller.on_turn,
        )
        async with finished:
            report = await asyncio.to_thread(
                answers.decode, finished.result, report_pb2.Report, _MEASURED, most_bytes=_MAX_ANSWER_BYTES
            )
            require_runs(report, request)
            require_generation(report, request)
            require_text_accuracy(report, request)
            require_encoders(report, request)
            for series_of in _series_of(report):
                await self._adopt_times(series_of, finished.folder, caller)
            return report

    async def _adopt_times(self, times: _TraceTimes, folder: Path, caller: _Caller) -> None:
        """Move a file of traced times of the child into the store.

        Raises:
            BadWorkerAnswer: the file is missing, or does not have the size of the report's rows.
            DiskFull, DatabaseFull: the file cannot be stored; the caller analyzes again.
        """
        path = await asyncio.to_thread(output_files.claim, folder, times.name)
        size_bytes = path.stat().st_size
        if size_bytes != series.VALUE_BYTES * (1 + times.operators) * times.iterations:
            what = f"{times.operators} rows of {times.iterations} iterations"
            raise BadWorkerAnswer(f"The analysis child's traced times have {size_bytes} bytes, which are not those of {what}.")
        times.artifact.CopyFrom(await self._store.adopt(path, caller.owner, holder=caller.project))

    async def _known(self, key: str, caller: _Caller) -> report_pb2.Report | None:
        """Return a stored result, if its file is still stored, too."""
        rows = await self._database.query(_BODY, {"of_key": key})
        if not rows:
            return None
        self._store.uses.mark(key, "analysis")
        report = await asyncio.to_thread(unseal_or_none, report_pb2.Report, rows[0].body, f"the analysis {key}")
        if report is None:
            return None
        if held := [times.artifact.digest for times in _series_of(report)]:
            if await self._store.absent(held):
                return None
            await self._store.hold(caller.project, held, caller.owner)
        return report

    async def _keep(self, key: str, report: report_pb2.Report) -> None:
        table = schema.analyses
        values = {"body": await asyncio.to_thread(seal, report), "made_at": self._now()}
        row = insert(table).values({"key": key, **values}).on_conflict_do_update(index_elements=["key"], set_=values)
        newer_bytes = func.sum(func.length(table.c.body)).over(order_by=(table.c.made_at.desc(), table.c.key))
        sized = select(table.c.key, newer_bytes.label("bytes")).subquery()
        too_old = select(sized.c.key).where(sized.c.bytes > self._kept_bytes)

        def write(connection: Connection) -> None:
            connection.execute(row)
            connection.execute(delete(table).where(table.c.key.in_(too_old)))

        await self._database.write(write)


def _stored_with_key(request: AnalyzeRequest) -> tuple[AnalyzeRequest, list[compile_pb2.Warning], str]:
    """Return what `drop_missing_files` does, and the key of the request that is left."""
    stored, warnings = drop_missing_files(request)
    return stored, warnings, key_of(stored)


def key_of(request: AnalyzeRequest) -> str:
    """Return a digest of all dependencies of the findings: every file, every argument, and the code of the analysis.

    Files are in the store, where their names are their digests.
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
    """Return digests of the sources that an analysis runs, and the versions of the packages that it uses.

    The digests also distinguish states of the code under development.
    """
    sources: dict[str, str] = {}
    for package in ("etfarm.server.reports", "etfarm.server.graphs", "etfarm.wire"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            files = sorted(Path(folder).rglob("*.py"))
            sources[package] = digests.of_value([[path.name, digests.of_file(path)] for path in files])
    return sources | {package: _version(package) for package in ("etfarm", "torch", "executorch", "torchao", "numpy", "protobuf")}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def require_runs(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require the statistics of each run, or none if that part failed or the programs were interleaved.

    Raises:
        BadWorkerAnswer: their number is not that of the runs, or a median or an interval is not one of times.
    """
    expected = 0 if request.samples is None or request.blocks else max(1, len(request.runs))
    if len(report.runs) not in (0, expected):
        raise BadWorkerAnswer(f"The analysis child must return the statistics of {expected} runs, got {len(report.runs)}.")
    for run in report.runs:
        ends = run.p50_ci95_ns
        if not all(value == 0 or _MIN_NS <= value <= _MAX_NS for value in (run.p50_ns, *ends)):
            raise BadWorkerAnswer(f"The analysis child must return times of 0 or {_MIN_NS:g} to {_MAX_NS:g} ns for each run.")
        if len(ends) not in (0, 2) or list(ends) != sorted(ends):
            raise BadWorkerAnswer("The analysis child must return intervals of runs with two ends in ascending order.")


def require_generation(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require the numbers of each point and process of generation, or none if that part failed.

    Raises:
        BadWorkerAnswer: points or processes are missing, or a number or interval is impossible.
    """
    points, requested = report.generation.points, request.generation
    if not points:
        return
    if requested is None or len(points) != len(requested.prompt_tokens):
        raise BadWorkerAnswer("The analysis child must return the points of generation that were requested.")
    for point in points:
        if len(point.runs) != len(requested.processes) or len(point.token_ns) not in (0, requested.generated_tokens):
            raise BadWorkerAnswer("The analysis child must return each process and each token of generation.")
        if not all(0 <= time_ns <= _MAX_NS for time_ns in point.token_ns):
            raise BadWorkerAnswer(f"The analysis child must return times of 0 to {_MAX_NS:g} ns for each token.")
        for run in point.runs:
            for name, interval in GENERATION_METRICS.items():
                value, ends = getattr(run, name), getattr(run, interval)
                known = [value, *ends] if run.HasField(name) else []  # type: ignore[arg-type]
                if (not known and ends) or not all(_LEAST_RATE <= each <= _MOST_RATE for each in known):
                    raise BadWorkerAnswer(f"The analysis child must return numbers above 0 for `{name}`.")
                if len(ends) not in (0, 2) or list(ends) != sorted(ends):
                    raise BadWorkerAnswer(f"The analysis child must return intervals of `{name}` in ascending order.")


def require_encoders(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require the traced encoders of the request, each once.

    Raises:
        BadWorkerAnswer: there are others.
    """
    requested = [trace.method for trace in request.encoders or ()]
    returned = [encoder.method for encoder in report.generation.encoders]
    if len(set(returned)) < len(returned) or not set(returned) <= set(requested):
        raise BadWorkerAnswer("The analysis child must return the profile of each traced encoder once.")


_TEXT_NUMBERS: Final = {
    "top1_agreement": (0.0, 1.0), "sqnr_db": (-1e4, 300.0), "max_abs_error": (0.0, _MOST_RATE),
    "kl_divergence": (0.0, _MOST_RATE), "perplexity": (1.0, _MOST_RATE), "perplexity_ratio": (_LEAST_RATE, _MOST_RATE),
}  # fmt: skip
"""Ranges of the numbers of a GenerationReference."""


def require_text_accuracy(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    """Require possible numbers of the accuracy of generation, if the child computed it.

    Raises:
        BadWorkerAnswer: a number is impossible, or there are other references than those of the request.
    """
    if not report.generation.HasField("accuracy"):
        return
    accuracy, scores = report.generation.accuracy, request.scores
    known = [reference.reference for reference in accuracy.references]
    if scores is None or known != sorted(set(known)) or any(not 0 < each <= report_pb2.REFERENCE_HOST for each in known):
        raise BadWorkerAnswer("The analysis child must return the accuracy of generation against each reference once.")
    if not 0 <= accuracy.perplexity_tokens <= scores.executed or (
        accuracy.HasField("perplexity") and not 1.0 <= accuracy.perplexity <= _MOST_RATE
    ):
        raise BadWorkerAnswer("The analysis child must return a perplexity of 1 or more, of the tokens that were executed.")
    for reference in accuracy.references:
        counts = (
            (reference.tokens, scores.executed), (reference.logits_tokens, len(scores.logits_after)),
            (reference.generated_tokens, scores.generated_tokens),
        )  # fmt: skip
        if any(not 0 <= count <= most for count, most in counts):
            raise BadWorkerAnswer("The analysis child must not compare more tokens than there are.")
        for name, (least, most) in _TEXT_NUMBERS.items():
            if reference.HasField(name) and not least <= getattr(reference, name) <= most:  # type: ignore[arg-type]
                raise BadWorkerAnswer(f"The analysis child must return a `{name}` of {least:g} to {most:g}.")
        difference = reference.first_difference
        if reference.HasField("first_difference") and not (
            0 <= difference.index < scores.generated_tokens and difference.gap >= 0 and math.isfinite(difference.gap)
        ):
            raise BadWorkerAnswer("The analysis child must return a generated token as the first that differs.")
