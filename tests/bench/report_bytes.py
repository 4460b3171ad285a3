"""Bytes of a report over the wire, by the number of its timed iterations: as JSON on stdout.

    python -m tests.bench.report_bytes [SAMPLES]

`inline_bytes` is the size of the same report as etfarm 0.1 sent it, on each page and in each answer; `report_bytes` that of the
current one, and `samples_bytes` that of the file that is downloaded where a document needs it.
"""

from __future__ import annotations

import argparse
import json

from etfarm.wire.release_0_1.messages import message_class
from etfarm.wire.release_0_1.reports import converted_report

OPERATORS = 60
TRACED = 100


def measure(samples: int) -> dict[str, int]:
    """Return the sizes of a report with so many samples of about 2 ms, and a traced pass."""
    old = message_class("Report")(id="r", cell="c", recipe="xnnpack_fp32", method="forward", threads=4, state="SUCCEEDED")
    old.latency.p50_ns = 2_000_000.0
    old.latency.samples_ns.extend(2_000_000 + place % 977 for place in range(samples))
    old.profile.iterations = TRACED
    old.profile.times_ns.extend(range(2_100_000, 2_100_000 + TRACED))
    for index in range(OPERATORS):
        old.operators.add(index=index, name=f"Convolution (NHWC, F32) IGEMM #{index}", times_ns=range(30_000, 30_000 + TRACED))
    body = old.SerializeToString()
    new, samples_file, times_file = converted_report(body)
    assert samples_file is not None and times_file is not None
    return {
        "samples": samples, "inline_bytes": len(body), "report_bytes": new.ByteSize(), "samples_bytes": len(samples_file),
        "trace_times_bytes": len(times_file),
    }  # fmt: skip


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("samples", nargs="?", type=int, default=1_000_000)
    print(json.dumps(measure(parser.parse_args().samples)))


if __name__ == "__main__":
    main()
