"""Comparisons of each kind, which the wire, the page and the formats must all take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from etfarm.wire.comparison import Side, compare, document
from tests.support.comparisons import against, observed, operator, repeated, report, timed
from tests.support.generated import accuracy_of_logits, flow_point, generated_report, point

RECORDED: Final = Path(__file__).with_name("recorded_comparison.json")
"""A document that version 0.1.0 wrote."""

LINE = {"file": "m.py", "line": 3, "code": "self.a(x)"}
OTHER_RECIPE = {"recipe": "int8", "recipe_digest": "8" * 64}
UNMEASURED = dict.fromkeys(("latency", "profile", "compile", "memory", "accuracy"))
ERROR = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It crashed."}
ROUNDS = {
    "base_cell": "b", "rounds": 24, "process_pairs": 8, "ratio": 0.9, "ratio_ci95": [0.88, 0.92], "ratios": [0.9] * 24,
}  # fmt: skip


def traced(cell: str, share: float, **changes: Any) -> dict[str, Any]:
    """Return a report with two rows of operators, and a delegate that takes some of them."""
    rows = [
        operator(0, share, op_types=["aten.conv"], debug_handles=[1], module="a", source=LINE, mean_ns=1000 * share,
                 mean_ci95_ns=[990 * share, 1010 * share]),
        operator(1, 1 - share, kind="REST", mean_ns=1000 * (1 - share)),
    ]  # fmt: skip
    delegation = {"forward": {"subgraphs": 1, "operators": [{"op": "aten_conv", "delegated": 2}]}}
    return report(cell, operators=rows, compile={"program": {"digest": "1" * 64}, "delegation": delegation}, **changes)


def circumstanced(cell: str) -> dict[str, Any]:
    """Return a report that says with which inputs and on which cores the program ran."""
    accuracy = [{"output": "y", "sqnr_db": 40.0, "samples": 2, "samples_digest": "d" * 64}]
    inputs, measurement = {"digest": "5" * 64, "from_job": True}, {"duration_ns": 1900}
    return report(cell, runner={"kind": "native", "cores": "0-1"}, inputs=inputs, accuracy=accuracy, measurement=measurement)


def generated(cell: str, rate: float, top1: float) -> dict[str, Any]:
    """Return a report of text by a vision-language model, in several runs, with the accuracy of its logits."""
    repeated = point(rate, rate, rate * 1.01, rate * 0.99, depth=16)
    return generated_report(cell, flow_point(rate), repeated, accuracy_of_logits=accuracy_of_logits(top1))


EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "recorded": json.loads(RECORDED.read_text()),
    "separate": against(observed("b", 1000, (990, 1020)), observed("k", 1200, (1180, 1230))),
    "spread": against(repeated("b", (1000, 1010, 990)), repeated("k", (1100, 1111, 1089))),
    "paired": against(timed("b", 1000, attempt="a"), timed("k", 900, attempt="a", interleaved=ROUNDS, **OTHER_RECIPE)),
    "too_few": against(timed("b", 1000), timed("k", 1200, (1180, 1230))),
    "zero": against(timed("b", 0.0), timed("k", 0.0)),
    "same": against(*[[report("b"), report("b2", recipe="portable")]] * 2),
    "nothing_measured": against(report("b", **UNMEASURED), report("k", model={"name": "b.pte"}, **UNMEASURED)),
    "failed_and_unpaired": against(
        [report("b"), report("b2", threads=4), report("b3", method="encode")],
        [report("k", state="FAILED", error=ERROR, latency=None), report("k2", threads=4), report("k3", recipe="portable")],
    ),
    "by_operator": against(traced("b", 0.5), traced("k", 0.4)),
    "by_module": against(traced("b", 0.5), traced("k", 0.4, **OTHER_RECIPE)),
    "by_name": against(*(traced(cell, 0.5, recipe=None, recipe_digest=None) for cell in "bk")),
    "by_choice": document(compare(Side([circumstanced("b")]), Side([report("k1"), circumstanced("k2")], choice="1"))),
    "generation_of_one_program": against(generated_report("b", point(100.0)), generated_report("b", point(80.0))),
    "generation": against(generated("b", 100.0, 0.97), generated("k", 120.0, 0.87)),
}
