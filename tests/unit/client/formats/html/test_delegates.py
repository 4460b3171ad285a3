"""The picture of what runs where: each executed operator in one step, with counts, and steps in order."""

from __future__ import annotations

from etfarm.client.formats.html import delegates
from tests.support.documents import report, row

LINE = {"file": "net.py", "line": 7, "code": "y = x.split(2)"}
ROWS = [
    row(0, "OPERATOR", "aten::split.out", 0.1, 10.0, op_types=["aten.split.Tensor"], source=LINE, mean_ns=10_000.0),
    row(1, "OPERATOR", "aten::mean.out", 0.1, 10.0, op_types=["aten.mean.dim"], mean_ns=20_000.0),
    row(2, "DELEGATE", "XnnpackBackend", 0.5, 50.0, backend="XnnpackBackend", delegated=True, mean_ns=50_000.0, input_rows=[1]),
    row(3, "KERNEL", "Convolution #1", 0.2, 20.0, parent=2, delegated=True, op_types=["aten.convolution.default"]),
    row(4, "KERNEL", "Convolution #2", 0.2, 20.0, parent=2, delegated=True, input_rows=[3],
        op_types=["aten.convolution.default", "aten._native_batch_norm_legit_no_training.default", "aten.relu.default"]),
    row(5, "REST", "REST", 0.1, 10.0, parent=2),
    row(6, "DELEGATE", "Vendor", 0.2, 20.0, backend="VendorBackend", delegated=True, op_types=["aten.add.Tensor"],
        input_rows=[0, 4]),
    row(7, "REST", "REST", 0.1, 10.0),
]  # fmt: skip


def test_operators_between_delegates_are_one_step_and_each_delegate_is_one() -> None:
    plain, xnnpack, vendor = delegates.steps(report(operators=ROWS))
    assert (plain.title, plain.size, plain.delegated, plain.time) == ("not delegated", "2 operators", False, "30.0 µs")
    assert plain.types == [("split.Tensor", 1), ("mean.dim", 1)] and plain.places == ["net.py:7"]
    assert (xnnpack.title, xnnpack.size, xnnpack.share) == ("XNNPACK", "2 kernels", 0.5)
    assert xnnpack.types == [("convolution", 2), ("native_batch_norm", 1), ("relu", 1)]
    assert (vendor.title, vendor.size) == ("Vendor", "its kernels are unknown")
    assert vendor.types == [("add.Tensor", None)], "without counts, which are unknown"
    assert [plain.reads, xnnpack.reads, vendor.reads] == [[], [], [1]], "the step before is not named"


def test_many_steps_name_only_their_most_frequent_types() -> None:
    types = [f"aten.op{number}.default" for number in range(7)]
    rows = [row(place, "DELEGATE", "B", 0.1, 1.0, backend="B", delegated=True, op_types=types) for place in range(10)]
    steps = delegates.steps(report(operators=rows))
    assert [step.number for step in steps] == list(range(1, 11))
    assert all(len(step.types) == delegates.SHOWN_TYPES and step.other_types == 3 for step in steps)
    (alone,) = delegates.steps(report(operators=rows[:1]))
    assert len(alone.types) == 7 and alone.other_types == 0


def test_a_program_that_was_not_traced_still_has_its_methods() -> None:
    counts = {"subgraphs": 2, "delegated_nodes": 30, "non_delegated_nodes": 10}
    compiled = report(operators=None, compile={"delegation": {"prefill": counts, "decode": counts}})
    assert delegates.steps(compiled) == []
    assert delegates.methods(compiled) == [
        ("decode", "30 of 40 nodes in 2 subgraphs", 0.75),
        ("prefill", "30 of 40 nodes in 2 subgraphs", 0.75),
    ]
