"""Linux' counters of this process, as the C++ runner reads them. A counter that the kernel does not provide is None, never 0."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Counters at one moment; the difference of two covers the time in between."""

    wall_ns: int
    cpu_ns: int
    voluntary_switches: int
    involuntary_switches: int
    minor_faults: int
    major_faults: int
    cpu_pressure_us: int | None
    """PSI `some` of the whole machine."""

    @classmethod
    def now(cls) -> Usage:
        """Return the current counters."""
        pressure, own = _cpu_pressure_us(), resource.getrusage(resource.RUSAGE_SELF)
        cpu_ns = time.clock_gettime_ns(time.CLOCK_PROCESS_CPUTIME_ID)
        return cls(time.monotonic_ns(), cpu_ns, own.ru_nvcsw, own.ru_nivcsw, own.ru_minflt, own.ru_majflt, pressure)

    def since(self, before: Usage) -> dict[str, int | None]:
        """Return the increase of the counters since `before`."""
        pairs = {field.name: (getattr(self, field.name), getattr(before, field.name)) for field in fields(self)}
        return {name: None if None in pair else pair[0] - pair[1] for name, pair in pairs.items()}


def status_bytes(key: str) -> int | None:
    """Return a `Key:  N kB` line of /proc/self/status, in bytes."""
    kilobytes = _status(key)
    return None if kilobytes is None else kilobytes * 1024


def task_count() -> int | None:
    """Return the number of threads of the process."""
    return _status("Threads")


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def _cpu_pressure_us() -> int | None:
    try:
        lines = Path("/proc/pressure/cpu").read_text().splitlines()
    except OSError:
        return None
    words = next((line.split() for line in lines if line.startswith("some ")), [])
    return next((int(word.removeprefix("total=")) for word in words if word.startswith("total=")), None)
