"""The data flow between rows: what the graph says, through operators that have no row, and never backwards."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.server.graphs.origins import Operator
from etfarm.server.reports.trace import profile
from etfarm.server.reports.trace.attribution import attribute
from etfarm.server.reports.trace.graph import base_name
from etfarm.server.reports.trace.join import join
from etfarm.v1 import report_pb2
from tests.support.analyses import read
from tests.support.traces import traced


def _row(index: int, kind: str, handles: list[int], *op_types: str) -> report_pb2.OperatorRow:
    return report_pb2.OperatorRow(
        index=index, kind=report_pb2.OperatorKind.Value(f"OPERATOR_KIND_{kind}"), debug_handles=handles, op_types=op_types
    )


def _operator(handle: int, name: str, takes: str, gives: str) -> Operator:
    return Operator((handle,), name, tuple(takes.split()), tuple(gives.split()))


def test_an_operator_without_a_row_passes_its_inputs_on() -> None:
    rows = [
        _row(0, "OPERATOR", [1], "aten.convolution.default"),
        _row(1, "OPERATOR", [3], "aten.convolution.default"),
        _row(2, "OPERATOR", [4], "aten.add.Tensor"),
    ]
    operators = [
        _operator(1, "convolution", "x", "a"),
        _operator(2, "view_copy", "a", "b"),
        _operator(3, "convolution", "b", "c"),
        _operator(4, "add", "b c", "y"),
    ]
    profile.connect(rows, operators)
    assert [list(row.input_rows) for row in rows] == [[], [0], [0, 1]]


@pytest.mark.parametrize(("kernel_handles", "expected"), [([], [[], [0], [], [], [1]]), ([3], [[], [], [0], [], [2]])])
def test_a_delegates_row_stands_for_its_operators_only_if_its_kernels_are_not_attributed(
    kernel_handles: list[int], expected: list[list[int]]
) -> None:
    rows = [
        _row(0, "OPERATOR", [1], "aten.mean.dim"),
        _row(1, "DELEGATE", [2, 3], "aten.linear.default", "aten.relu.default"),
        _row(2, "KERNEL", kernel_handles, "aten.relu.default"),
        _row(3, "REST", []),
        _row(4, "OPERATOR", [4], "aten.argmax.default"),
    ]
    rows[2].parent = rows[3].parent = 1
    operators = [
        _operator(1, "mean", "x", "a"),
        _operator(2, "linear", "a", "b"),
        _operator(3, "relu", "b", "c"),
        _operator(4, "argmax", "c", "y"),
    ]
    profile.connect(rows, operators)
    assert [list(row.input_rows) for row in rows] == expected


def test_kernels_of_one_operator_follow_each_other_and_no_row_takes_a_later_one() -> None:
    rows = [_row(index, "KERNEL", [1], "aten.cat.default") for index in range(2)] + [_row(2, "KERNEL", [2], "aten.relu.default")]
    backwards = [_operator(2, "relu", "x", "a"), _operator(1, "cat", "a", "b")]
    profile.connect(rows, backwards)
    assert [list(row.input_rows) for row in rows] == [[], [0], []]


def test_a_row_lists_no_more_inputs_than_the_contract_allows() -> None:
    rows = [_row(index, "OPERATOR", [index + 1], "aten.relu.default") for index in range(200)]
    rows.append(_row(200, "OPERATOR", [201], "aten.cat.default"))
    operators = [_operator(index + 1, "relu", "x", f"v{index}") for index in range(200)]
    operators.append(_operator(201, "cat", " ".join(f"v{index}" for index in range(200)), "y"))
    profile.connect(rows, operators)
    assert list(rows[-1].input_rows) == list(range(profile.MOST_INPUTS))


def _connected(name: str) -> list[report_pb2.OperatorRow]:
    trace, program, record = read(name)
    rows = list(join(trace, record, program, traced(name).method, attribute(trace, program, record).kernels).operators)
    profile.connect(rows, record.operators)
    return rows


@pytest.mark.parametrize("name", ["residual", "residual_int8"])
def test_a_real_residual_connection_joins_both_branches(name: str) -> None:
    rows = {row.index: row for row in _connected(name)}

    def types(row: report_pb2.OperatorRow) -> set[str]:
        return {base_name(op_type) for op_type in row.op_types}

    sums = [row for row in rows.values() if row.kind == report_pb2.OPERATOR_KIND_KERNEL and "add" in types(row)]
    assert sums
    assert all(row.parent not in row.input_rows for row in rows.values() if row.HasField("parent"))
    for row in sums:
        assert len(row.input_rows) == 2, "both branches"
        inputs: list[Any] = [rows[index] for index in row.input_rows]
        assert any("convolution" in types(other) for other in inputs), [types(other) for other in inputs]
        assert all(other.index < row.index for other in inputs)
