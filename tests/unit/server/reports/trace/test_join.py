"""Operator rows: nothing counted twice, shares that sum to 1, names and lines that are the user's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.trace import etdump, graph, provenance
from etfarm.server.reports.trace.etdump import Call, Kernel, Trace
from etfarm.server.reports.trace.graph import Instruction, Record
from etfarm.server.reports.trace.join import Joined, join
from etfarm.v1 import report_pb2
from etfarm.wire import digest, views
from etfarm.wire.report import report_json
from tests.bench import join as bench
from tests.support.programs import cache_folder
from tests.support.traces import ITERATIONS, Traced, line_of, traced

OPERATOR = report_pb2.OPERATOR_KIND_OPERATOR
DELEGATE = report_pb2.OPERATOR_KIND_DELEGATE
KERNEL = report_pb2.OPERATOR_KIND_KERNEL
REST = report_pb2.OPERATOR_KIND_REST

NAMES = ["xnnpack", "portable", "int8", "methods", "renamed"]
XNNPACK = {(0, 0): Instruction("XnnpackBackend", True)}


def _joined(run: Traced) -> Joined:
    trace = etdump.read(run.etdump.read_bytes())
    return join(trace, graph.read_record(run.etrecord, run.method), graph.read_program(run.pte, run.method), run.method)


def _leaves(rows: Iterable[report_pb2.OperatorRow]) -> list[report_pb2.OperatorRow]:
    rows = list(rows)
    parents = {row.parent for row in rows if row.HasField("parent")}
    return [row for row in rows if row.index not in parents]


def _row(joined: Joined, name: str) -> report_pb2.OperatorRow:
    (row,) = [row for row in joined.operators if row.name == name]
    return row


def _times(*ns: float) -> Any:
    return np.array(ns, dtype=np.float64)


def _delegate(time: Sequence[float], *kernels: Sequence[float]) -> Call:
    parts = tuple(Kernel(f"Kernel #{at}", _times(*ns)) for at, ns in enumerate(kernels))
    return Call(0, 0, None, True, _times(*time), parts)


def _rows(method_ns: Sequence[float], *delegate: Sequence[float]) -> Sequence[report_pb2.OperatorRow]:
    """Return the rows of a method that calls one delegate; its times, and those of its kernels."""
    trace = Trace(_times(*method_ns), (_delegate(*delegate),), 0)
    return join(trace, Record(), XNNPACK, "forward").operators


@pytest.mark.parametrize("name", NAMES)
def test_leaves_of_a_real_trace_sum_to_one(name: str) -> None:
    joined = _joined(traced(name))
    assert sum(row.share for row in _leaves(joined.operators)) == pytest.approx(1, abs=1e-6)
    assert joined.profile.iterations == ITERATIONS
    assert [row.index for row in joined.operators] == list(range(len(joined.operators)))


@pytest.mark.parametrize("name", NAMES)
def test_each_instruction_of_the_program_has_one_row(name: str) -> None:
    run = traced(name)
    program = graph.read_program(run.pte, run.method)
    rows = [row for row in _joined(run).operators if row.kind in (OPERATOR, DELEGATE)]
    assert [(row.instruction_id, row.name, row.kind == DELEGATE) for row in rows] == [
        (at, instruction.name, instruction.delegate) for (_, at), instruction in sorted(program.items())
    ]


@pytest.mark.parametrize("name", NAMES)
def test_times_and_types_are_those_of_inspector(name: str) -> None:
    run = traced(name)
    from executorch.devtools import Inspector

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Inspector fails for a record of several methods, and with one that is not called forward finds nothing.
        record = str(run.etrecord) if run.method == "forward" else None
        inspector = Inspector(etdump_path=str(run.etdump), etrecord=record)
    (block,) = [block for block in inspector.event_blocks if block.name == "Execute"]
    # An event inside a delegate has its identifier for a name.
    events = {(e._instruction_id, e.delegate_debug_identifier, e.name.removeprefix("native_call_")): e for e in block.events}
    joined = _joined(run)
    assert joined.profile.p50_ns == pytest.approx(events[0, None, "Method::execute"].perf_data.p50 * 1e6)
    for row in joined.operators:
        if row.kind == REST:
            continue
        event = events[
            row.instruction_id,
            row.name if row.kind == KERNEL else None,
            {OPERATOR: row.name.partition(".")[2], DELEGATE: "DELEGATE_CALL", KERNEL: row.name}[row.kind],
        ]
        if row.HasField("p50_ns"):
            assert row.p50_ns == pytest.approx(event.perf_data.p50 * 1e6)
        else:
            assert event.perf_data.p50 * 1e6 < row.resolution_ns
        if record is not None and row.kind == OPERATOR:
            assert set(row.op_types) <= {kind.removeprefix("executorch.exir.dialects.edge.ops.") for kind in event.op_types}
            assert set(row.debug_handles) == set(np.atleast_1d(event.debug_handles))


def test_lines_and_modules_are_the_users_on_portable_kernels() -> None:
    joined = _joined(traced("portable"))
    result = {row.name: (row.source.line, row.source.code, row.module) for row in joined.operators if row.kind == OPERATOR}
    fc = "scores = self.fc(pooled)"
    assert result == {
        "aten.convolution.out": (line_of("convolved ="), "convolved = self.conv(x)", "block.conv"),
        "aten.relu.out": (line_of("return torch.relu"), "return torch.relu(convolved)", "block"),
        "aten.mean.out": (line_of("pooled ="), "pooled = y.mean((2, 3))", ""),
        "aten.permute_copy.out": (line_of("scores ="), fc, "fc"),
        "aten.addmm.out": (line_of("scores ="), fc, "fc"),
        "aten.argmax.out": (line_of("return scores"), "return scores, scores.argmax(1)", ""),
    }
    assert {row.source.file for row in joined.operators if row.HasField("source")} == {traced("portable").source}
    assert _row(joined, "aten.addmm.out").op_types == ["aten.addmm.default"]
    assert not _row(joined, "aten.mean.out").HasField("module")
    assert not any(row.delegated or row.HasField("backend") or row.HasField("aligned") for row in joined.operators)


@pytest.mark.parametrize(("name", "types"), [("xnnpack", {"convolution", "relu"}), ("int8", {"convolution", "relu"})])
def test_a_delegate_has_its_ops_and_its_kernels_below_it(name: str, types: set[str]) -> None:
    joined = _joined(traced(name))
    first = joined.operators[0]
    assert (first.kind, first.name, first.backend, first.delegated) == (DELEGATE, "XnnpackBackend", "XnnpackBackend", True)
    ops = [op for op in first.op_types if not op.startswith("quantized_decomposed.")]
    assert {graph.base_name(op) for op in ops} == types
    assert (first.module, first.HasField("source")) == ("block", False)
    children = [row for row in joined.operators if row.HasField("parent") and row.parent == first.index]
    assert [row.index for row in children] == list(range(1, len(children) + 1))
    assert [row.kind for row in children[:-1]] == [KERNEL] * (len(children) - 1)
    assert children[-1].kind == REST
    assert any(row.name.startswith("Convolution") for row in children)
    for row in children:
        assert row.delegated
        assert row.resolution_ns == 1000
        assert row.HasField("p50_ns") == (row.p50_ns >= 1000)
        assert row.HasField("mean_ns") == (row.mean_ns > 0)
    assert all(row.HasField("aligned") and not row.aligned for row in children[:-1])
    assert sum(row.share for row in children) == pytest.approx(first.share)


def test_a_delegate_does_not_claim_the_kernel_that_feeds_it() -> None:
    """The mean runs outside; what quantizes its result runs inside and has its debug handle."""
    joined = _joined(traced("int8"))
    (second,) = [row for row in joined.operators if row.kind == DELEGATE and row.index > 0]
    assert [op for op in second.op_types if not op.startswith("quantized")] == ["aten.linear.default"]
    assert (second.module, second.source.code) == ("fc", "scores = self.fc(pooled)")
    assert _row(joined, "aten.mean.out").source.line == line_of("pooled =")


def test_a_record_of_several_methods_gives_the_lines_of_the_one_that_ran() -> None:
    joined = _joined(traced("methods"))
    assert [(row.name, row.source.code) for row in joined.operators] == [
        ("aten.mul.out", "doubled = x * 2.0"),
        ("aten.sigmoid.out", "return doubled.sigmoid()"),
        ("rest of decode", ""),
    ]


NS = st.integers(0, 3_000_000)


@st.composite
def _any_trace(draw: st.DrawFn) -> Trace:
    """Any durations at all, children longer than their parents included."""
    n = draw(st.integers(1, 12))
    times = st.lists(NS, min_size=n, max_size=n).map(lambda ns: _times(*ns))
    calls = []
    for at in range(draw(st.integers(0, 4))):
        delegate = draw(st.booleans())
        kernels = tuple(Kernel(i, draw(times)) for i in range(draw(st.integers(0, 3)))) if delegate else ()
        calls.append(Call(0, at, None if delegate else "add.out", delegate, draw(times), kernels))
    return Trace(draw(times), tuple(calls), 0)


@given(_any_trace())
def test_shares_of_any_trace_nest_and_sum_to_one(trace: Trace) -> None:
    joined = join(trace, Record(), {}, "forward")
    rows = joined.operators
    if not any(row.HasField("share") for row in rows):
        assert joined.profile.p50_ns == 0 or trace.method_ns.min() == 0
        return
    assert all(0 <= row.share <= 1 + 1e-9 for row in rows)
    assert sum(row.share for row in _leaves(rows)) == pytest.approx(1, abs=1e-6)
    for row in rows:
        children = [child.share for child in rows if child.HasField("parent") and child.parent == row.index]
        assert not children or sum(children) == pytest.approx(row.share, abs=1e-6)
        for field in ("p50_ns", "mean_ns"):
            assert not row.HasField(field) or getattr(row, field) > 0


@pytest.mark.parametrize("name", NAMES)
def test_times_shares_and_intervals_of_a_real_trace_never_contradict(name: str) -> None:
    joined = _joined(traced(name))
    profile = joined.profile
    assert profile.mean_ci95_ns[0] <= profile.mean_ns <= profile.mean_ci95_ns[1]
    assert profile.events >= len(joined.operators) - sum(row.kind == REST for row in joined.operators)
    leaves = _leaves(joined.operators)
    assert sum(row.mean_ns for row in leaves) == pytest.approx(profile.mean_ns)
    for row in joined.operators:
        assert row.share == pytest.approx(row.mean_ns / profile.mean_ns)
        if row.HasField("mean_ns"):
            assert row.mean_ci95_ns[0] <= row.mean_ns <= row.mean_ci95_ns[1]
        else:
            assert not row.mean_ci95_ns
    document = report_json(report_pb2.Report(profile=profile, operators=joined.operators))
    for by in views.BY:
        for group in views.group(document["operators"], by):
            if group.own_ns is not None:
                assert group.own_share == pytest.approx(group.own_ns / profile.mean_ns)


def test_kernels_that_exceed_their_delegate_by_rounding_fill_it() -> None:
    rows = _rows([*[4000] * 4], [2000] * 4, [2000] * 4, [1000] * 4)
    assert [row.share for row in rows] == pytest.approx([0.5, 1 / 3, 1 / 6, 0.0, 0.5])
    assert [row.mean_ns for row in rows[1:3]] == pytest.approx([4000 / 3, 2000 / 3]), "the time is the share of the method's"
    assert [row.p50_ns for row in rows[1:3]] == [2000, 1000], "percentiles are as measured"
    assert not rows[3].HasField("p50_ns")


def test_a_delegate_without_kernels_is_a_leaf() -> None:
    rows = _rows([100], [60])
    assert [(row.kind, row.share) for row in rows] == [(DELEGATE, pytest.approx(0.6)), (REST, pytest.approx(0.4))]


def test_a_kernel_below_the_resolution_has_no_median_but_a_mean() -> None:
    ran = [0, 0, 0, 0, 1000, 1000]
    rows = _rows([*[10_000] * 6], [5000] * 6, ran, [0] * 6)
    assert not rows[1].HasField("p50_ns")
    assert rows[1].mean_ns == pytest.approx(2000 / 6 + 500), "XNNPACK's clock rounds down"
    assert not rows[2].HasField("p50_ns")
    assert not rows[2].HasField("mean_ns")
    assert rows[2].resolution_ns == 1000


def test_a_kernel_that_a_coarse_clock_reads_as_one_number_is_as_uncertain_as_its_step() -> None:
    rows = _rows([*range(10_000, 10_060)], [8000] * 60, [4000] * 60, [1000, 2000] * 30)
    assert rows[1].mean_ns == pytest.approx(4500) and list(rows[1].mean_ci95_ns) == pytest.approx([4000, 5000])
    low, high = rows[2].mean_ci95_ns
    assert rows[2].mean_ns == pytest.approx(2000, rel=0.1) and high - low < 800, "its times average the rounding out"
    assert rows[3].mean_ci95_ns[1] - rows[3].mean_ci95_ns[0] >= 1000, "the REST has what kernels do not"


@pytest.mark.parametrize("first_ns", [0, 1000])
def test_kernels_that_only_a_cold_iteration_saw_take_nothing_from_a_long_one(first_ns: int) -> None:
    """A hundred kernels of 0.2 us beside one of 60 us."""
    long, short = [60_000] * 100, [first_ns, *[0] * 99]
    rows = _rows([300_000, *range(90_000, 90_099)], [83_000] * 100, long, *[short] * 100)
    assert rows[1].mean_ns == pytest.approx(60_500) and not rows[2].HasField("mean_ns")
    rest = rows[-2]
    assert rest.mean_ns == pytest.approx(22_500) and rest.rounding_ns == pytest.approx(500)


def test_kernels_are_raised_by_what_their_delegate_has_left() -> None:
    rows = _rows([*[9000] * 6], [5200] * 6, [3000] * 6, [2000] * 6)
    assert [row.mean_ns for row in rows[1:3]] == pytest.approx([3100, 2100]) and not rows[3].HasField("mean_ns")


def test_a_cold_first_iteration_changes_no_share() -> None:
    assert _rows([900_000, *[100] * 9], [890_000, *[50] * 9])[0].share == pytest.approx(0.5)


def test_a_backend_that_reports_its_map_has_aligned_kernels_with_lines() -> None:
    node = graph.Node("aten.add.Tensor", "tail", None)
    record = Record({0: (7, 8)}, {0: {"3": (8,)}}, {7: (graph.Node("aten.mul.Tensor", "head", None),), 8: (node,)})
    call = Call(0, 0, None, True, _times(100), (Kernel(3, _times(60)), Kernel(4, _times(20))))
    rows = join(Trace(_times(100), (call,), 0), record, {(0, 0): Instruction("OtherBackend", True)}, "forward").operators
    known, unknown = rows[1], rows[2]
    assert (known.name, known.aligned, known.op_types, known.module) == ("OtherBackend #3", True, ["aten.add.Tensor"], "tail")
    assert (unknown.aligned, unknown.op_types, unknown.HasField("module")) == (False, [], False)
    assert rows[0].op_types == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert not rows[0].HasField("module")


@pytest.fixture(scope="module")
def chain() -> Path:
    """A thousand portable kernels in a row, three times by the native runner; kept in a cache."""
    key = digest.of_value([digest.of_file(Path(bench.__file__)), version("torch"), version("executorch")])[:16]
    folder = cache_folder() / f"chain-{key}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            command = [sys.executable, "-m", bench.__name__, "--make", str(folder), "--operators", "1000"]
            subprocess.run(command, check=True, capture_output=True)
            asyncio.run(bench.trace(folder, 3))
            (folder / "done").touch()
    return folder


def test_a_thousand_operators_join_in_order_with_their_lines_and_nothing_twice(chain: Path) -> None:
    trace, program = etdump.read((chain / "trace.etdp").read_bytes()), graph.read_program(chain / "program.pte", "forward")
    record = graph.read_record(chain / "program.etrecord", "forward")
    joined = join(trace, record, program, "forward")
    *rows, rest = joined.operators
    assert [row.instruction_id for row in rows] == list(range(1000))
    assert [row.name for row in rows] == ["aten.sin.out", "aten.add.out"] * 500
    assert [row.source.code for row in rows] == ["turned = torch.sin(x)", "return turned + 0.5"] * 500
    assert [row.module for row in rows] == [f"blocks.{at // 2}" for at in range(1000)]
    assert rest.kind == REST
    assert sum(row.share for row in joined.operators) == pytest.approx(1)
    method_ns, times = np.array(joined.times_ns[0]), np.array(joined.times_ns[1:])
    assert times.shape == (1001, 3)
    assert (times.sum(axis=0) == method_ns).all(), "the runtime's own part is the rest, and nothing is counted twice"
    assert provenance.misfit_of_run(trace, json.loads((chain / "traced_ns.json").read_text())) is None


def test_what_inspector_finds_is_found(chain: Path) -> None:
    """The comparison that tests/bench times."""
    ours = bench.join_here(chain)
    assert (ours["warnings"], ours["lines"], len(ours["rows"])) == ([], 1000, 1000)
    assert ours["rows"] == bench.join_by_inspector(chain)["rows"]
