"""Requests for analyses, of a run's files or with few of them, and the report that the child makes."""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

from etfarm.server.reports.analyze import analyze
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.reports.trace import etdump, graph
from etfarm.server.reports.trace.etdump import Trace
from etfarm.v1 import report_pb2
from tests.support.traces import Traced, traced

_NOTHING = dict.fromkeys(("pte", "etdump", "etrecord", "model", "inputs", "outputs", "samples"))


def analyze_request(**parts: Any) -> AnalyzeRequest:
    """Return a request with the parts that are given, and without any other file."""
    values: dict[str, Any] = {**_NOTHING, "method": "forward", "output_names": (), "traced_ns": (), **parts}
    return AnalyzeRequest(**values)


def traced_request(run: Traced, **parts: Any) -> AnalyzeRequest:
    """Return a request for the operators of a traced run."""
    files = {"pte": run.pte, "etdump": run.etdump, "etrecord": run.etrecord}
    return analyze_request(**files | {"method": run.method, "traced_ns": run.traced_ns} | parts)


def analyzed(request: AnalyzeRequest, folder: Path, events: list[dict[str, Any]] | None = None) -> report_pb2.Report:
    """Return what the child makes of a request.

    Args:
        events: gets the events of the analysis.
    """
    received = [] if events is None else events
    data = analyze(pickle.loads(pickle.dumps(request)), folder, lambda event: received.append(json.loads(event)))
    return report_pb2.Report.FromString(data)


@cache
def read(name: str) -> tuple[Trace, dict[tuple[int, int], graph.Instruction], graph.Record]:
    """Return the trace, the program and the record of a traced run."""
    run = traced(name)
    trace = etdump.read(run.etdump.read_bytes())
    return trace, graph.read_program(run.pte, run.method), graph.read_record(run.etrecord, run.method)


def warnings_of(report: report_pb2.Report) -> list[str]:
    """Return the codes of a report's warnings."""
    return [warning.code for warning in report.compile.warnings]
