"""History: a search over the reports of all jobs by model, device, recipe, method and threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import structlog
from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select, true

from etfarm.server.access.scope import Scope
from etfarm.server.jobs.records.reports import PAGE_BYTES
from etfarm.server.jobs.records.tags import tags_of
from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, unseal
from etfarm.server.state.engine import Database
from etfarm.server.state.paging import BadPageToken
from etfarm.v1 import report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire import selectors
from etfarm.wire.errors import EtfarmError, error_for

log = structlog.get_logger()

LEAST_DIGEST = 4
"""Minimum number of leading characters of a digest that select a model."""

_DIGEST = re.compile(rf"[0-9a-fA-F]{{{LEAST_DIGEST},}}\Z", re.ASCII)

_KNOWN = 20
"""Maximum number of models that an error lists."""

_TOKEN = re.compile(r"(\d{1,18})\.([0-9a-zA-Z_-]{1,64})\Z", re.ASCII)
_MAX_READ_BYTES = 64 << 20
"""Maximum total size of the reports that are read for a page, with the rows that it leaves out."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Wanted:
    """A selection of reports; None and the empty selector match all."""

    model: str
    """A model's name, or the first characters of its digest."""
    device: selectors.Selector = field(default_factory=selectors.Selector)
    recipe: str | None = None
    method: str | None = None
    threads: int | None = None


class History:
    """The reports of all jobs of a farm.

    Args:
        devices: returns the devices that a scope knows, offline ones included.
        page_bytes: maximum total size of the reports of a page; a single report may exceed it.
    """

    def __init__(self, database: Database, devices: Callable[[Scope], Sequence[Device]], *, page_bytes: int = PAGE_BYTES) -> None:
        self._page_bytes = page_bytes
        self._database = database
        self._devices = devices

    async def page(self, wanted: Wanted, size: int, token: str, scope: Scope) -> report_pb2.ListHistoryResponse:
        """Return a page of reports, newest first, without operators, numeric gap, telemetry series and ratios of rounds.

        Devices are matched by their current
        description; devices that the farm no longer knows by the description in their reports, which has neither labels, features
        nor backends. Reports outside the scope are invisible.

        Raises:
            NO_HISTORY: the model has no report, regardless of device, recipe, method and threads.
            BadPageToken: `token` is neither empty nor the token of the previous page.
        """
        before = _position(token) if token else None
        known = {device.id: device for device in self._devices(scope)}

        def read(connection: Connection) -> report_pb2.ListHistoryResponse:
            table = schema.reports
            of_model = _find_model(connection, wanted.model, scope)
            if of_model is None:
                raise _no_history(connection, wanted.model, scope)
            terms = [of_model, *_terms(wanted)]
            if wanted.device.terms:
                terms.append(table.c.device_id.in_(_devices(connection, of_model, wanted.device, known, scope)))
            if before is not None:
                at, report_id = before
                terms.append(or_(table.c.created_at < at, and_(table.c.created_at == at, table.c.id < report_id)))
            newest_first = (table.c.created_at.desc(), table.c.id.desc())
            query = select(table.c.id, table.c.job_id, table.c.created_at).where(*terms).order_by(*newest_first).limit(size + 1)
            rows = connection.execute(query).all()
            answer = report_pb2.ListHistoryResponse()
            bytes_left, read_bytes = self._page_bytes, 0
            for row in rows[:size]:
                body = connection.execute(select(table.c.body).where(table.c.id == row.id)).scalar_one()
                read_bytes += len(body)
                if answer.entries and read_bytes > _MAX_READ_BYTES:
                    break
                try:
                    report = _without_rows(unseal(report_pb2.Report, body, "a report", row.job_id))
                except ValueDamaged as damaged:
                    log.error("a stored value is damaged", job=row.job_id, what=damaged.metadata["what"])
                    report = report_pb2.Report(id=row.id)  # one row, so that the others are shown
                size_bytes = report.ByteSize()
                if answer.entries and size_bytes > bytes_left:
                    break
                bytes_left -= size_bytes
                answer.entries.add(job_id=row.job_id, tags=tags_of(connection, row.job_id), report=report)
            if len(rows) > len(answer.entries):
                last = rows[len(answer.entries) - 1]
                answer.next_page_token = f"{(last.created_at - _EPOCH) // _MICROSECOND}.{last.id}"
            return answer

        return await self._database.read(read)


def _without_rows(report: report_pb2.Report) -> report_pb2.Report:
    """Remove what a history does not show, in place: the rows of operators and values, the series, and the telemetry of runs."""
    for name in ("operators", "numeric_gap"):
        report.ClearField(name)
    if report.HasField("telemetry"):
        report.telemetry.ClearField("series")
    for run in report.runs:
        run.ClearField("telemetry")
    if report.HasField("interleaved"):
        report.interleaved.ClearField("ratios")
    if report.HasField("generation"):
        report.generation.ClearField("prefill_operators")
        for encoder in report.generation.encoders:
            encoder.ClearField("operators")
        for point in report.generation.points:
            point.ClearField("token_ns")
            for generating in point.runs:
                generating.ClearField("telemetry")
    return report


def _in_scope(scope: Scope) -> ColumnElement[bool]:
    """Return the SQL condition that a report's job is in the scope."""
    jobs = schema.jobs.c
    return (
        exists().where(jobs.id == schema.reports.c.job_id, scope.clause(jobs.project)) if scope.projects is not None else true()
    )


def _find_model(connection: Connection, model: str, scope: Scope) -> ColumnElement[bool] | None:
    """Return the SQL condition of a model's reports in the scope, and None if there are none. A name precedes a digest.

    Name and digest in one condition would make databases sort all reports of the model for each page.
    """
    table = schema.reports.c
    conditions: list[ColumnElement[bool]] = [table.model_name == model]
    if _DIGEST.match(model):
        # LIKE would ignore the index. "g" follows every hexadecimal digit.
        conditions.append(and_(table.model_digest >= model.lower(), table.model_digest < f"{model.lower()}g"))
    for condition in conditions:
        of_model = and_(condition, _in_scope(scope))
        if connection.execute(select(table.id).where(of_model).limit(1)).scalar() is not None:
            return of_model
    return None


def _terms(wanted: Wanted) -> list[ColumnElement[bool]]:
    table = schema.reports
    pairs = ((table.c.recipe, wanted.recipe), (table.c.method, wanted.method), (table.c.threads, wanted.threads))
    return [column == value for column, value in pairs if value is not None]


def _devices(
    connection: Connection, of_model: ColumnElement[bool], selector: selectors.Selector, known: dict[str, Device], scope: Scope
) -> list[str]:
    """Return the ids of the matching devices that have reports of the model."""
    table = schema.reports
    matching = []
    for device_id in connection.execute(select(table.c.device_id).where(of_model, table.c.device_id != "").distinct()).scalars():
        device = known.get(device_id)
        if device is None:
            of_device = select(table.c.body, table.c.job_id).where(table.c.device_id == device_id, _in_scope(scope))
            newest = connection.execute(of_device.order_by(table.c.created_at.desc()).limit(1)).one()
            try:
                device = _device_of(unseal(report_pb2.Report, newest.body, "a report", newest.job_id).device)
            except ValueDamaged:
                device = Device(id=device_id)
        if selector.matches(device):
            matching.append(device_id)
    return matching


def _device_of(device: report_pb2.ReportDevice) -> Device:
    return Device(
        id=device.id,
        name=device.name,
        arch=device.arch,
        soc=device.soc,
        os=device.os,
        cores=device.cores,
        memory_bytes=device.memory_bytes,
        emulated=device.emulated,
    )


def _position(token: str) -> tuple[datetime, str]:
    match = _TOKEN.match(token)
    if match is None:
        raise BadPageToken.of(token)
    try:
        return _EPOCH + int(match[1]) * _MICROSECOND, match[2]
    except OverflowError:  # a date after the year 9999
        raise BadPageToken.of(token) from None


def _no_history(connection: Connection, model: str, scope: Scope) -> EtfarmError:
    table = schema.reports
    of_scope = select(table.c.model_name).where(_in_scope(scope)).group_by(table.c.model_name)
    query = of_scope.order_by(func.max(table.c.created_at).desc()).limit(_KNOWN)
    names = [name for name in connection.execute(query).scalars() if name]
    remedy = f"There are reports of: {', '.join(names)}." if names else "There are no reports yet."
    return error_for(
        "NO_HISTORY", f"There is no report of a model {model[:80]!r}.", remedy, model=model[:80], known=",".join(names)
    )
