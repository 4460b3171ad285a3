"""The description of a device, sent once in the agent's Hello: a pure parser of facts, and the collector for this machine.

Facts are `{path: text}` of files, and of commands under their own name (`uname -m`, `uname -r`, `getconf PAGESIZE`; a phone's
other commands are in `android`), so that the same parser serves local files and a phone's output, see `shell_facts`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from etfarm.device_agents.device import android, processors, readings
from etfarm.device_agents.device.processors import is_count
from etfarm.v1 import device_pb2
from etfarm.wire.cores import choose_cpus, format_cpu_list, parse_cpu_list

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
    processors.ONLINE,
)
_POLICIES: Final = tuple(f"/sys/devices/system/cpu/cpufreq/policy*/{name}" for name in processors.PER_POLICY)
_EQUIPMENT: Final = (
    "/sys/class/thermal/thermal_zone*/type",
    "/sys/class/power_supply/*/type",
    "/sys/class/power_supply/*/scope",
)
PHONE_FILES: Final = (
    *_FILES,
    *(f"/sys/devices/system/cpu/cpu[0-9]*/{name}" for name in processors.PER_CPU),
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
    stanzas = processors.parse_stanzas(facts.get("/proc/cpuinfo", ""))
    arch = android.arch(properties) or _arch(facts)
    # qemu's user mode shows the host's /proc/cpuinfo, whose features the program does not have.
    translated = arch == "aarch64" and any("vendor_id" in stanza for stanza in stanzas)
    if translated:
        stanzas = []
    cpus = processors.parse_cpus(facts, stanzas, cores)
    clusters = processors.parse_clusters(cpus)
    device = device_pb2.Device(
        arch=arch,
        soc=_soc(facts, stanzas, properties) or (clusters[0].part if clusters else ""),
        os=_os(facts, properties),
        cores=len(cpus),
        emulated=translated or android.is_emulated(properties) or _is_emulated(facts, stanzas),
        features=processors.common_features(cpus),
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
        paths += [f"{processors.CPU.format(number)}/{name}" for name in processors.PER_CPU]
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


def _soc(facts: Mapping[str, str], stanzas: Sequence[processors.Stanza], properties: Mapping[str, str]) -> str:
    if properties:
        hardware = next((stanza["hardware"] for stanza in stanzas if "hardware" in stanza), "")
        if name := android.soc(properties, hardware):
            return name
    return facts.get(_MODEL, "").strip("\0\r\n ") or processors.board_of(stanzas)


def _os(facts: Mapping[str, str], properties: Mapping[str, str]) -> str:
    named = re.search(r'^PRETTY_NAME="?([^"\r\n]*)', facts.get("/etc/os-release", ""), re.MULTILINE)
    system = android.os(properties) or (named.group(1) if named else "")
    kernel = facts.get("uname -r", "").strip()
    return ", ".join(part for part in (system, f"Linux {kernel}" if kernel else "") if part)


def _is_emulated(facts: Mapping[str, str], stanzas: Sequence[processors.Stanza]) -> bool:
    """Return whether QEMU translates this machine's instructions, so that its timings are meaningless.

    A QEMU `virt` board under KVM has the same device tree and counts as emulated too: no timing is better than a wrong one.
    """
    if "linux,dummy-virt" in facts.get(_COMPATIBLE, ""):
        return True
    return any(
        "QEMU TCG" in stanza.get("model name", "") or "QEMU Virtual CPU" in stanza.get("model name", "") for stanza in stanzas
    )
