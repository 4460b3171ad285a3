"""Operators of programs without a graph, such as a .pte: matched by index in one program, else by name and order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.comparisons import against, operator, report

READY: dict[str, Any] = {"recipe": None, "recipe_digest": None}
SPREAD = {"source": "REPEATS", "runs": 5, "relative_stddev": 0.001, "p50_ci95_ns": [900.0, 1100.0]}
GEMM, CONV = "Fully Connected (NC, F32) GEMM", "Convolution (NHWC, F32) IGEMM"


def traced(cell: str, digit: str, *kernels: tuple[str, float], **changes: Any) -> dict[str, Any]:
    """Return a REPORT of a ready program with a delegate of these kernels and its rest."""
    whole_ns = sum(time_ns for _, time_ns in kernels)
    rows = [operator(0, 1.0, kind="DELEGATE", backend="XnnpackBackend", mean_ns=whole_ns, aligned=False) | {"name": "delegate 0"}]
    for at, (name, time_ns) in enumerate(kernels, 1):
        interval = [time_ns * 0.99, time_ns * 1.01]
        kernel = operator(at, time_ns / whole_ns, kind="KERNEL", parent=0, mean_ns=time_ns, mean_ci95_ns=interval, aligned=False)
        rows.append(kernel | {"name": name, "backend": "XnnpackBackend"})
    rows.append(operator(len(rows), 0.0, kind="REST", parent=0, mean_ns=0.0))
    profile = {"iterations": 30, "p50_ns": whole_ns, "mean_ns": whole_ns, "verdict": {"status": "VALID"}}
    own = {"program": {"digest": digit * 64, "size_bytes": 1000}}
    return report(cell, **{**READY, "operators": rows, "profile": profile, "run_spread": SPREAD, "compile": own, **changes})


def compared(base: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    (pair,) = against(base, candidate)["pairs"]
    return pair["operators"]  # type: ignore[no-any-return]


def matched(operators: dict[str, Any]) -> dict[tuple[str | None, ...], tuple[list[int], list[int]]]:
    """Return the indexes of both sides by the names of both sides."""
    sides = [{"name": None, "indexes": []} | (row[side] or {}) for row in operators["rows"] for side in ("base", "candidate")]
    return {
        (old["name"], new["name"]): (old["indexes"], new["indexes"]) for old, new in zip(sides[::2], sides[1::2], strict=True)
    }


def test_rows_of_one_program_are_matched_by_index_with_an_interval_each() -> None:
    base = traced("b", "1", (f"{CONV} #1", 1e5), (f"{CONV} #2", 2e5), (f"{GEMM} #1", 5e4))
    other = traced("k", "1", (f"{CONV} #1", 1e5), (f"{CONV} #2", 3e5), (f"{GEMM} #1", 4e4))
    operators = compared(base, other)
    assert (operators["by"], operators["matched_by"]) == ("OPERATOR", "INDEX")
    rows = {row["base"]["name"]: row for row in operators["rows"] if row["kind"] == "OPERATOR"}
    assert {name: row["candidate"]["indexes"] for name, row in rows.items()} == {
        f"{CONV} #1": [1], f"{CONV} #2": [2], f"{GEMM} #1": [3],
    }  # fmt: skip
    assert {row["outcome"] for row in rows.values()} == {"no_difference", "slower", "faster"}
    low, high = rows[f"{CONV} #2"]["change_ci95_ns"]
    assert 0 < low < 1e5 < high and rows[f"{CONV} #2"]["outcome"] == "slower"


def test_kernels_of_one_program_have_other_names_on_another_processor() -> None:
    operators = compared(traced("b", "1", ("f32_gemm neon", 1e5)), traced("k", "1", ("f32_gemm avx", 1e5)))
    assert operators["matched_by"] == "INDEX" and matched(operators)["f32_gemm neon", "f32_gemm avx"] == ([1], [1])


def test_a_side_that_has_the_graph_names_the_rows_of_both() -> None:
    base, other = traced("b", "1", (CONV, 1e5)), traced("k", "1", (CONV, 1e5))
    line = {"file": "m.py", "line": 3, "code": "self.a(x)"}
    other["operators"][1] |= {"op_types": ["conv"], "module": "a", "source": line, "debug_handles": [4], "aligned": True}
    for sides in ((base, other), (other, base)):
        operators = compared(*sides)
        (row,) = (row for row in operators["rows"] if row["kind"] == "OPERATOR")
        assert operators["matched_by"] == "INDEX"
        assert (row["module"], row["op_types"], row["source"]["line"]) == ("a", ["conv"], 3)


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_one_program_is_not_matched_by_index_if_other_rows_were_traced(method: str) -> None:
    base = traced("b", "1", (CONV, 1e5))
    other = traced("k", "1", *([(CONV, 1e5)] if method == "encode" else [(CONV, 1e5), (GEMM, 1e5)]), method=method)
    assert compared(base, other)["matched_by"] == "NAME"


def test_rows_of_different_programs_are_matched_by_name_and_order_of_occurrence() -> None:
    base = traced("b", "1", (f"{CONV} #1", 1e5), (f"{GEMM} #1", 5e4), (f"{CONV} #2", 2e5))
    other = traced("k", "2", (f"{CONV} #1", 1e5), ("Softmax", 1e4), (f"{CONV} #2", 3e5), (f"{GEMM} #1", 4e4))
    operators = compared(base, other)
    assert operators["matched_by"] == "NAME"
    assert matched(operators) == {
        (f"{CONV} #1", f"{CONV} #1"): ([1], [1]),
        (f"{CONV} #2", f"{CONV} #2"): ([3], [3]),
        (f"{GEMM} #1", f"{GEMM} #1"): ([2], [4]),
        (None, "Softmax"): ([], [2]),
        ("kernel 4", "kernel 5"): ([4], [5]),  # the rest
    }
    (slower,) = (row for row in operators["rows"] if row["base"] and row["base"]["indexes"] == [3])
    assert slower["outcome"] == "slower" and slower["change_ci95_ns"][0] > 0


def test_kernels_of_a_name_that_occurs_more_often_on_one_side_are_one_row() -> None:
    base = traced("b", "1", (f"{CONV} #1", 1e5), (f"{CONV} #2", 2e5), ("Old", 1e4), ("Old", 1e4))
    other = traced("k", "2", (f"{CONV} #1", 1e5), (f"{CONV} #2", 2e5), (f"{CONV} #3", 5e4))
    rows = matched(compared(base, other))
    assert rows[CONV, CONV] == ([1, 2], [1, 2, 3])
    assert rows["Old", None] == ([3, 4], [])


def test_a_delegate_whose_kernels_one_side_did_not_report_is_compared_as_a_whole() -> None:
    base, other = traced("b", "1", (CONV, 1e5), (GEMM, 1e5)), traced("k", "2", (CONV, 1e5), (GEMM, 2e5))
    other["operators"] = other["operators"][:1]
    operators = compared(base, other)
    assert [(row["kind"], row["base"]["indexes"], row["candidate"]["indexes"]) for row in operators["rows"]] == [
        ("DELEGATE", [0], [0])
    ]


def test_each_backend_is_compared_by_the_kernels_that_both_sides_have() -> None:
    base, other = traced("b", "1", (CONV, 1e5), (GEMM, 1e5)), traced("k", "2", (CONV, 1e5), (GEMM, 2e5))
    whole = {**base["operators"][0], "index": 9, "name": "delegate 1", "backend": "CoreMLBackend"}
    kernel = {**base["operators"][1], "index": 10, "parent": 9, "name": "conv", "backend": "CoreMLBackend"}
    base["operators"] += [whole]
    other["operators"] += [whole, kernel]
    rows = matched(compared(base, other))
    assert rows["delegate 1", "delegate 1"] == ([9], [9])
    assert rows[CONV, CONV] == ([1], [1]) and rows[GEMM, GEMM] == ([2], [2])


def test_a_delegate_of_one_side_is_a_row_whether_or_not_the_other_has_kernels() -> None:
    base, other = traced("b", "1", (CONV, 1e5), (GEMM, 1e5)), traced("k", "2", (CONV, 1e5))
    other["operators"] = [{**row, "backend": "VulkanBackend"} if row["backend"] else row for row in other["operators"]]
    rows = matched(compared(base, other))
    assert [indexes for indexes in rows.values() if indexes != ([], [])] == [([0], []), ([], [0])]


def test_a_program_with_a_graph_and_one_without_are_matched_by_name() -> None:
    base, other = traced("b", "1", (CONV, 1e5)), traced("k", "2", (CONV, 1e5))
    other["operators"][1] |= {"op_types": ["conv"], "module": "a", "aligned": True}
    operators = compared(base, other)
    assert operators["matched_by"] == "NAME" and matched(operators)[CONV, CONV] == ([1], [1])
    assert (
        compared(other, {**other, "cell": "x", "operators": other["operators"], "compile": base["compile"]})["matched_by"]
        == "GRAPH"
    )
