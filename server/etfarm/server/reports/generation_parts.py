"""The parts that the methods of a flow have in generated text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from etfarm.server.reports.latency import between_runs
from etfarm.server.reports.latency.between_runs import Median
from etfarm.v1 import agent_pb2, report_pb2

Estimate = tuple[float, Sequence[float]]
"""A number, and the two ends of its 95 % interval, or nothing."""
_VALID: Final = report_pb2.VERDICT_STATUS_VALID


def fill_parts(
    point: report_pb2.GenerationPointReport, processes: Sequence[agent_pb2.GenerationPointResult], generated_tokens: int
) -> None:
    """Add the parts of a point, whose own numbers and runs are filled: means over its valid processes, or over all.

    Args:
        processes: what each process measured at the point, in the order of its runs.
    """
    measured = [(run, own) for run, own in zip(point.runs, processes, strict=True) if run.repetitions and own.parts]
    chosen = [own for run, own in measured if run.verdict.status == _VALID] or [own for _, own in measured]
    if not chosen:
        return
    token_ns = 1e9 / point.decode_tokens_per_s if point.decode_tokens_per_s else 0.0
    for place, first in enumerate(chosen[0].parts):
        parts = [own.parts[place] for own in chosen]
        part = point.parts.add(
            method=first.method, prefill_executions=first.prefill_executions, decode_executions=first.decode_executions
        )
        if first.prefill_executions:
            part.prefill_ns, ends = combine([mean_of(each.prefill_ns) for each in parts])
            part.prefill_ci95_ns.extend(ends)
            if point.ttft_ns:
                part.prefill_share = min(1.0, part.prefill_ns / point.ttft_ns)
        if first.decode_executions:
            steps = max(1, generated_tokens - 1)
            part.decode_ns, ends = combine([mean_of([value / steps for value in each.decode_ns]) for each in parts])
            part.decode_ci95_ns.extend(ends)
            if token_ns:
                part.decode_share = min(1.0, part.decode_ns / token_ns)


def mean_of(values: Sequence[float]) -> Median:
    """Return the geometric mean of the repetitions of a process, of which there is at least one, with its interval."""
    # Imported only for generated text: the import costs 12 MB and 0.1 s at every start of a server.
    import numpy as np

    from etfarm.server.reports.latency.generation import mean_interval

    # A time of 0 ns has no logarithm; clocks of 1 ns resolution cannot tell it from 1 ns.
    times = np.maximum(np.asarray(values, dtype=np.float64), 1.0)
    return Median(math.exp(float(np.log(times).mean())), mean_interval(times))


def combine(values: Sequence[Median]) -> Estimate:
    """Return the geometric mean of processes with its interval: over three or more processes, else within them."""
    middle = between_runs.middle(values)
    spread = between_runs.spread_of([value.p50_ns for value in values], between_runs.mean_error(values))
    ends = between_runs.interval(middle, spread, len(values)) if spread is not None else between_runs.within(middle, values)
    return middle, ends or ()
