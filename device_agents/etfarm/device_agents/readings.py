"""The state of the device at one moment, around and during a timed pass: a pure parser of the kernel's files, and their reader.

Facts are `{path: text}` as in `inventory`, so that the same parser serves files read here and files read over another link.
What a device does not have is absent; 0 is only said where it was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from etfarm.v1 import report_pb2

Facts = Mapping[str, str]

STAT: Final = "/proc/stat"
LOAD: Final = "/proc/loadavg"
CPU_PRESSURE: Final = "/proc/pressure/cpu"
_PATTERNS: Final = (
    "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq",
    "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_max_freq",
    "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor",
    "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count",
    "sys/class/thermal/thermal_zone*/type",
    "sys/class/thermal/thermal_zone*/temp",
    "sys/class/thermal/cooling_device*/type",
    "sys/class/thermal/cooling_device*/cur_state",
    "sys/class/power_supply/*/type",
    "sys/class/power_supply/*/scope",
    "sys/class/power_supply/*/capacity",
    "sys/class/power_supply/*/status",
)
_PROC: Final = (STAT, LOAD, CPU_PRESSURE, "/proc/pressure/memory", "/proc/pressure/io", "/proc/meminfo")
_CPU_FILE: Final = re.compile(r"/sys/devices/system/cpu/cpu(\d+)/(?:cpufreq|thermal_throttle)/(\w+)\Z")
_NS_PER_TICK: Final = 10_000_000
"""/proc/stat counts in USER_HZ, which is 100 a second on every Linux that ExecuTorch runs on."""
_SLOWING: Final = re.compile(r"cpufreq|processor", re.IGNORECASE)
"""Types of cooling devices that slow cpus down: thermal-cpufreq-0, cpufreq-cpu4, Processor. Fans and chargers do not."""
_COLDEST_C: Final = -40
_HOTTEST_C: Final = 150


def find(root: Path = Path("/")) -> tuple[str, ...]:
    """The paths of the facts that this machine has, for `collect`. A few milliseconds; they stay while it runs."""
    found = [path for pattern in _PATTERNS for path in root.glob(pattern)]
    return (*_PROC, *(f"/{path.relative_to(root)}" for path in sorted(found, key=_natural)))


def collect(paths: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Their texts; what is not there or may not be read is left out."""
    facts = {}
    for path in paths:
        try:
            # Some drivers give bytes that are no text, and many an error where a sensor sleeps.
            facts[path] = (root / path[1:]).read_bytes().decode(errors="replace")
        except OSError:
            continue
    return facts


def parse(facts: Facts, elapsed_ms: float = 0.0) -> report_pb2.SystemReading:
    """What the facts say; any of them may be missing or nonsense. No I/O.

    Args:
        elapsed_ms: when they were read.
    """
    read = report_pb2.SystemReading(elapsed_ms=elapsed_ms, cpus=_cpus(facts), zones=zones(facts), cooling=_cooling(facts))
    counts = [_integer(text) for path, text in facts.items() if path.endswith("/core_throttle_count")]
    if known := [count for count in counts if count is not None]:
        read.throttle_count = sum(known)
    _read_battery(facts, read)
    if (average := _first_float(facts.get(LOAD, ""))) is not None:
        read.load_1m = average
    if (waiting := runnable(facts.get(LOAD, ""))) is not None:
        read.runnable = waiting
    for name in ("cpu", "memory", "io"):
        if (share := _pressure(facts.get(f"/proc/pressure/{name}", ""), "avg10")) is not None:
            setattr(read, f"psi_{name}_avg10", share / 100)
    if (memory := re.search(r"^MemAvailable:\s+(\d+) kB", facts.get("/proc/meminfo", ""), re.MULTILINE)) is not None:
        read.memory_available_bytes = int(memory.group(1)) * 1024
    if (times := cpu_times_ns(facts.get(STAT, ""))) is not None:
        read.cpu_busy_ns, read.cpu_stolen_ns = times
    return read


def cpu_times_ns(stat: str) -> tuple[int, int] | None:
    """Of /proc/stat: CPU time since the start that all cpus together worked, and that a hypervisor took from them.

    Source: proc(5): user nice system idle iowait irq softirq steal guest guest_nice; guests are in user and nice already.
    """
    line = next((line for line in stat.splitlines() if line.startswith("cpu ")), "")
    ticks = [int(word) for word in line.split()[1:] if word.isdecimal()]
    if len(ticks) < 7:
        return None
    user, nice, system, _, _, irq, softirq = ticks[:7]
    return (user + nice + system + irq + softirq) * _NS_PER_TICK, (ticks[7] if len(ticks) > 7 else 0) * _NS_PER_TICK


def runnable(loadavg: str) -> int | None:
    """Of /proc/loadavg: tasks that run or want to, the reader left out."""
    found = re.match(r"(?:\S+\s+){3}(\d+)/\d+", loadavg)
    return max(0, int(found.group(1)) - 1) if found else None


def waited_us(pressure: str) -> int | None:
    """Of /proc/pressure/cpu: time since the start in which some task waited."""
    total = _pressure(pressure, "total")
    return None if total is None else int(total)


def zones(facts: Facts) -> list[report_pb2.ThermalZone]:
    """The sensors that give a temperature of this world, in the kernel's order.

    The kernel's unit is a thousandth of a degree; drivers of some phones give degrees. An unconnected sensor gives 0.
    """
    found = []
    for path, text in facts.items():
        value = _integer(text)
        if not path.endswith("/temp") or value is None or value == 0:
            continue
        degrees = value / 1000 if abs(value) >= 1000 else float(value)
        if _COLDEST_C <= degrees <= _HOTTEST_C:
            name = facts.get(f"{path.removesuffix('temp')}type", "").strip() or path.split("/")[-2]
            found.append(report_pb2.ThermalZone(name=name, temperature_c=degrees))
    return found


def hottest_c(facts: Facts) -> float | None:
    """The temperature of the hottest zone."""
    return max((zone.temperature_c for zone in zones(facts)), default=None)


def frequency_hz(facts: Facts, cpu: int) -> int | None:
    """The clock of a cpu now."""
    value = _integer(facts.get(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", ""))
    return value * 1000 if value else None


def _cpus(facts: Facts) -> list[report_pb2.CpuReading]:
    found: dict[int, report_pb2.CpuReading] = {}
    setters: Mapping[str, Callable[[report_pb2.CpuReading, str], None]] = {
        "scaling_cur_freq": lambda cpu, text: setattr(cpu, "frequency_hz", int(text) * 1000),
        "scaling_max_freq": lambda cpu, text: setattr(cpu, "limit_hz", int(text) * 1000),
        "scaling_governor": lambda cpu, text: setattr(cpu, "governor", text),
    }
    for path, text in facts.items():
        match = _CPU_FILE.match(path)
        said = text.strip()
        if match is None or (setter := setters.get(match.group(2))) is None or not said:
            continue
        # A driver that cannot tell writes <unknown>.
        if match.group(2) != "scaling_governor" and not said.isdecimal():
            continue
        number = int(match.group(1))
        setter(found.setdefault(number, report_pb2.CpuReading(cpu=number)), said)
    return [found[number] for number in sorted(found)]


def _cooling(facts: Facts) -> list[report_pb2.CoolingDevice]:
    found = []
    for path, text in facts.items():
        if not path.endswith("/cur_state") or (state := _integer(text)) is None:
            continue
        kind = facts.get(f"{path.removesuffix('cur_state')}type", "").strip()
        if _SLOWING.search(kind):
            found.append(report_pb2.CoolingDevice(name=kind, state=state))
    return found


def _read_battery(facts: Facts, read: report_pb2.SystemReading) -> None:
    """The first battery that is the device's own, and no mouse's."""
    for path, text in facts.items():
        folder = path.removesuffix("type")
        if not re.match(r"/sys/class/power_supply/[^/]+/type\Z", path) or text.strip() != "Battery":
            continue
        if facts.get(f"{folder}scope", "").strip() == "Device":
            continue
        capacity = _integer(facts.get(f"{folder}capacity", ""))
        status = facts.get(f"{folder}status", "").strip()
        if capacity is not None and 0 <= capacity <= 100:
            read.battery_share = capacity / 100
        if status in {"Charging", "Full", "Not charging", "Discharging"}:
            # Full and not charging mean that a charger is there.
            read.charging = status != "Discharging"
        return


def _pressure(text: str, key: str) -> float | None:
    found = re.search(rf"^some\b.*\b{key}=([\d.]+)", text, re.MULTILINE)
    return _first_float(found.group(1)) if found else None


def _first_float(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def _integer(text: str) -> int | None:
    try:
        return int(text.strip())
    except ValueError:
        return None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts cpu10 behind cpu9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]
