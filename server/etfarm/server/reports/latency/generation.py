"""Statistics of generated text: rates of prefill and decode by repetition, and the time of each token by position."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.latency.samples import MIN_REPETITIONS, GeneratingProcess, Generation
from etfarm.v1 import report_pb2
from etfarm.wire import timings
from etfarm.wire.errors import error_for
from etfarm.wire.generation import METRICS, TOKEN_BYTES

Floats = NDArray[np.float64]


def fill(report: report_pb2.Generation, request: Generation) -> None:
    """Add a point for each prompt length, with the numbers of each process.

    A repetition is the unit: its tokens resemble each other, so that pooling them would make an interval that is too narrow.

    Raises:
        BAD_SAMPLES: a file does not have the rows of the repetitions.
    """
    read = [_read(process, request) for process in request.processes]
    for place, prompt_tokens in enumerate(request.prompt_tokens):
        point = report.points.add()
        all_times, all_tokens = [], []
        for process, (times, tokens) in zip(request.processes, read, strict=True):
            _fill_run(point.runs.add(), prompt_tokens, process.prefill_ns[place], times[place])
            all_times.append(times[place])
            all_tokens.append(tokens[place])
        rows = np.concatenate(all_times)
        if len(rows):
            point.token_ns.extend(np.median(rows, axis=0).tolist())
        if len(rows) > 1:
            generated = np.concatenate(all_tokens)
            point.tokens_equal = bool((generated == generated[0]).all())


def mean_interval(values: Floats) -> tuple[float, float] | None:
    """Return the 95 % interval of the geometric mean of independent values above 0; None below MIN_REPETITIONS."""
    if len(values) < MIN_REPETITIONS:
        return None
    logs = np.log(values)
    reach = timings.student_quantile(len(values) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(values))
    middle = float(logs.mean())
    return math.exp(middle - reach), math.exp(middle + reach)


def _fill_run(run: report_pb2.GenerationRun, prompt_tokens: int, prefill_ns: tuple[int, ...], times: NDArray[np.int64]) -> None:
    """Fill the numbers of one process at one point.

    Args:
        prefill_ns: the time of the prompt in each repetition.
        times: [repetitions, tokens], ns.
    """
    run.repetitions = len(times)
    if not len(times):
        return
    # A time of 0 ns has no rate; clocks of 1 ns resolution cannot tell it from 1 ns.
    decode_ns = np.maximum(times[:, 1:].sum(axis=1, dtype=np.float64), 1.0)
    values = {
        "ttft_ns": np.maximum(times[:, 0].astype(np.float64), 1.0),
        "prefill_tokens_per_s": prompt_tokens * 1e9 / np.maximum(np.asarray(prefill_ns, dtype=np.float64), 1.0),
        "decode_tokens_per_s": (times.shape[1] - 1) * 1e9 / decode_ns,
    }
    for name, interval in METRICS.items():
        setattr(run, name, math.exp(float(np.log(values[name]).mean())))
        getattr(run, interval).extend(mean_interval(values[name]) or ())


def _read(process: GeneratingProcess, request: Generation) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int32]]]:
    """Return the times and the tokens of each point: [repetitions, tokens]."""
    counts = [len(prefill_ns) for prefill_ns in process.prefill_ns]
    shape = sum(counts), request.generated_tokens
    ends = np.cumsum(counts)[:-1]
    times = _matrix(process.token_ns, "<i8", shape, np.dtype(np.int64).itemsize).astype(np.int64)
    if times.size and times.min() < 0:
        raise error_for("BAD_SAMPLES", f"The time of a token is negative: {int(times.min())} ns.", sample_ns=int(times.min()))
    tokens = _matrix(process.tokens, "<i4", shape, TOKEN_BYTES).astype(np.int32)
    return np.split(times, ends), np.split(tokens, ends)


def _matrix(path: Path, dtype: str, shape: tuple[int, int], value_bytes: int) -> NDArray[np.generic]:
    data = path.read_bytes()
    if len(data) != shape[0] * shape[1] * value_bytes:
        raise error_for(
            "BAD_SAMPLES",
            f"The tokens have {len(data)} bytes instead of {shape[0] * shape[1] * value_bytes}.",
            size_bytes=len(data),
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)
