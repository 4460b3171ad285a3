"""The passes over a loaded method: timed, traced, and with intermediate outputs."""

from __future__ import annotations

import gc
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.device_agents.runners.python_child import counters
from etfarm.device_agents.runners.python_child.pte import FileMethod
from etfarm.device_agents.runners.python_child.refusals import Refusal, called, failure

Report = Callable[[str, int, int], None]
"""Callback that takes the stage, iterations and elapsed nanoseconds."""

PROGRESS_NS: Final = 250_000_000
"""Minimum time between two progress events of a stage."""
UNSET: Final = object()
"""An input that was not set yet."""
_WINDOWS: Final = 3
_ITERATIONS: Final = 5
_NS: Final = 50_000_000
_SAMPLES: Final = 1 << 16
_SHARE: Final = 50
"""Divisor of the tolerated difference: one part in 50 is 2 %."""
_RESOLUTION_NS: Final = 104
"""Two ticks of a 19.2 MHz counter, as in phones, in nanoseconds."""


@dataclass
class LoadedMethod:
    """A method in a program of its own, or in one with the methods that share its state.

    The binding shares memory among all methods of a program.
    """

    facts: FileMethod
    program: Any
    method: Any
    trace: bool
    debug: bool
    first_run_ns: int | None = None
    """Duration of the first execution after loading."""
    spent: bool = False
    """Whether the debug file was written, after which the binding cannot run the method again."""


def measure(loaded: LoadedMethod, inputs: list[Any], plan: Mapping[str, int], report: Report) -> tuple[dict[str, Any], bytes]:
    """Run the timed pass; `plan` holds the command's arguments."""
    if loaded.trace:
        raise Refusal("BAD_STATE", "the method is loaded with a tracer, which costs time; load it without")
    samples = array("q")
    gc.collect()
    gc.disable()
    try:
        warmed = _warm_up(loaded, inputs, plan, report)
        report("TIMED", 0, 0)
        before = counters.Usage.now()
        elapsed = reported_ns = 0
        reason = ""
        start_ns = time.monotonic_ns()
        while not reason:
            start, end = execute(loaded, inputs)
            samples.append(end - start)
            elapsed = end - start_ns
            if len(samples) >= plan["iterations"] and elapsed >= plan["min_time_ns"]:
                reason = "ENOUGH"
            elif len(samples) >= plan["max_samples"]:
                reason = "MAX_SAMPLES"
            elif elapsed >= plan["max_time_ns"]:
                reason = "MAX_TIME"
            elif elapsed - reported_ns >= PROGRESS_NS:
                report("TIMED", len(samples), elapsed)
                reported_ns = elapsed
        after = counters.Usage.now()
    finally:
        gc.enable()
    result = {
        **warmed,
        "first_run_ns": loaded.first_run_ns,
        "iterations": len(samples),
        "duration_ns": elapsed,
        "stop_reason": reason,
        **after.since(before),
        # Nearly all of it belongs to Python and torch, whatever the program.
        "peak_rss_bytes": None,
    }
    return result, samples.tobytes()


def trace(
    loaded: LoadedMethod, inputs: list[Any], iterations: int, warmup: int, path: Path, report: Report
) -> tuple[dict[str, Any], bytes]:
    """Run traced iterations; the file contains only their events."""
    if not loaded.trace or loaded.debug:
        raise Refusal("BAD_STATE", "trace needs the method loaded with trace=1 debug=0")
    report("TRACED", 0, 0)
    for _ in range(warmup):
        execute(loaded, inputs)
    if loaded.first_run_ns is not None:
        # The binding clears events only by writing them.
        _write_etdump(loaded, None)
    samples = array("q")
    before = counters.Usage.now()
    start_ns = reported_ns = time.monotonic_ns()
    for done in range(1, iterations + 1):
        start, end = execute(loaded, inputs)
        samples.append(end - start)
        if end - reported_ns >= PROGRESS_NS:
            report("TRACED", done, end - start_ns)
            reported_ns = end
    after = counters.Usage.now()
    size, _ = _write_etdump(loaded, path)
    return {"iterations": iterations, "etdump_bytes": size, **after.since(before)}, samples.tobytes()


def debug(loaded: LoadedMethod, inputs: list[Any], path: Path, dump: Path, max_bytes: int, report: Report) -> dict[str, Any]:
    """Run one iteration that records every intermediate output, which may take at most `max_bytes`."""
    if not loaded.debug:
        raise Refusal("BAD_STATE", "debug needs the method loaded with trace=1 debug=1")
    report("DEBUG", 0, 0)
    start, end = execute(loaded, inputs)
    loaded.spent = True
    size, dump_bytes = _write_etdump(loaded, path, dump, max_bytes)
    return {"run_ns": end - start, "etdump_bytes": size, "dump_bytes": dump_bytes}


def execute(loaded: LoadedMethod, inputs: list[Any]) -> tuple[int, int]:
    """Execute once and return the start and end time in ns. Setting the inputs is not part of the time."""
    method = loaded.method
    try:
        method.set_inputs(inputs)
        start = time.monotonic_ns()
        method.execute()
        end = time.monotonic_ns()
    except RuntimeError as error:
        raise failure(f"method '{loaded.facts.name}' failed", error) from None
    if loaded.first_run_ns is None:
        loaded.first_run_ns = end - start
    return start, end


def _warm_up(loaded: LoadedMethod, inputs: list[Any], plan: Mapping[str, int], report: Report) -> dict[str, Any]:
    steady: bool | None = False if plan["steady"] else None
    done = elapsed = reported_ns = 0
    window = Window()
    if plan["warmup"] or plan["steady"]:
        report("WARMUP", 0, 0)
    start_ns = time.monotonic_ns()
    while done < plan["warmup"] or (plan["steady"] and not steady):
        start, end = execute(loaded, inputs)
        done, elapsed = done + 1, end - start_ns
        if done > plan["warmup"]:
            steady = window.add(end - start, elapsed)
        if elapsed >= plan["max_warmup_ns"]:
            break
        if elapsed - reported_ns >= PROGRESS_NS:
            report("WARMUP", done, elapsed)
            reported_ns = elapsed
    return {"warmup": done, "warmup_ns": elapsed, "steady": steady}


def _write_etdump(loaded: LoadedMethod, path: Path | None, dump: Path | None = None, max_bytes: int = 0) -> tuple[int, int]:
    """Write the ETDump and the debug file and return their sizes; with neither path, only clear the events so far."""
    # Written via memory, since the binding does not detect a full disk.
    with _MemoryFile() as events, _MemoryFile() as tensors:
        arguments = [events.path, tensors.path] if dump else [events.path]
        called("no ETDump", lambda: loaded.program.write_etdump_result_to_file(*arguments))
        if dump and tensors.size > max_bytes:
            raise Refusal("FILE", f"the intermediate outputs take {tensors.size} bytes, and there is room for {max_bytes}")
        return events.copy_to(path), tensors.copy_to(dump)


class _MemoryFile:
    """A file in memory, with a path that a library can write to."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("etdump", os.MFD_CLOEXEC)
        self.path = f"/proc/self/fd/{self._fd}"

    def __enter__(self) -> _MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def size(self) -> int:
        """Return the number of bytes in the file now."""
        return os.fstat(self._fd).st_size

    def copy_to(self, path: Path | None) -> int:
        """Copy the file to `path`, unless it is None; return its size in bytes."""
        if path is not None:
            try:
                with Path(self.path).open("rb") as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                raise Refusal("FILE", f"cannot write {path}: {error.strerror}") from None
        return self.size


class Window:
    """The windows of a warm-up."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._start_ns: int | None = None
        self._medians: deque[int] = deque(maxlen=_WINDOWS)

    def add(self, sample_ns: int, elapsed_ns: int) -> bool:
        """Add an iteration and return whether the median is steady; `elapsed_ns` is its end, from the start of the warm-up."""
        if self._start_ns is None:
            self._start_ns = elapsed_ns - sample_ns
        self._samples.append(sample_ns)
        count = len(self._samples)
        if count < _ITERATIONS or (elapsed_ns - self._start_ns < _NS and count < _SAMPLES):
            return False
        self._medians.append(sorted(self._samples)[count // 2])
        self._samples.clear()
        self._start_ns = elapsed_ns
        low, high = min(self._medians), max(self._medians)
        return len(self._medians) == _WINDOWS and high - low <= max(low // _SHARE, _RESOLUTION_NS)
