"""The state of the device at one moment, around and during a timed pass: a pure parser of facts, and the reader of local ones.

Facts are `{path: text}` as in `inventory`, so that the same parser serves local files and a phone's output (see `shell_facts`).
Missing values are unset; 0 is a value that was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from etfarm.device_agents.device import android
from etfarm.v1 import report_pb2
from etfarm.wire.cores import MAX_CPUS, parse_cpu_list

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
PHONE_FILES: Final = (
    *_PROC,
    *(f"/sys/devices/system/cpu/cpufreq/policy*/{name}" for name in ("related_cpus", "scaling_cur_freq", "scaling_max_freq")),
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    *(f"/{pattern}" for pattern in _PATTERNS if "/thermal_zone" in pattern or "/cooling_device" in pattern),
)
"""Files and globs that are read from a phone around a run, beside `android.READING_COMMANDS`."""
_CLOCKS: Final = ("scaling_cur_freq", "scaling_max_freq", "scaling_governor")
_CHARGING: Final = {"Charging": True, "Full": True, "Not charging": True, "Discharging": False}
_SUPPLY_FILE: Final = re.compile(r"/sys/class/power_supply/[^/]+/type\Z")
_POLICY_FILE: Final = re.compile(r"(/sys/devices/system/cpu/cpufreq/policy\d+/)related_cpus\Z")
_CPU_FILE: Final = re.compile(r"/sys/devices/system/cpu/cpu(\d{1,4})/(?:cpufreq|thermal_throttle)/(\w+)\Z")
_NS_PER_TICK: Final = 10_000_000
"""Nanoseconds per tick of /proc/stat: USER_HZ is 100 on every Linux that ExecuTorch supports."""
_NO_TEMPERATURE: Final = re.compile(r"soc|socd|vbat(_.*)?|ibat(-.*)?|.*-(ibat|vbat|bcl)-.*")
"""Types of Qualcomm's thermal zones that hold a battery's share (`soc` is its state of charge), voltage or current."""
_SLOWING: Final = re.compile(r"cpufreq|processor", re.IGNORECASE)
"""Types of cooling devices that slow cpus down: thermal-cpufreq-0, cpufreq-cpu4, Processor; not fans or chargers."""
_LARGEST: Final = 10**15
_MOST_TICKS: Final = 9 * 10**11
"""Maximum that a field in nanoseconds can hold: 285 years of one cpu."""
_COLDEST_C: Final = -40
_HOTTEST_C: Final = 150


def find(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the paths of this machine's facts, for `collect`. Takes a few milliseconds; the paths stay valid until a reboot."""
    existing = [path for pattern in _PATTERNS for path in root.glob(pattern)]
    return (*_PROC, *(f"/{path.relative_to(root)}" for path in sorted(existing, key=_natural)))


def collect(paths: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Return the files' texts; those that are missing or unreadable are left out."""
    facts = {}
    for path in paths:
        try:
            # Some drivers return bytes that are not text, and sleeping sensors cause many kinds of errors.
            facts[path] = (root / path[1:]).read_bytes().decode(errors="replace")
        except OSError:
            continue
    return facts


def parse(facts: Facts, elapsed_ms: float = 0.0) -> report_pb2.SystemReading:
    """Return the state that the facts describe; any of them may be missing or invalid. No I/O.

    Args:
        facts: text by path or command.
        elapsed_ms: time of the reading.
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
    if (memory := re.search(r"^MemAvailable:\s+(\d{1,15}) kB", facts.get("/proc/meminfo", ""), re.MULTILINE)) is not None:
        read.memory_available_bytes = int(memory.group(1)) * 1024
    if (times := cpu_times_ns(facts.get(STAT, ""))) is not None:
        read.cpu_busy_ns, read.cpu_stolen_ns = times
    if (lit := android.screen_on(facts)) is not None:
        read.screen_on = lit
    if (heat := android.thermal_status(facts)) is not None:
        read.thermal_status = heat
    return read


def cpu_times_ns(stat: str) -> tuple[int, int] | None:
    """Return from /proc/stat the CPU time since boot that all cpus worked, and that a hypervisor took from them.

    Source: proc(5): user nice system idle iowait irq softirq steal guest guest_nice; guests are in user and nice already.
    """
    line = next((line for line in stat.splitlines() if line.startswith("cpu ")), "")
    ticks = [int(word) for word in line.split()[1:] if word.isdecimal() and len(word) <= 18]
    if len(ticks) < 7:
        return None
    user, nice, system, _, _, irq, softirq = ticks[:7]
    busy, stolen = user + nice + system + irq + softirq, ticks[7] if len(ticks) > 7 else 0
    if max(busy, stolen) > _MOST_TICKS:
        return None
    return busy * _NS_PER_TICK, stolen * _NS_PER_TICK


def runnable(loadavg: str) -> int | None:
    """Return from /proc/loadavg the running and runnable tasks, except for the reader."""
    match = re.match(r"(?:\S+\s+){3}(\d{1,9})/\d+", loadavg)
    return max(0, int(match.group(1)) - 1) if match else None


def waited_us(pressure: str) -> int | None:
    """Return from /proc/pressure/cpu the time since boot in which some task waited."""
    total = _pressure(pressure, "total")
    return int(total) if total is not None and total < _LARGEST else None


def zones(facts: Facts) -> list[report_pb2.ThermalZone]:
    """Return the sensors with a plausible temperature, in the kernel's order; if none is readable, Android's.

    The kernel's unit is a thousandth of a degree; drivers of some phones use degrees. An unconnected sensor reports 0.
    """
    zones_read = []
    for path, text in facts.items():
        value = _integer(text)
        if not path.endswith("/temp") or value is None or value == 0:
            continue
        name = _zone_name(facts, path.removesuffix("temp"))
        degrees = value / 1000 if abs(value) >= 1000 else float(value)
        if _COLDEST_C <= degrees <= _HOTTEST_C and not _NO_TEMPERATURE.fullmatch(name):
            zones_read.append(report_pb2.ThermalZone(name=name, temperature_c=degrees))
    if zones_read:
        return zones_read
    reported = android.temperatures(facts)
    return [zone for zone in reported if _COLDEST_C <= zone.temperature_c <= _HOTTEST_C and zone.temperature_c != 0]


def zone_names(facts: Facts) -> list[str]:
    """Return the sensors' names, each once, whatever their values; if none of the kernel's is readable, Android's."""
    folders = [path.removesuffix("type") for path in facts if re.match(r"/sys/class/thermal/thermal_zone\d+/type\Z", path)]
    names = [name for folder in folders if not _NO_TEMPERATURE.fullmatch(name := _zone_name(facts, folder))]
    return list(dict.fromkeys(names or [zone.name for zone in zones(facts)]))


def _zone_name(facts: Facts, folder: str) -> str:
    return facts.get(f"{folder}type", "").strip() or folder.split("/")[-2]


def hottest_c(facts: Facts) -> float | None:
    """Return the temperature of the hottest zone."""
    return max((zone.temperature_c for zone in zones(facts)), default=None)


def frequency_hz(facts: Facts, cpu: int) -> int | None:
    """Return a cpu's current clock."""
    text = facts.get(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", "").strip()
    return _hertz(text or _clocks(facts).get(cpu, {}).get("scaling_cur_freq", ""))


def is_own_battery(facts: Facts, path: str) -> bool:
    """Return whether /sys/class/power_supply/NAME/type belongs to a battery that powers the device, and not its mouse."""
    own = facts.get(f"{path.removesuffix('type')}scope", "").strip() != "Device"
    return own and facts.get(path, "").strip() == "Battery"


def _cpus(facts: Facts) -> list[report_pb2.CpuReading]:
    cpus = []
    for number, clocks in sorted(_clocks(facts).items()):
        # A driver without a value writes <unknown>.
        clock, limit = _hertz(clocks.get("scaling_cur_freq", "")), _hertz(clocks.get("scaling_max_freq", ""))
        governor = clocks.get("scaling_governor")
        if clock is not None or limit is not None or governor:
            cpus.append(report_pb2.CpuReading(cpu=number, frequency_hz=clock, limit_hz=limit, governor=governor))
    return cpus


def _clocks(facts: Facts) -> dict[int, dict[str, str]]:
    """Return the texts of each cpu's frequency files by name; those of its policy if it has none."""
    clocks: dict[int, dict[str, str]] = {}
    named = 0
    for path, text in facts.items():
        if (own := _CPU_FILE.match(path)) is not None:
            if (value := text.strip()) and int(own.group(1)) < MAX_CPUS:
                clocks.setdefault(int(own.group(1)), {})[own.group(2)] = value
        elif (policy := _POLICY_FILE.match(path)) is not None:
            shared = {name: facts.get(f"{policy.group(1)}{name}", "").strip() for name in _CLOCKS}
            numbers = _cpu_list(text)
            # Each cpu has one policy; ignore a device whose policies name cpus repeatedly.
            named += len(numbers)
            for number in numbers if named <= 2 * MAX_CPUS else ():
                cpu = clocks.setdefault(number, {})
                cpu.update({name: value for name, value in shared.items() if value and name not in cpu})
    return clocks


def _cpu_list(text: str) -> frozenset[int]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        return frozenset()


def _hertz(kilohertz: str) -> int | None:
    return int(kilohertz) * 1000 if kilohertz.isdecimal() and len(kilohertz) <= 9 else None


def _cooling(facts: Facts) -> list[report_pb2.CoolingDevice]:
    devices = []
    for path, text in facts.items():
        if not path.endswith("/cur_state") or (state := _integer(text)) is None:
            continue
        kind = facts.get(f"{path.removesuffix('cur_state')}type", "").strip()
        if _SLOWING.search(kind):
            devices.append(report_pb2.CoolingDevice(name=kind, state=state))
    return devices


def _read_battery(facts: Facts, read: report_pb2.SystemReading) -> None:
    share, charging = android.battery_share(facts), android.charging(facts)
    path = next((path for path in facts if _SUPPLY_FILE.match(path) and is_own_battery(facts, path)), None)
    if path is not None and share is None and charging is None:
        folder = path.removesuffix("type")
        capacity = _integer(facts.get(f"{folder}capacity", ""))
        share = capacity / 100 if capacity is not None and 0 <= capacity <= 100 else None
        # A battery that is full or not charging implies a connected charger.
        charging = _CHARGING.get(facts.get(f"{folder}status", "").strip())
    if share is not None:
        read.battery_share = share
    if charging is not None:
        read.charging = charging


def _pressure(text: str, key: str) -> float | None:
    match = re.search(rf"^some\b.*\b{key}=([\d.]+)", text, re.MULTILINE)
    return _first_float(match.group(1)) if match else None


def _first_float(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def _integer(text: str) -> int | None:
    """Return a number that fits a protobuf field, even as a sum of thousands."""
    try:
        value = int(text.strip())
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST else None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which cpu10 follows cpu9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]
