"""Hostile ETRecords, as a model that broke out of its compilation could write them, and hostile traces of agents, in the jailed
child that analyses a run.

A record costs at most what only it provides: the rows of the trace stay. A trace costs its rows.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.graphs.sources import module_of
from etfarm.server.reports.findings import Findings
from etfarm.server.reports.numerics import edge
from etfarm.server.reports.request import CUT_SHORT, AnalyzeRequest
from etfarm.server.reports.trace.graph import BadRecord
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.v1 import report_pb2
from etfarm.wire import digest
from tests.support.databases import new_database
from tests.support.traces import traced

ROOT = Path(__file__).parents[2]
GRAPH = "edge_dialect_exported_program/forward"
MIB = 1 << 20
SURROGATE = "\ud800"  # JSON may have half of a pair, which no report can hold

Entries = dict[str, bytes]
Document = dict[str, Any]


def entries() -> Entries:
    with zipfile.ZipFile(traced("portable").etrecord) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(changes: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in {**entries(), **changes}.items():
            archive.writestr(name, data)
    return stream.getvalue()


def graph(change: Callable[[Document], None]) -> Callable[[], bytes]:
    """Return a record whose graph is changed."""

    def write() -> bytes:
        document = json.loads(entries()[GRAPH])
        change(document["graph_module"])
        return packed({GRAPH: json.dumps(document).encode()})

    return write


def metadata(**values: str) -> Callable[[], bytes]:
    """Return a record with the same metadata for each operator."""

    def change(module: Document) -> None:
        for node in module["graph"]["nodes"]:
            node["metadata"].update(values)

    return graph(change)


def handles(value: object) -> Callable[[], bytes]:
    """Return a record whose first operator and instruction have debug handles."""

    def write() -> bytes:
        document = json.loads(entries()[GRAPH])
        document["graph_module"]["graph"]["nodes"][0]["metadata"]["debug_handle"] = str(value)
        known = json.loads(entries()["debug_handle_map"])
        known["forward"]["0"] = value
        return packed({GRAPH: json.dumps(document).encode(), "debug_handle_map": json.dumps(known).encode()})

    return write


def relus(count: int, debug_handles: str = "") -> Callable[[], bytes]:
    """Return a record with activations that follow each other."""

    def change(module: Document) -> None:
        nodes = module["graph"]["nodes"]
        nodes += [
            {
                **nodes[0], "target": "torch.ops.aten.relu.default",
                "metadata": {"debug_handle": debug_handles or str(at + 1000)},
                "inputs": [{"name": "self", "arg": {"as_tensor": {"name": f"v{at - 1}"}}, "kind": 1}],
                "outputs": [{"as_tensor": {"name": f"v{at}"}}],
            }
            for at in range(count)
        ]  # fmt: skip

    return graph(change)


def same_names(module: Document) -> None:
    """Let each operator take what it gives."""
    for node in module["graph"]["nodes"]:
        node["inputs"] = [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}]
        node["outputs"] = [{"as_tensor": {"name": "x"}}]


def bomb(compression: int, size_mib: int) -> Callable[[], bytes]:
    """Return an archive whose graph says that it has 1,000 bytes, and expands to far more."""

    def write() -> bytes:
        data = bytearray(packed({GRAPH: b" " * (size_mib * MIB)}, compression))
        at = data.find(b"PK\x01\x02")
        while at >= 0:
            (length,) = struct.unpack_from("<H", data, at + 28)
            if data[at + 46 : at + 46 + length] == GRAPH.encode():
                struct.pack_into("<I", data, at + 24, 1000)
            at = data.find(b"PK\x01\x02", at + 46)
        return bytes(data)

    return write


FRAME = '  File "{}", line {}, in forward\n    {}\n'

RECORDS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    # Name: the record's bytes, the warning; None if the record can be read.
    "empty": (lambda: b"", "ANALYSIS_ETRECORD_UNREADABLE"),
    "deep": (lambda: packed({GRAPH: b"[" * 5_000_000}), "ANALYSIS_ETRECORD_UNREADABLE"),
    "millions of lists": (lambda: packed({GRAPH: b"[" + b"[]," * 20_000_000 + b"[]]"}), "ANALYSIS_ETRECORD_UNREADABLE"),
    "a bomb": (bomb(zipfile.ZIP_DEFLATED, 256), "ANALYSIS_ETRECORD_UNREADABLE"),
    "a bomb of LZMA": (bomb(zipfile.ZIP_LZMA, 8), "ANALYSIS_ETRECORD_UNREADABLE"),
    "large handles": (handles(1 << 70), "ANALYSIS_ETRECORD_UNREADABLE"),
    "millions of handles": (handles(list(range(1, 2_000_000))), "ANALYSIS_ETRECORD_UNREADABLE"),
    "endless activations": (relus(100_000), "ANALYSIS_ETRECORD_UNREADABLE"),
    "activations of many handles": (relus(900, " ".join(map(str, range(1, 3000)))), "ANALYSIS_ETRECORD_UNREADABLE"),
    "operators that take themselves": (graph(same_names), None),
    "a module of commas": (metadata(nn_module_stack="a," * 50_000), None),
    "a module of semicolons": (metadata(nn_module_stack="a;" * 20_000), None),
    "a line that is too large": (metadata(stack_trace=FRAME.format("m.py", 10**20, "x")), "ANALYSIS_ETRECORD_UNREADABLE"),
    "a line of 5,000 digits": (metadata(stack_trace=FRAME.format("m.py", "9" * 5000, "x")), "ANALYSIS_ETRECORD_UNREADABLE"),
    "half a character in a path": (metadata(stack_trace=FRAME.format(SURROGATE, 1, "x")), "ANALYSIS_ETRECORD_UNREADABLE"),
    "half a character in a line": (metadata(stack_trace=FRAME.format("m.py", 1, SURROGATE)), "ANALYSIS_ETRECORD_UNREADABLE"),
    "half a character in a module": (metadata(nn_module_stack=f"k,{SURROGATE},T"), "ANALYSIS_ETRECORD_UNREADABLE"),
}


@pytest.fixture
async def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Findings]:
    """The analyses of a server, whose children may take 1 GiB."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    limits = Limits(memory_bytes=1 << 30, cpu_s=120, threads=1)
    pool = Workers(preload=["etfarm.server.reports.analyze"], limits=limits, folder=tmp_path / "jobs", concurrency=1)
    database = new_database(tmp_path / "farm.sqlite")
    await database.open()
    store = Store(tmp_path / "store", database)
    pool.start()
    try:
        yield Findings(pool, store, database, lambda: datetime.now(UTC), deadline_s=300)
    finally:
        await pool.stop()
        store.close()
        database.close()


def request(folder: Path, record: bytes) -> AnalyzeRequest:
    run = traced("portable")
    path = folder / digest.of_bytes(record)
    path.write_bytes(record)
    return AnalyzeRequest(
        pte=run.pte, etdump=run.etdump, etrecord=path, model=None, inputs=None, outputs=None, samples=None, method=run.method,
        output_names=(), traced_ns=run.traced_ns,
    )  # fmt: skip


@pytest.mark.slow(reason="a child reads each of 17 large records")
async def test_a_hostile_record_costs_its_lines_at_most(findings: Findings, tmp_path: Path) -> None:
    plain = request(tmp_path, packed({}))
    assert not (await findings.of(plain, lambda _: None)).compile.warnings
    names = [row.name for row in (await findings.of(replace(plain, etrecord=None), lambda _: None)).operators]
    failed: list[str] = []
    for name, (write, expected) in RECORDS.items():
        asked = request(tmp_path, write())
        report: report_pb2.Report = await findings.of(asked, lambda _: None)
        codes = [warning.code for warning in report.compile.warnings]
        if [row.name for row in report.operators] != names or codes != ([] if expected is None else [expected]):
            failed.append(f"{name}: {len(report.operators)} rows, {codes}")
        assert asked.etrecord is not None
        asked.etrecord.unlink()
    assert not failed


async def test_a_record_that_takes_too_long_costs_its_lines_at_most(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.reports.findings.ANALYZE_TASK", "tests.support.worker_tasks:analyze_within_a_second")
    asked = request(tmp_path, packed({GRAPH: b"[" + b"[]," * 20_000_000 + b"[]]"}))
    report = await findings.of(asked, lambda _: None)
    (warning,) = report.compile.warnings
    assert (warning.code, "took more CPU time" in warning.message) == (CUT_SHORT, True), warning
    rows = await findings.of(replace(asked, etrecord=None), lambda _: None)
    assert rows.operators and [row.name for row in report.operators] == [row.name for row in rows.operators]


def overwritten(data: bytes, seed: int) -> bytes:
    damaged, numbers = bytearray(data), random.Random(seed)
    for _ in range(200):
        damaged[numbers.randrange(12, len(damaged))] = numbers.randrange(256)
    return bytes(damaged)


@pytest.mark.slow(reason="a child reads each of 9 traces")
async def test_a_hostile_trace_costs_its_rows_and_names_itself(findings: Findings, tmp_path: Path) -> None:
    plain = request(tmp_path, packed({}))
    good = traced("portable").etdump.read_bytes()
    traces = {
        "nothing": b"", "half": good[: len(good) // 2], "noise": random.Random(1).randbytes(100_000),
        "a size of 4 GiB": b"\xff" * 4 + good[4:], "only a name": b"\x08\0\0\0\x04\0\0\0ED00",
        "zeros": b"\0\0\0\x04\x04\0\0\0ED00" + bytes(64 << 20),
        "counts of 4 billion": good[:12] + good[12:].replace(b"\x01\0\0\0", b"\xff\xff\xff\xff"),
        **{f"damage {seed}": overwritten(good, seed) for seed in range(2)},
    }  # fmt: skip
    for name, data in traces.items():
        path = tmp_path / "trace"
        path.write_bytes(data)
        report = await findings.of(replace(plain, etdump=path), lambda _: None, fresh=True)
        (warning,) = report.compile.warnings
        expected = {"ANALYSIS_JOIN_FAILED", "ANALYSIS_TRACE_OF_ANOTHER_PROGRAM", "ANALYSIS_TRACE_OF_ANOTHER_RUN"}
        assert warning.code in expected and warning.message.startswith("The trace "), (name, warning)
        assert not report.operators and report.profile.iterations == len(plain.traced_ns), name


@pytest.mark.parametrize("name", ["deep", "a bomb of LZMA", "large handles", "half a character in a path"])
def test_its_values_are_not_compared_either(tmp_path: Path, name: str) -> None:
    path = request(tmp_path, RECORDS[name][0]()).etrecord
    assert path is not None
    with pytest.raises(BadRecord):
        edge.read(path, "forward")


def test_a_module_stack_is_split_outside_of_brackets() -> None:
    assert (
        module_of("a,L['self'].x[slice(None, None, None)].y,T;b(;,),L['self'].layers[0, 1].conv,f(a, b)") == "layers[0, 1].conv"
    )
    assert module_of("k,a),b,T") == "b"
    assert module_of("(" * 300_000 + ",;" * 300_000) is None
