"""The description of a device, sent once in the agent's Hello: a pure parser of facts, and the collector for this machine.

Facts are `{path: text}` of files, and of commands under their own name (`uname -m`, `uname -r`, `getconf PAGESIZE`; a phone's
other commands are in `android`), so that the same parser serves local files and a phone's output, see `shell_facts`.

Kernels and vendors differ: /proc/cpuinfo describes each cpu, one for all, or only those that are online; frequencies are
available per cpu, per policy, or not at all. Unknown values are unset, and never taken from a core of another kind.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.device_agents.device import android, readings
from etfarm.device_agents.device.arm_parts import LITTLE, part_name
from etfarm.v1 import device_pb2
from etfarm.wire.cores import MAX_CPUS, MAX_LIST, choose_cpus, format_cpu_list, parse_cpu_list

Facts = Mapping[str, str]
Stanza = Mapping[str, str]

CPU: Final = "/sys/devices/system/cpu/cpu{}"
ONLINE: Final = "/sys/devices/system/cpu/online"
PER_CPU: Final = (
    "topology/thread_siblings_list",
    "topology/core_id",
    "topology/physical_package_id",
    "cpufreq/related_cpus",
    "cpufreq/cpuinfo_max_freq",
    "cpufreq/scaling_governor",
    "regs/identification/midr_el1",
    "cpu_capacity",
)
PER_POLICY: Final = ("related_cpus", "cpuinfo_max_freq", "scaling_governor")
FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "dotprod": ("asimddp",),
    "fp16": ("asimdhp",),
    "i8mm": ("i8mm",),
    "bf16": ("bf16", "avx512_bf16", "amx_bf16"),
    "sve": ("sve",),
    "sve2": ("sve2",),
    "sme": ("sme",),
    "avx2": ("avx2",),
    "avx512f": ("avx512f",),
    "fma": ("fma",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "amx": ("amx_tile",),
}
"""The names of features, each with its names in the kernel (Arm's `Features`, x86's `flags`), any of which suffices."""
_POLICY_FILE: Final = re.compile(r"(/sys/devices/system/cpu/(?:cpufreq/policy\d+|cpu\d+/cpufreq)/)related_cpus\Z")
_NO_BOARD: Final = re.compile(r"ARMv\d|AArch64|Generic DT based system|Dummy Virtual Machine", re.IGNORECASE)
_PART_KEYS: Final = ("cpu implementer", "cpu part", "cpu variant")
_SLOWEST_KHZ: Final = 1_000
_FASTEST_KHZ: Final = 20_000_000


@dataclass(frozen=True)
class Cpu:
    """A logical cpu."""

    number: int
    part: str
    features: frozenset[str]
    """Features by the kernel's names."""
    core: str
    """Identifier of the physical core, equal for its logical cpus."""
    max_frequency_hz: int | None
    governor: str
    capacity: int | None
    """The scheduler's estimate of the cpu's speed; 1024 is the fastest."""


def is_count(text: str) -> bool:
    """Return whether a fact is a number that fits a protobuf field, even times 1000."""
    return text.isdecimal() and len(text) <= 15


def parse_stanzas(cpuinfo: str) -> Sequence[Stanza]:
    """Return /proc/cpuinfo's blocks, keys in lower case: one for each numbered `processor`, and one for all separate text.

    Arm kernels append a block about the whole board, older ones one about all cpus. Before 3.16 several `processor` lines share a
    block, with their common facts behind the last.
    """
    stanzas: list[dict[str, str]] = []
    current: dict[str, str] | None = None
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        name, text = key.strip().lower(), value.strip()
        if not line.strip():
            current = None
            continue
        if not colon or (name == "processor" and not is_count(text)):
            continue  # some begin with `Processor : ARMv7 Processor rev 4 (v7l)`
        if current is None or (name == "processor" and "processor" in current):
            current = {}
            stanzas.append(current)
        current[name] = text
    return stanzas


def parse_cpus(facts: Facts, stanzas: Sequence[Stanza], cores: Collection[int] | None) -> list[Cpu]:
    """Return the cpus that programs may use now: those online, within the affinity in the facts, and among `cores`."""
    policies = _policies(facts)
    shared = _shared(stanzas)
    # Single-cpu kernels do not number the cpu.
    alone = frozenset({0} if shared else ())
    numbered = [(int(stanza["processor"]), stanza) for stanza in reversed(stanzas) if is_count(stanza.get("processor", ""))]
    own = {number: stanza for number, stanza in numbered if number < MAX_CPUS}
    return [
        _cpu(number, facts, {**shared, **own.get(number, {})}, policies)
        for number in sorted(_allowed(facts, own.keys() or alone, cores))
    ]


def parse_clusters(cpus: Iterable[Cpu]) -> list[device_pb2.Cluster]:
    """Return clusters of equal cores, fastest first: by the scheduler's capacity, then power-saving cores last, then by clock."""
    kinds: dict[tuple[str, int | None, int | None], list[Cpu]] = {}
    for cpu in cpus:
        kinds.setdefault((cpu.part, cpu.max_frequency_hz, cpu.capacity), []).append(cpu)
    fastest_first = sorted(
        kinds.items(), key=lambda kind: (-(kind[0][2] or 0), kind[0][0] in LITTLE, -(kind[0][1] or 0), kind[1][0].number)
    )
    return [
        device_pb2.Cluster(
            part=part,
            cpus=[cpu.number for cpu in members],
            max_frequency_hz=frequency,
            governor=members[0].governor,
            features=common_features(members),
            physical_cores=len({cpu.core for cpu in members}),
        )
        for (part, frequency, _), members in fastest_first
    ]


def common_features(cpus: Iterable[Cpu]) -> list[str]:
    """Return the names of the features that all the cpus have."""
    sets = [{name for name, words in FEATURES.items() if not cpu.features.isdisjoint(words)} for cpu in cpus]
    common = set.intersection(*sets) if sets else set()
    return [name for name in FEATURES if name in common]


def board_of(stanzas: Sequence[Stanza]) -> str:
    """Return /proc/cpuinfo's name of the board or x86 processor; empty if there is none."""
    for key in ("model", "hardware", "model name"):
        for stanza in stanzas:
            # On x86 `model` is a number, on Arm a board. Arm's `model name` is that of its instruction set.
            name = stanza.get(key, "").removesuffix("(Flattened Device Tree)").strip()
            if name and not name.isdecimal() and not _NO_BOARD.match(name):
                return name
    return ""


def part_of(stanza: Stanza) -> str:
    """Return the core's name: from its numbers on Arm, as reported elsewhere; empty if unknown."""
    try:
        implementer, part = (int(stanza[key], 0) for key in _PART_KEYS[:2])
    except (KeyError, ValueError):
        return stanza.get("model name", "")
    try:
        variant = int(stanza.get("cpu variant", ""), 0)
    except ValueError:
        variant = 0
    return part_name(implementer, part, variant)


def _shared(stanzas: Sequence[Stanza]) -> Stanza:
    """Return what holds for cpus without a description: the entries in which all descriptions agree."""
    keys = (*_PART_KEYS, "features", "flags", "model name")
    distinct = {key: {stanza[key] for stanza in stanzas if key in stanza} for key in keys}
    # Kinds of cores are distinguished by part number; cores without one do not belong to any known kind.
    if len({part_of(stanza) for stanza in stanzas if part_of(stanza)}) > 1:
        return {}
    return {key: values.copy().pop() for key, values in distinct.items() if len(values) == 1}


def _allowed(facts: Facts, described: Collection[int], cores: Collection[int] | None) -> frozenset[int]:
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", facts.get("/proc/self/status", ""), re.MULTILINE)
    allowed = _cpu_list(listed.group(1)) if listed else None
    # The affinity also includes cpus that are offline or do not exist.
    online = _cpu_list(facts.get(ONLINE, "")) or frozenset(described) or allowed or frozenset()
    usable = online if allowed is None else online & allowed
    return usable if cores is None else usable & frozenset(cores)


def _cpu_list(text: str) -> frozenset[int] | None:
    try:
        return parse_cpu_list(text)
    except ValueError:
        return None


def _policies(facts: Facts) -> dict[int, str]:
    """Return the folder of frequency files for each cpu."""
    folders: dict[int, str] = {}
    # A policy has at least one cpu, so there are no more policies than cpus.
    policies = [(match, text) for path, text in facts.items() if (match := _POLICY_FILE.match(path)) is not None][:MAX_CPUS]
    named = 0
    for match, text in policies:
        numbers = _cpu_list(text) or frozenset()
        if (named := named + len(numbers)) <= MAX_LIST:
            for number in numbers:
                folders.setdefault(number, match.group(1))
    return folders


def _cpu(number: int, facts: Facts, stanza: Stanza, policies: Mapping[int, str]) -> Cpu:
    folder = CPU.format(number)

    def fact(name: str) -> str:
        return facts.get(f"{folder}/{name}", "").strip()

    def frequency_fact(name: str) -> str:
        return fact(f"cpufreq/{name}") or facts.get(f"{policies.get(number, '')}{name}", "").strip()

    # Sibling lists distinguish cores on every kernel; Arm's core_id repeats in each cluster.
    package, core_id = fact("topology/physical_package_id"), fact("topology/core_id")
    core = fact("topology/thread_siblings_list") or (f"{package}:{core_id}" if core_id else f"cpu{number}")
    frequency, capacity = frequency_fact("cpuinfo_max_freq"), fact("cpu_capacity")
    plausible = is_count(frequency) and _SLOWEST_KHZ <= int(frequency) <= _FASTEST_KHZ
    return Cpu(
        number=number,
        part=_part_by_midr(fact("regs/identification/midr_el1")) or part_of(stanza),
        features=frozenset((stanza.get("features") or stanza.get("flags") or "").split()),
        core=core,
        max_frequency_hz=int(frequency) * 1000 if plausible else None,
        governor=frequency_fact("scaling_governor"),
        capacity=int(capacity) if is_count(capacity) else None,
    )


def _part_by_midr(text: str) -> str:
    """Return the core's name by its register value, shown per cpu even if /proc/cpuinfo describes one for all."""
    try:
        midr = int(text, 16)
    except ValueError:
        return ""
    return part_name(midr >> 24 & 0xFF, midr >> 4 & 0xFFF, midr >> 20 & 0xF) if midr > 0 else ""


__all__ = ["choose_cpus", "choose_threads", "collect", "format_cpu_list", "parse", "parse_cpu_list"]

_MODEL: Final = "/sys/firmware/devicetree/base/model"
_COMPATIBLE: Final = "/sys/firmware/devicetree/base/compatible"
_FILES: Final = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self/status",
    "/etc/os-release",
    _MODEL,
    _COMPATIBLE,
    ONLINE,
)
_POLICIES: Final = tuple(f"/sys/devices/system/cpu/cpufreq/policy*/{name}" for name in PER_POLICY)
_EQUIPMENT: Final = (
    "/sys/class/thermal/thermal_zone*/type",
    "/sys/class/power_supply/*/type",
    "/sys/class/power_supply/*/scope",
)
PHONE_FILES: Final = (
    *_FILES,
    *(f"/sys/devices/system/cpu/cpu[0-9]*/{name}" for name in PER_CPU),
    *_POLICIES,
    *_EQUIPMENT,
)
"""Files and globs that are read from a phone, beside `android.INVENTORY_COMMANDS`."""
_NARROW: Final = {"aarch64": "armv7l", "x86_64": "i686"}
"""Architecture of programs on a 64-bit kernel with a 32-bit system."""


def parse(facts: Mapping[str, str], cores: Collection[int] | None = None) -> device_pb2.Device:
    """Return the device that the facts describe, without id, agent_id, name and labels. No I/O.

    Clusters come fastest first (by the scheduler's cpu_capacity, then the maximum frequency). Unknown fields are unset.

    Args:
        facts: text by path or command, as `collect` returns it. Any of them may be missing.
        cores: logical cpus that programs are restricted to, besides the affinity in the facts.
    """
    properties = android.properties(facts)
    stanzas = parse_stanzas(facts.get("/proc/cpuinfo", ""))
    arch = android.arch(properties) or _arch(facts)
    # qemu's user mode shows the host's /proc/cpuinfo, whose features the program does not have.
    translated = arch == "aarch64" and any("vendor_id" in stanza for stanza in stanzas)
    if translated:
        stanzas = []
    cpus = parse_cpus(facts, stanzas, cores)
    clusters = parse_clusters(cpus)
    device = device_pb2.Device(
        arch=arch,
        soc=_soc(facts, stanzas, properties) or (clusters[0].part if clusters else ""),
        os=_os(facts, properties),
        cores=len(cpus),
        emulated=translated or android.is_emulated(properties) or _is_emulated(facts, stanzas),
        features=common_features(cpus),
        clusters=clusters,
        thermal_zones=readings.zone_names(facts),
        model=android.model(properties),
    )
    if (total := re.search(r"^MemTotal:\s+(\d{1,15}) kB", facts.get("/proc/meminfo", ""), re.MULTILINE)) is not None:
        device.memory_bytes = int(total.group(1)) * 1024
    if is_count(page := facts.get("getconf PAGESIZE", "").strip()) and int(page):
        device.page_size_bytes = int(page)
    elif (size := android.page_size_bytes(facts)) is not None:
        device.page_size_bytes = size
    if (battery := _has_battery(facts)) is not None:
        device.has_battery = battery
    return device


def collect() -> dict[str, str]:
    """Return the facts of this machine; files that are missing or unreadable are left out."""
    machine = os.uname()
    facts = {
        "uname -m": machine.machine,
        "uname -r": machine.release,
        "getconf PAGESIZE": str(os.sysconf("SC_PAGESIZE")),
        "getconf LONG_BIT": str(struct.calcsize("P") * 8),
    }
    paths = [*_FILES]
    for number in sorted(os.sched_getaffinity(0)):
        paths += [f"{CPU.format(number)}/{name}" for name in PER_CPU]
    paths += [str(path) for pattern in (*_POLICIES, *_EQUIPMENT) for path in sorted(Path("/").glob(pattern[1:]))]
    for path in paths:
        try:
            facts[path] = Path(path).read_text(errors="replace")
        except OSError:
            continue
    return facts


def choose_threads(device: device_pb2.Device, cpus: frozenset[int] | None) -> int:
    """Return the default number of threads: the physical cores of the fastest cluster that `cpus` includes."""
    for cluster in device.clusters:
        reached = len(cluster.cpus if cpus is None else cpus.intersection(cluster.cpus))
        if reached:
            return max(1, min(cluster.physical_cores or reached, reached))
    return 1


def _arch(facts: Mapping[str, str]) -> str:
    kernel = facts.get("uname -m", "").strip()
    return _NARROW.get(kernel, kernel) if facts.get("getconf LONG_BIT", "").strip() == "32" else kernel


def _has_battery(facts: Mapping[str, str]) -> bool | None:
    if (present := android.has_battery(facts)) is not None:
        return present
    supplies = [path for path in facts if re.match(r"/sys/class/power_supply/[^/]+/type\Z", path)]
    return any(readings.is_own_battery(facts, path) for path in supplies) if supplies else None


def _soc(facts: Mapping[str, str], stanzas: Sequence[Stanza], properties: Mapping[str, str]) -> str:
    if properties:
        hardware = next((stanza["hardware"] for stanza in stanzas if "hardware" in stanza), "")
        if name := android.soc(properties, hardware):
            return name
    return facts.get(_MODEL, "").strip("\0\r\n ") or board_of(stanzas)


def _os(facts: Mapping[str, str], properties: Mapping[str, str]) -> str:
    named = re.search(r'^PRETTY_NAME="?([^"\r\n]*)', facts.get("/etc/os-release", ""), re.MULTILINE)
    system = android.os(properties) or (named.group(1) if named else "")
    kernel = facts.get("uname -r", "").strip()
    return ", ".join(part for part in (system, f"Linux {kernel}" if kernel else "") if part)


def _is_emulated(facts: Mapping[str, str], stanzas: Sequence[Stanza]) -> bool:
    """Return whether QEMU translates this machine's instructions, so that its timings are meaningless.

    A QEMU `virt` board under KVM has the same device tree and counts as emulated too: no timing is better than a wrong one.
    """
    if "linux,dummy-virt" in facts.get(_COMPATIBLE, ""):
        return True
    return any(
        "QEMU TCG" in stanza.get("model name", "") or "QEMU Virtual CPU" in stanza.get("model name", "") for stanza in stanzas
    )
