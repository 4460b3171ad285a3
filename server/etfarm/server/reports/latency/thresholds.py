"""Thresholds beyond which a measurement is INVALID, each with its rationale; a farm can override them in a file."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from etfarm.wire.errors import error_for

MIN_FOR_INTERVAL: Final = 6
"""Minimum number of samples: with fewer, not even the extremes of independent samples enclose the median with 95 %
probability (1 - 2 / 2**n)."""


@dataclass(frozen=True)
class Thresholds:
    """The thresholds beyond which a measurement is INVALID."""

    min_samples: int = 100
    """Minimum number of samples. With fewer there is no p99, and the median's 95 % interval covers a fifth of all samples."""

    max_interval: float = 0.1
    """Maximum width of the median's 95 % interval, relative to the median. Many correlated samples may be worth few independent
    ones; beyond this width, two programs that differ by 10 % cannot be distinguished."""

    max_drift: float = 0.1
    """Maximum difference between the medians of the last and the first third, relative to the first. Beyond it the run has no
    single median: the device was still getting slower or faster. On an idle virtual machine it was at most 0.02 with one thread
    and 0.05 with one thread per cpu, except for a pace that changed once within the one-second pass, by 0.1 and more. Agents
    double a pass that drifts by over 0.05 until it does not, at most three times (etfarm.device_agents.attempts.drift)."""

    max_drift_unsteady: float = 0.05
    """Same as max_drift, for a run whose warm-up did not become steady, for which a drift is likely."""

    max_slow_share: float = 0.25
    """Maximum fraction of a slower group of iterations, if the times of a pass form two groups that are apart by 10 % and more.
    Up to a quarter, neither the median nor the mean over the middle half, which is the time of operators, includes slow
    iterations; from a half on, the median is one of them, and its interval does not show it."""

    min_cpu_share: float = 0.9
    """Minimum CPU time of the runner over the wall time of the timed pass. A runner only computes, so with less CPU time it was
    waiting: for a cpu that another process used, for paged-out memory, or for a throttled guest. The threads of a small model
    mostly wait for each other, which is inherent in the model; several threads must therefore reach this share together, not
    each."""

    max_involuntary_per_s: float = 200.0
    """Maximum involuntary context switches per second and thread. Sharing a cpu with a busy process costs a switch per time
    slice, every 3 to 4 ms, thus 250 or more. The system's own housekeeping reached 160 on an otherwise idle virtual machine with
    both cpus in use; those interruptions are short, and min_cpu_share bounds the time that they take."""

    min_psi_of_switches: float = 0.1
    """Fraction of the timed pass with a task waiting for a cpu, below which max_involuntary_per_s is not applied to several
    threads. In small models, threads wake each other on one cpu hundreds of times per second (500 were seen on an idle machine,
    at 6 %), which is inherent in the program. If the device does not report the fraction, switches count."""

    max_psi_some: float = 0.25
    """Maximum fraction of the timed pass in which any task of the device waited for a cpu (/proc/pressure/cpu). It includes
    other processes that wait for the runner, so a little is normal. Above a quarter, other processes run most of the time, and
    slow down caches, memory and clocks even if they do not use the runner's cpus."""

    max_background_cpus: float = 0.3
    """Maximum CPU use of other processes during the timed pass, in cpus. One busy process counts 1 and also disturbs a run on
    another cpu, through caches, memory, clocks and a shared physical core. An idle system that ran this farm was at 0.02 to
    0.04; over one second the kernel's clock ticks add an error of about 0.1."""

    max_background_share: float = 0.05
    """Same as max_background_cpus but as a fraction of all cpus; the larger limit applies. 64 cpus are never all idle."""

    max_stolen_share: float = 0.05
    """Maximum fraction of the device's cpu time that its hypervisor gave to other guests during the timed pass. Time is stolen in
    slices of milliseconds; a median of many short samples tolerates a few of them, a long sample does not."""

    max_frequency_spread: float = 0.1
    """Maximum spread of the clock over the timed pass, 1 - p10 / p90 of its readings. Boost clocks of PCs vary within 5 %; a
    governor that follows the load, or heat, changes the clock by more."""

    min_traced_iterations: int = 10
    """Minimum number of traced iterations. The times of operators are means over the middle half of them; with fewer than ten
    that is at most five, and a single interrupted one shifts every time."""

    max_traced_ratio: float = 1.5
    """Maximum median of the traced iterations, relative to that of the timed ones. An event costs 0.1 to 0.2 us, wherever it is
    recorded; beyond this ratio a third of the traced time is the tracer's, which inflates the shares of short operators."""

    max_traced_interruptions: float = 0.25
    """Maximum number of involuntary context switches per traced iteration and thread, if there are more than
    max_involuntary_per_s as well. The typical iterations are the middle half, so a quarter may be slow without an effect on the
    times."""


def read(path: Path) -> Thresholds:
    """Return the thresholds of a TOML file, such as `max_drift = 0.2`, with defaults for the others.

    Raises:
        BAD_THRESHOLDS: the file cannot be read, a name is unknown, or a value is not a non-negative number.
    """
    try:
        return of_mapping(tomllib.loads(path.read_text()))
    except OSError as error:
        raise error_for("BAD_THRESHOLDS", f"{path} cannot be read: {error.strerror}.", path=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise error_for("BAD_THRESHOLDS", f"{path} is not valid TOML: {error}.", path=path) from None


def of_mapping(values: Mapping[str, object]) -> Thresholds:
    """Return the thresholds with these values by name, and defaults for the others.

    Raises:
        BAD_THRESHOLDS: as in `read`.
    """
    known = [field.name for field in fields(Thresholds)]
    chosen: dict[str, float] = {}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise error_for(
                "BAD_THRESHOLDS",
                f"There is no threshold {name!r}.",
                f"Did you mean {close[0]}?" if close else f"Thresholds: {', '.join(known)}.",
                name=name,
            )
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise error_for("BAD_THRESHOLDS", f"{name} must be a number of at least 0, got {value!r}.", name=name)
        if name in ("min_samples", "min_traced_iterations") and not isinstance(value, int):
            raise error_for("BAD_THRESHOLDS", f"{name} must be a whole number, got {value!r}.", name=name)
        chosen[name] = value
    return Thresholds(**chosen)  # type: ignore[arg-type]  # counts are ints, see above
