"""What this machine is, told once in the agent's Hello: a pure parser of the kernel's files, and their collector.

Facts are `{path: text}` of files, and of three commands under their own command line (`uname -m`, `uname -r`,
`getconf PAGESIZE`), so that the same parser serves files read here and files read over another link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.device_agents.errors import CoresUnknown
from etfarm.v1 import device_pb2

_CPU: Final = "/sys/devices/system/cpu/cpu{}"
_PER_CPU: Final = (
    "topology/thread_siblings_list",
    "topology/core_id",
    "topology/physical_package_id",
    "cpufreq/cpuinfo_max_freq",
    "cpufreq/scaling_governor",
    "cpu_capacity",
)
_FILES: Final = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self/status",
    "/etc/os-release",
    "/sys/firmware/devicetree/base/model",
    "/sys/firmware/devicetree/base/compatible",
)

ARM_PARTS: Final[Mapping[tuple[int, int], str]] = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD04): "Cortex-A35", (0x41, 0xD05): "Cortex-A55", (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72", (0x41, 0xD09): "Cortex-A73", (0x41, 0xD0A): "Cortex-A75", (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD0D): "Cortex-A77", (0x41, 0xD0E): "Cortex-A76AE", (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78", (0x41, 0xD42): "Cortex-A78AE", (0x41, 0xD44): "Cortex-X1", (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710", (0x41, 0xD48): "Cortex-X2", (0x41, 0xD49): "Neoverse-N2", (0x41, 0xD4B): "Cortex-A78C",
    (0x41, 0xD4C): "Cortex-X1C", (0x41, 0xD4D): "Cortex-A715", (0x41, 0xD4E): "Cortex-X3", (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD80): "Cortex-A520", (0x41, 0xD81): "Cortex-A720", (0x41, 0xD82): "Cortex-X4", (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925", (0x41, 0xD87): "Cortex-A725", (0x41, 0xD8E): "Neoverse-N3",
    (0x51, 0x001): "Oryon", (0x51, 0x201): "Kryo", (0x51, 0x205): "Kryo", (0x51, 0x211): "Kryo",
    (0x51, 0x800): "Kryo-2xx-Gold", (0x51, 0x801): "Kryo-2xx-Silver", (0x51, 0x802): "Kryo-3xx-Gold",
    (0x51, 0x803): "Kryo-3xx-Silver", (0x51, 0x804): "Kryo-4xx-Gold", (0x51, 0x805): "Kryo-4xx-Silver",
    (0x61, 0x020): "Icestorm-A14", (0x61, 0x021): "Firestorm-A14", (0x61, 0x022): "Icestorm-M1",
    (0x61, 0x023): "Firestorm-M1", (0x61, 0x024): "Icestorm-M1-Pro", (0x61, 0x025): "Firestorm-M1-Pro",
    (0x61, 0x028): "Icestorm-M1-Max", (0x61, 0x029): "Firestorm-M1-Max", (0x61, 0x030): "Blizzard-A15",
    (0x61, 0x031): "Avalanche-A15", (0x61, 0x032): "Blizzard-M2", (0x61, 0x033): "Avalanche-M2",
    (0x61, 0x034): "Blizzard-M2-Pro", (0x61, 0x035): "Avalanche-M2-Pro",
}  # fmt: skip
"""Names by MIDR (implementer, part). Source: the ids in Linux' arch/arm64/include/asm/cputype.h and util-linux' lscpu-arm.c."""

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
"""Our names, each with the kernel's words that stand for it (Arm's `Features`, x86's `flags`); one of them is enough."""


@dataclass(frozen=True)
class _Cpu:
    number: int
    part: str
    features: frozenset[str]
    core: str
    """Equal for the logical cpus of one physical core."""
    max_frequency_hz: int | None
    governor: str
    capacity: int | None


def parse(facts: Mapping[str, str], cores: Collection[int] | None = None) -> device_pb2.Device:
    """The device that the facts describe, without id, agent_id, name and labels. No I/O.

    Clusters come fastest first (by the scheduler's cpu_capacity, then the maximum frequency). What no fact tells is unset.

    Args:
        facts: text by path or command, as `collect` gives it. Any of them may be missing.
        cores: logical cpus that programs are restricted to, besides the affinity in the facts.
    """
    arch = facts.get("uname -m", "").strip()
    stanzas = list(_stanzas(facts.get("/proc/cpuinfo", "")))
    allowed = _allowed(facts, stanzas, cores)
    cpus = [_cpu(number, facts, stanzas) for number in sorted(allowed)]
    device = device_pb2.Device(
        arch=arch,
        soc=_soc(facts, stanzas),
        os=_os(facts),
        cores=len(cpus),
        emulated=_is_emulated(arch, facts, stanzas),
        features=_named(cpu.features for cpu in cpus),
        clusters=_clusters(cpus),
    )
    if (total := re.search(r"^MemTotal:\s+(\d{1,15}) kB", facts.get("/proc/meminfo", ""), re.MULTILINE)) is not None:
        device.memory_bytes = int(total.group(1)) * 1024
    if _is_count(page := facts.get("getconf PAGESIZE", "").strip()):
        device.page_size_bytes = int(page)
    return device


def collect() -> dict[str, str]:
    """The facts of this machine. A file that is not there or may not be read is left out."""
    machine = os.uname()
    facts = {
        "uname -m": machine.machine,
        "uname -r": machine.release,
        "getconf PAGESIZE": str(os.sysconf("SC_PAGESIZE")),
    }
    paths = [*_FILES]
    for number in sorted(os.sched_getaffinity(0)):
        paths += [f"{_CPU.format(number)}/{name}" for name in _PER_CPU]
    for path in paths:
        try:
            facts[path] = Path(path).read_text(errors="replace")
        except OSError:
            continue
    return facts


def choose_cpus(device: device_pb2.Device, wanted: str, restricted: bool) -> frozenset[int] | None:
    """The logical cpus to bind a runner to; None where the system may choose among all.

    Args:
        device: its clusters are fastest first.
        wanted: Measurement.cores: `big`, `little`, a cpu list, or empty for the device's default.
        restricted: whether the agent was told to use some cpus only (`--cores`), which are those of the device.

    Raises:
        CoresUnknown: it names none, or one that programs may not use here.
    """
    allowed = frozenset(cpu for cluster in device.clusters for cpu in cluster.cpus)
    if not wanted:
        return allowed if restricted else None
    if wanted in ("big", "little"):
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


def choose_threads(device: device_pb2.Device, cpus: frozenset[int] | None) -> int:
    """The default number of threads: the physical cores of the fastest cluster, as far as `cpus` reach."""
    for cluster in device.clusters:
        reached = len(cluster.cpus if cpus is None else cpus.intersection(cluster.cpus))
        if reached:
            return max(1, min(cluster.physical_cores or reached, reached))
    return 1


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers of a kernel cpu list such as "0-3,6".

    Raises:
        ValueError: it is no such list, or an empty one.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < 1 << 16:
            raise ValueError(f"{part!r} is no range of cpus")
        numbers.update(range(low, high + 1))
    return frozenset(numbers)


def format_cpu_list(numbers: Collection[int]) -> str:
    """The shortest cpu list of the numbers: "0-3,6". `parse_cpu_list` gives them back."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _stanzas(cpuinfo: str) -> Iterator[dict[str, str]]:
    """/proc/cpuinfo's blocks; keys in lower case. Arm kernels append one without `processor` about the whole board."""
    for block in re.split(r"\n\s*\n", cpuinfo):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        if stanza := {key.strip().lower(): value.strip() for key, _, value in pairs}:
            yield stanza


def _allowed(facts: Mapping[str, str], stanzas: list[dict[str, str]], cores: Collection[int] | None) -> frozenset[int]:
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", facts.get("/proc/self/status", ""), re.MULTILINE)
    present = frozenset(int(s["processor"]) for s in stanzas if s.get("processor", "").isdecimal())
    allowed = parse_cpu_list(listed.group(1)) if listed else present
    return allowed if cores is None else allowed & frozenset(cores)


def _cpu(number: int, facts: Mapping[str, str], stanzas: list[dict[str, str]]) -> _Cpu:
    # A kernel that describes one cpu for all of them (old 32-bit ones do) has no stanza for the others.
    own = next((s for s in stanzas if s.get("processor") == str(number)), stanzas[0] if stanzas else {})

    def fact(name: str) -> str:
        return facts.get(f"{_CPU.format(number)}/{name}", "").strip()

    # Sibling lists tell cores apart on every kernel; Arm's core_id repeats in each cluster.
    package, core_id = fact("topology/physical_package_id"), fact("topology/core_id")
    core = fact("topology/thread_siblings_list") or (f"{package}:{core_id}" if core_id else f"cpu{number}")
    frequency, capacity = fact("cpufreq/cpuinfo_max_freq"), fact("cpu_capacity")
    return _Cpu(
        number=number,
        part=_part(own),
        features=frozenset((own.get("features") or own.get("flags") or "").split()),
        core=core,
        max_frequency_hz=int(frequency) * 1000 if _is_count(frequency) else None,
        governor=fact("cpufreq/scaling_governor"),
        capacity=int(capacity) if _is_count(capacity) else None,
    )


def _is_count(text: str) -> bool:
    """Whether a fact is a number that a field of the contract can hold, also times 1000."""
    return text.isdecimal() and len(text) <= 15


def _part(stanza: Mapping[str, str]) -> str:
    try:
        key = int(stanza["cpu implementer"], 0), int(stanza["cpu part"], 0)
    except (KeyError, ValueError):
        return stanza.get("model name", "")
    return ARM_PARTS.get(key, f"implementer {key[0]:#x} part {key[1]:#x}")


def _clusters(cpus: list[_Cpu]) -> list[device_pb2.Cluster]:
    kinds: dict[tuple[str, int | None, int | None], list[_Cpu]] = {}
    for cpu in cpus:
        kinds.setdefault((cpu.part, cpu.max_frequency_hz, cpu.capacity), []).append(cpu)
    fastest_first = sorted(kinds.items(), key=lambda kind: (-(kind[0][2] or 0), -(kind[0][1] or 0), kind[1][0].number))
    return [
        device_pb2.Cluster(
            part=part,
            cpus=[cpu.number for cpu in members],
            max_frequency_hz=frequency,
            governor=members[0].governor,
            features=_named(cpu.features for cpu in members),
            physical_cores=len({cpu.core for cpu in members}),
        )
        for (part, frequency, _), members in fastest_first
    ]


def _named(of_cpus: Iterator[frozenset[str]]) -> list[str]:
    """Our names for what all the cpus have."""
    sets = [{name for name, words in FEATURES.items() if not words_of.isdisjoint(words)} for words_of in of_cpus]
    common = set.intersection(*sets) if sets else set()
    return [name for name in FEATURES if name in common]


def _soc(facts: Mapping[str, str], stanzas: list[dict[str, str]]) -> str:
    if model := facts.get("/sys/firmware/devicetree/base/model", "").strip("\0\n "):
        return model
    for key in ("model name", "hardware", "model"):
        # x86's `model` is a number, Arm's a board.
        for stanza in stanzas:
            if (value := stanza.get(key, "")) and not value.isdecimal():
                return value
    return next((part for stanza in stanzas if (part := _part(stanza))), "")


def _os(facts: Mapping[str, str]) -> str:
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', facts.get("/etc/os-release", ""), re.MULTILINE)
    kernel = facts.get("uname -r", "").strip()
    return ", ".join(part for part in (named.group(1) if named else "", f"Linux {kernel}" if kernel else "") if part)


def _is_emulated(arch: str, facts: Mapping[str, str], stanzas: list[dict[str, str]]) -> bool:
    """Whether timings of this machine mean nothing: QEMU translates its instructions.

    A QEMU `virt` board under KVM has the same device tree and is counted as emulated too: rather no timing than a false one.
    """
    if arch == "aarch64" and any("vendor_id" in stanza for stanza in stanzas):
        return True  # qemu-user shows the host's /proc/cpuinfo
    if "linux,dummy-virt" in facts.get("/sys/firmware/devicetree/base/compatible", ""):
        return True
    return any(
        "QEMU TCG" in stanza.get("model name", "") or "QEMU Virtual CPU" in stanza.get("model name", "") for stanza in stanzas
    )
