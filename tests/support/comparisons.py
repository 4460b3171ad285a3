"""Reports to compare, and comparisons of them as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from etfarm.wire.comparison import Gate, Side, compare, document
from tests.support.documents import completed


def report(cell: str = "c1", **changes: Any) -> dict[str, Any]:
    """Return a report with what a measured fp32 model has; `changes` are the contract's fields."""
    message: dict[str, Any] = {
        "id": f"r-{cell}", "cell": cell, "attempt": f"a-{cell}", "recipe": "xnnpack_fp32", "recipe_digest": "r" * 64,
        "method": "forward", "threads": 2, "state": "SUCCEEDED",
        "model": {"name": "resnet8", "digest": "0" * 64},
        "device": {"id": "d1", "name": "pi5-a", "arch": "aarch64", "soc": "cortex-a76", "os": "Linux", "cores": 4},
        "latency": {"samples_ns": [1000] * 9, "p50_ns": 1000.0, "p50_ci95_ns": [990.0, 1020.0]},
        "profile": {"iterations": 10, "p50_ns": 1100.0},
        "verdict": {"status": "VALID"},
        "compile": {"program": {"digest": "1" * 64, "size_bytes": 1000}, "toolchain": {"torch": "2.13.0"}},
        "memory": {"peak_rss_bytes": 1000, "planned_bytes": [100, 50]},
        "accuracy": [{"output": "y", "sqnr_db": 40.0, "max_abs_error": 0.1}],
    }  # fmt: skip
    message.update(changes)
    message = {key: value for key, value in message.items() if value is not None}
    return completed(message)


def timed(cell: str, p50_ns: float, ci95: Sequence[float] = (), **changes: Any) -> dict[str, Any]:
    latency = {"samples_ns": [1], "p50_ns": p50_ns, "p50_ci95_ns": list(ci95)}
    return report(cell, latency=latency, **changes)


def observed(cell: str, p50_ns: float, ci95: Sequence[float] = (), **changes: Any) -> dict[str, Any]:
    """A measurement of a program of its own, whose many earlier runs differed by no more than the interval within this one."""
    own = {"program": {"digest": cell.ljust(64, "0"), "size_bytes": 1000}, "toolchain": {"torch": "2.13.0"}}
    spread = {"source": "HISTORY", "runs": 10**6, "relative_stddev": 0.0, "p50_ci95_ns": list(ci95)}
    return timed(cell, p50_ns, ci95, **{"compile": own, "run_spread": spread, **changes})


def repeated(cell: str, medians_ns: Sequence[float], **changes: Any) -> dict[str, Any]:
    """Return a measurement of a program of its own by several runs with these medians."""
    logs = [math.log(median_ns) for median_ns in medians_ns]
    mean_ns, stddev = math.exp(statistics.fmean(logs)), statistics.stdev(logs)
    runs = [{"p50_ns": each, "verdict": {"status": "VALID"}} for each in medians_ns]
    ends = [mean_ns * math.exp(sign * 2.8 * stddev / math.sqrt(len(runs))) for sign in (-1, 1)]
    spread = {"source": "REPEATS", "runs": len(runs), "relative_stddev": stddev, "p50_ci95_ns": ends}
    return observed(cell, mean_ns, ends, **{"runs": runs, "run_spread": spread, **changes})


def against(base: Any, candidate: Any, *gates: str, **options: bool) -> dict[str, Any]:
    sides = [one if isinstance(one, list) else [one] for one in (base, candidate)]
    compared = document(compare(Side(sides[0]), Side(sides[1])), Gate.parse(gates, **options))
    json.dumps(compared, allow_nan=False)
    return compared


NUMBERS = st.floats(0, 1e12, allow_subnormal=False)
POSITIVE = st.floats(1e-3, 1e12)


@st.composite
def row(draw: st.DrawFn, index: int) -> dict[str, Any]:
    source = {"file": "m.py", "line": draw(st.integers(1, 3)), "code": draw(st.sampled_from(["a(x)", "b(x)"]))}
    return {
        "index": index, "kind": draw(st.sampled_from(["OPERATOR", "REST"])), "name": f"kernel {index}",
        "op_types": draw(st.lists(st.sampled_from(["aten.add.Tensor", "aten.relu.default"]), max_size=2)),
        "debug_handles": draw(st.lists(st.integers(1, 4), max_size=2)),
        **({"module": draw(st.sampled_from(["", "layer1", "layer2.conv"]))} if draw(st.booleans()) else {}),
        **({"source": source} if draw(st.booleans()) else {}),
        **({"share": draw(st.floats(0, 1)), "mean_ns": draw(NUMBERS)} if draw(st.booleans()) else {}),
    }  # fmt: skip


@st.composite
def reports(draw: st.DrawFn, cell: str = "c1") -> dict[str, Any]:
    """Return a report of which any part may be missing, with numbers down to 0."""
    p50 = draw(POSITIVE)
    ends = [p50 * draw(st.floats(0.5, 1)), p50 * draw(st.floats(1, 2))]
    parts: dict[str, Any] = {
        "latency": {
            "samples_ns": [1], "p50_ns": draw(st.sampled_from([p50, 0.0])), "p90_ns": draw(NUMBERS),
            "p50_ci95_ns": draw(st.sampled_from([ends, []])),
        },
        "load": {"load_ns": draw(st.integers(0, 10**15))},
        "memory": {"peak_rss_bytes": draw(st.integers(0, 2**62)), "planned_bytes": draw(st.lists(st.integers(0, 2**40)))},
        "accuracy": [{"output": "y", "sqnr_db": draw(st.floats(-300, 300)), "equal": draw(st.booleans())}],
        "operators": [draw(row(index)) for index in range(draw(st.integers(0, 6)))],
        "compile": {
            "program": {"digest": draw(st.sampled_from(["4" * 64, "5" * 64])), "size_bytes": draw(st.integers(0, 2**50))},
            "data": {"w": {"size_bytes": draw(st.integers(0, 2**50))}},
            "sizes": {"program_bytes": 1},
            "delegation": {"forward": {"subgraphs": 1, "operators": [{"op": "add", "delegated": 2}]}},
        },
        "verdict": {"status": draw(st.sampled_from(["VALID", "INVALID"]))},
        "profile": {"p50_ns": draw(NUMBERS)},
        "device": {"id": draw(st.sampled_from(["d1", "d2"])), "soc": "x"},
        "run_spread": {
            "source": draw(st.sampled_from(["REPEATS", "HISTORY", "PRIOR"])), "runs": draw(st.integers(0, 50)),
            "relative_stddev": draw(st.floats(0, 1)),
        },
    }  # fmt: skip
    absent = draw(st.sets(st.sampled_from(sorted(parts))))
    return report(cell, **{key: None if key in absent else value for key, value in parts.items()})


def operator(index: int, share: float, **more: Any) -> dict[str, Any]:
    kind = more.pop("kind", "OPERATOR")
    return {"index": index, "kind": kind, "name": f"kernel {index}", "share": share, **more}
