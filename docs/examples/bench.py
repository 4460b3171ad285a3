"""Measure a demo with two recipes and print what a report has."""

from __future__ import annotations

from etfarm.client import Farm


def main() -> None:
    """Submit the job, show its progress, and print a line for each report."""
    with Farm() as farm:  # or Farm("farm.example:7433", token=..., tls_ca=...)
        job = farm.bench("demo:resnet8", recipes=["xnnpack_fp32", "xnnpack_pt2e_int8_static_per_channel"])
        for report in job.result().reports:
            p50_us, sqnr_db = report.latency.p50_ns / 1e3, report.accuracy[0].sqnr_db
            print(f"{report.recipe}: {p50_us:.1f} µs, {report.verdict.status}, SQNR {sqnr_db:.1f} dB")


if __name__ == "__main__":
    main()
