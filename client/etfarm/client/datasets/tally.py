"""What a data set's devices did: counts and times."""

from __future__ import annotations

import statistics
import time
from array import array
from dataclasses import dataclass, field

from etfarm.client.errors import EtfarmError
from etfarm.client.models import Device


@dataclass
class Work:
    """The work of one device."""

    device: Device
    samples: int = 0
    """Number of samples that it completed."""
    busy_ns: int = 0
    """Time in the program in nanoseconds, by the runner's clock."""
    lost: EtfarmError | None = None
    """Why the device runs no more samples; None while it does."""


@dataclass
class Tally:
    """Counts and times so far."""

    devices: dict[str, Work] = field(default_factory=dict)
    """Work by device id."""
    run_ns: array[int] = field(default_factory=lambda: array("q"), repr=False)
    """Time of each executed sample in nanoseconds, as far as devices report it, in no particular order."""
    began_s: float | None = None
    ended_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first sample on a device to the end of the last, by the caller's clock."""
        return self.ended_s - self.began_s if self.began_s is not None else 0.0

    @property
    def samples(self) -> int:
        """Number of completed samples."""
        return sum(work.samples for work in self.devices.values())

    @property
    def samples_per_s(self) -> float | None:
        """Completed samples per second of wall time; None before the first result."""
        return self.samples / self.wall_s if self.wall_s > 0 and self.samples else None

    @property
    def run_p50_ns(self) -> float | None:
        """The median time of a sample on its device, in nanoseconds."""
        return statistics.median(self.run_ns) if self.run_ns else None

    @property
    def busy_share(self) -> float | None:
        """Part of the devices' wall time that their programs ran, 0 to 1; None if a sample's time is missing."""
        there = self.wall_s * len(self.devices)
        if there <= 0 or len(self.run_ns) < self.samples:
            return None
        return sum(work.busy_ns for work in self.devices.values()) / 1e9 / there

    def begin(self) -> None:
        """Record that a sample is sent."""
        if self.began_s is None:
            self.began_s = self.ended_s = time.perf_counter()

    def ran(self, device: Device, run_ns: int | None) -> None:
        """Record a completed sample, with its time in the program if the device reports it."""
        self.ended_s = time.perf_counter()
        work = self.devices[device.id]
        work.samples += 1
        if run_ns is not None:
            self.run_ns.append(run_ns)
            work.busy_ns += run_ns
