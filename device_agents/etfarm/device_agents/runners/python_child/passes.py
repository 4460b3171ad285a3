"""The passes over a loaded method: timed, traced, and with intermediate outputs."""

from __future__ import annotations

import gc
import os
import shutil
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.device_agents.runners.python_child import counters
from etfarm.device_agents.runners.python_child.pte import FileMethod
from etfarm.device_agents.runners.python_child.refusals import Refusal, called, failure
from etfarm.device_agents.runners.python_child.warmup import Window

Report = Callable[[str, int, int], None]
"""Takes stage, iterations and elapsed nanoseconds."""

_PROGRESS_NS: Final = 250_000_000


@dataclass
class LoadedMethod:
    """A method in a program of its own: the binding gives all methods of one program the same memory."""

    facts: FileMethod
    program: Any
    method: Any
    trace: bool
    debug: bool
    first_run_ns: int | None = None
    """Of the first execution since it was loaded."""
    spent: bool = False
    """Whether the debug file was written, after which the binding cannot run the method again."""


def measure(loaded: LoadedMethod, inputs: list[Any], plan: Mapping[str, int], report: Report) -> tuple[dict[str, Any], bytes]:
    """The timed pass; `plan` has the arguments of the command."""
    if loaded.trace:
        raise Refusal("BAD_STATE", "the method is loaded with a tracer, which costs time; load it without")
    samples = array("q")
    gc.collect()
    gc.disable()
    try:
        warmed = _warm_up(loaded, inputs, plan, report)
        report("TIMED", 0, 0)
        before = counters.Usage.now()
        elapsed = told = 0
        reason = ""
        begun = time.monotonic_ns()
        while not reason:
            start, end = execute(loaded, inputs)
            samples.append(end - start)
            elapsed = end - begun
            if len(samples) >= plan["iterations"] and elapsed >= plan["min_time_ns"]:
                reason = "ENOUGH"
            elif len(samples) >= plan["max_samples"]:
                reason = "MAX_SAMPLES"
            elif elapsed >= plan["max_time_ns"]:
                reason = "MAX_TIME"
            elif elapsed - told >= _PROGRESS_NS:
                report("TIMED", len(samples), elapsed)
                told = elapsed
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
        # Nearly all of it is Python's and torch's, whatever the program.
        "peak_rss_bytes": None,
    }
    return result, samples.tobytes()


def trace(
    loaded: LoadedMethod, inputs: list[Any], iterations: int, warmup: int, path: Path, report: Report
) -> tuple[dict[str, Any], bytes]:
    """Traced iterations, whose events alone are in the file."""
    if not loaded.trace or loaded.debug:
        raise Refusal("BAD_STATE", "trace needs the method loaded with trace=1 debug=0")
    report("TRACED", 0, 0)
    for _ in range(warmup):
        execute(loaded, inputs)
    if loaded.first_run_ns is not None:
        # The binding forgets events by writing them only.
        _write_etdump(loaded, None)
    samples = array("q")
    begun = told = time.monotonic_ns()
    for done in range(1, iterations + 1):
        start, end = execute(loaded, inputs)
        samples.append(end - start)
        if end - told >= _PROGRESS_NS:
            report("TRACED", done, end - begun)
            told = end
    size, _ = _write_etdump(loaded, path)
    return {"iterations": iterations, "etdump_bytes": size}, samples.tobytes()


def debug(loaded: LoadedMethod, inputs: list[Any], path: Path, dump: Path, max_bytes: int, report: Report) -> dict[str, Any]:
    """One iteration with every intermediate output, which take no more than `max_bytes`."""
    if not loaded.debug:
        raise Refusal("BAD_STATE", "debug needs the method loaded with trace=1 debug=1")
    report("DEBUG", 0, 0)
    start, end = execute(loaded, inputs)
    loaded.spent = True
    size, dump_bytes = _write_etdump(loaded, path, dump, max_bytes)
    return {"run_ns": end - start, "etdump_bytes": size, "dump_bytes": dump_bytes}


def execute(loaded: LoadedMethod, inputs: list[Any]) -> tuple[int, int]:
    """Start and end of one execution. Inputs are set outside of its time."""
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
    done = elapsed = told = 0
    window = Window()
    if plan["warmup"] or plan["steady"]:
        report("WARMUP", 0, 0)
    begun = time.monotonic_ns()
    while done < plan["warmup"] or (plan["steady"] and not steady):
        start, end = execute(loaded, inputs)
        done, elapsed = done + 1, end - begun
        if done > plan["warmup"]:
            steady = window.add(end - start, elapsed)
        if elapsed >= plan["max_warmup_ns"]:
            break
        if elapsed - told >= _PROGRESS_NS:
            report("WARMUP", done, elapsed)
            told = elapsed
    return {"warmup": done, "warmup_ns": elapsed, "steady": steady}


def _write_etdump(loaded: LoadedMethod, path: Path | None, dump: Path | None = None, max_bytes: int = 0) -> tuple[int, int]:
    """Sizes of the ETDump and of the debug file; with neither, the events so far are forgotten."""
    # By way of memory: the binding does not notice a full disk.
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
        """Bytes in it now."""
        return os.fstat(self._fd).st_size

    def copy_to(self, path: Path | None) -> int:
        """Its size in bytes; copied where there is a path."""
        if path is not None:
            try:
                with Path(self.path).open("rb") as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                raise Refusal("FILE", f"cannot write {path}: {error.strerror}") from None
        return self.size
