"""The cpus of a device that a runner is bound to, as Measurement.cores selects them, and their number. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from etfarm.wire.errors import UserError

if TYPE_CHECKING:
    from etfarm.v1.device_pb2 import Device

MAX_CPUS: Final = 1 << 13
"""Maximum number of cpus that Linux supports; larger numbers are invalid."""

MAX_CONCURRENT_RUNS: Final = 64
"""Maximum number of runs at the same time on a device, which an agent announces and a server counts on."""

MAX_LIST: Final = 1 << 16
"""Maximum number of characters in a cpu list, and of numbers in its ranges: far more than a list of 8192 cpus needs."""


class CoresUnknown(UserError):
    """A Measurement.cores that names no cpus of the device."""

    reason = "CORES_UNKNOWN"


class TooManyThreads(UserError):
    """More threads than a device has cpus."""

    reason = "TOO_MANY_THREADS"


_NAMED: Final = 10
"""Maximum number of devices that an error names."""


def choose_cpus(device: Device, wanted: str, restricted: bool) -> frozenset[int] | None:
    """Return the logical cpus to bind a runner to; None if the system may choose among all.

    Args:
        device: the device, whose clusters are fastest first.
        wanted: Measurement.cores: `big`, `little`, a cpu list, or empty for the device's default.
        restricted: whether the agent may use only some cpus (`--cores`), which are those of the device.

    Raises:
        CoresUnknown: `wanted` names no cpu, or one that programs may not use here.
    """
    allowed = frozenset(cpu for cluster in device.clusters for cpu in cluster.cpus)
    if not wanted:
        return allowed if restricted else None
    if wanted in ("big", "little") and device.clusters:
        return frozenset(device.clusters[0 if wanted == "big" else -1].cpus)
    try:
        chosen = parse_cpu_list(wanted)
    except ValueError:
        chosen = frozenset()
    if not chosen or not chosen <= allowed:
        raise CoresUnknown(
            f"{wanted!r} names no cpus that programs may use on {device.name}.",
            f"Give big, little or cpus of {format_cpu_list(allowed)}.",
            cores=wanted,
            allowed=format_cpu_list(allowed),
        )
    return chosen


def count_cpus(device: Device, cores: str = "") -> int | None:
    """Return the number of cpus for a program's threads; None if it is unknown.

    Args:
        device: the device.
        cores: Measurement.cores.
    """
    try:
        chosen = choose_cpus(device, cores, restricted=True) or frozenset()
    except CoresUnknown:
        return None
    return (len(chosen) if cores else max(len(chosen), device.cores)) or None


def has_cpus(device: Device, threads: int, cores: str = "") -> bool:
    """Return whether a device has a cpu for each thread, as far as its cpus are known."""
    return threads <= 1 or (count := count_cpus(device, cores)) is None or threads <= count


def describe_cpus(devices: Sequence[Device], cores: str = "") -> str:
    """Return the numbers of cpus of devices, of ten at most: `pi5-a has 4, pi3 has 2`."""
    texts = [f"{device.name} has {count_cpus(device, cores)}" for device in devices[:_NAMED]]
    more = [f"and {len(devices) - _NAMED} more"] if len(devices) > _NAMED else []
    return ", ".join([*texts, *more])


def require_cpus(devices: Sequence[Device], threads: int, cores: str = "") -> None:
    """Check that one of the devices has a cpu for each thread; passes without devices.

    Raises:
        TooManyThreads: each of them has fewer.
    """
    if not devices or any(has_cpus(device, threads, cores) for device in devices):
        return
    counts = {device.name: count_cpus(device, cores) or 0 for device in devices}
    most = max(counts.values())
    selected = f" that --cores {cores} selects" if cores else ""
    if len(devices) == 1:
        cpus = f"the {most} cpu{'s' if most != 1 else ''} of {devices[0].name}{selected}"
    else:
        cpus = f"the cpus{selected} of each device that matches: {describe_cpus(devices, cores)}"
    raise TooManyThreads(
        f"{threads} threads are more than {cpus}.",
        f"Give --threads {most} (threads={most}) or fewer, or choose another device.", threads=threads, cpus=most,
        devices=",".join([*counts][:_NAMED]),
    )  # fmt: skip


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a kernel cpu list such as "0-3,6", or "0 1 2".

    Raises:
        ValueError: the text is not such a list, or is empty.
    """
    if len(text) > MAX_LIST:
        raise ValueError(f"a list of {len(text)} characters")
    numbers: set[int] = set()
    named = 0
    for part in re.split(r"\s*,\s*|\s+", text.strip()):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < MAX_CPUS:
            raise ValueError(f"{part[:40]!r} is not a range of cpus")
        if (named := named + high - low + 1) > MAX_LIST:
            raise ValueError(f"a list that names {named} cpus and more")
        numbers.update(range(low, high + 1))
    return frozenset(numbers)


def format_cpu_list(numbers: Collection[int]) -> str:
    """Return the shortest cpu list of the numbers: "0-3,6". `parse_cpu_list` is the inverse."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
