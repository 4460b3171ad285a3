"""Thresholds beyond which a measurement is INVALID, each with its reason; a farm may set others in a file."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from etfarm.wire.errors import UserError

MIN_FOR_INTERVAL: Final = 6
"""Below, not even the smallest and the largest of independent samples enclose the median with 95 % (1 - 2 / 2**n)."""


class BadThresholds(UserError):
    """A file of thresholds cannot be read, or has unknown names or values."""

    reason = "BAD_THRESHOLDS"


@dataclass(frozen=True)
class Thresholds:
    """The thresholds beyond which a measurement is INVALID."""

    min_samples: int = 100
    """Fewer tell no p99, and the median's 95 % interval covers a fifth of all samples."""

    max_interval: float = 0.1
    """Width of the median's 95 % interval, as a part of the median. Many samples may be worth few where each resembles the one
    before it; two programs that differ by 10 % could not be distinguished then."""

    max_drift: float = 0.1
    """How far the medians of the last and the first third may lie apart, as a part of the first. Beyond, the run had no one
    median: the device was still getting slower or faster. On an idle virtual machine it was 0.02 with one thread and 0.05 with
    one on each cpu at most, but for a pace that changed once within the second of a pass, by 0.1 and more: agents double a pass
    that drifts by over 0.05 until it does not, three times at most (etfarm.device_agents.attempts.drift)."""

    max_drift_unsteady: float = 0.05
    """As max_drift, for a run whose warm-up did not become steady: there is a reason to expect a drift already."""

    min_cpu_share: float = 0.9
    """CPU time of the runner over the wall time of the timed pass, of one thread. A runner does nothing but compute, so one that
    got less was waiting: for a cpu that another process had, for memory that was paged out, or for a throttled guest. The
    threads of a small model mostly wait for each other, which is the model's own doing and no interference; so several
    threads have to reach this share together and not each."""

    max_involuntary_per_s: float = 200.0
    """Involuntary context switches a second and thread. Sharing a cpu with one busy process costs a switch each time slice,
    every 3 to 4 ms, thus 250 and more. The system's own housekeeping reached 160 on an otherwise idle virtual machine whose
    two cpus were both measured on; those are short, and what they take min_cpu_share bounds."""

    min_psi_of_switches: float = 0.1
    """Part of the timed pass in which some task waited for a cpu, below which switches are not held against a run of several
    threads: they wake each other on one cpu hundreds of times a second in small models (500 were seen on an idle machine, at
    6 %), which is the program's own doing. Where the device does not tell, the switches count."""

    max_psi_some: float = 0.25
    """Part of the timed pass in which some task of the device waited for a cpu (/proc/pressure/cpu). It counts other
    processes waiting for ours as well, so a little is normal; above a quarter neighbours run most of the time, and they
    slow caches, memory and clocks even where they leave our cpus alone."""

    max_background_cpus: float = 0.3
    """Cpus' worth of work that others did during the timed pass. One busy process is 1, and it disturbs a run on another
    cpu as well, by caches, memory, clocks and the core that two cpus may share. An idle system with this farm on it was at 0.02
    to 0.04; over a second the kernel's clock ticks add an error of about 0.1."""

    max_background_share: float = 0.05
    """The same as a part of all cpus, where that is more: on 64 cpus there is always something."""

    max_stolen_share: float = 0.05
    """Part of the device's cpu time that its hypervisor gave to other guests during the timed pass. What is stolen comes in
    slices of milliseconds, which a median of many short samples bears in small amounts and a long sample does not."""

    max_frequency_spread: float = 0.1
    """How far the clock moved over the timed pass: 1 - p10 / p90 of its readings. Boost clocks of PCs play within 5 %; a governor
    that follows the load, or heat, moves it by more."""


def read(path: Path) -> Thresholds:
    """Return the thresholds of a TOML file: `max_drift = 0.2`, one a line; the others are the defaults.

    Raises:
        BadThresholds: the file cannot be read, a name is unknown, or a value is not a number from 0 on.
    """
    try:
        return of_mapping(tomllib.loads(path.read_text()))
    except OSError as error:
        raise BadThresholds(f"{path} cannot be read: {error.strerror}.", path=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadThresholds(f"{path} is no TOML: {error}.", path=path) from None


def of_mapping(given: Mapping[str, object]) -> Thresholds:
    """Return the thresholds that are given by name, and the defaults of the others.

    Raises:
        BadThresholds: as in `read`.
    """
    known = [field.name for field in fields(Thresholds)]
    chosen: dict[str, float] = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise BadThresholds(
                f"There is no threshold {name!r}.",
                f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}.",
                name=name,
            )
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise BadThresholds(f"{name} = {value!r} is no number from 0 on.", name=name)
        if name == "min_samples" and not isinstance(value, int):
            raise BadThresholds(f"{name} = {value!r} is no whole number.", name=name)
        chosen[name] = value
    return Thresholds(**chosen)  # type: ignore[arg-type]  # min_samples is whole, see above
