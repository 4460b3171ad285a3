"""Measure a demo with two recipes and print what a report has."""

from __future__ import annotations

from etfarm.client import Farm, Report


def describe(report: Report) -> str:
    """Return one line about a report; a part that was not measured is None."""
    if report.latency is None or report.latency.p50_ns is None or report.verdict is None:
        return f"{report.recipe}: {report.failure or report.state}"
    sqnr_db = report.accuracy[0].sqnr_db if report.accuracy else None
    accuracy = f"SQNR {sqnr_db:.1f} dB" if sqnr_db is not None else "not compared"
    return f"{report.recipe}: {report.latency.p50_ns / 1e3:.1f} µs, {report.verdict.status}, {accuracy}"


def main() -> None:
    """Submit the job, show its progress, and print a line for each report."""
    with Farm() as farm:  # or Farm("farm.example:7433", token=..., tls_ca=...)
        job = farm.bench("demo:resnet8", recipes=["xnnpack_fp32", "xnnpack_pt2e_int8_static_per_channel"])
        for report in job.result(progress=True).reports:
            print(describe(report))


if __name__ == "__main__":
    main()
