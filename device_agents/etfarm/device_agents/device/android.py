"""Facts of a phone beyond the kernel's files, and their parsers: properties, and dumps of its services.

Each is a fact under the name of its command, as `shell_facts.split` returns it. Pure functions that accept any text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from etfarm.v1 import report_pb2

Facts = Mapping[str, str]

GETPROP: Final = "getprop"
BATTERY: Final = "dumpsys battery"
THERMAL: Final = "dumpsys thermalservice"
POWER: Final = "dumpsys power"
DISK: Final = "df /data"
SMAPS: Final = "smaps"

_KEPT_PROPERTIES: Final = (
    r"^\[ro\.(product|build\.version|soc|board|chipname|hardware|mediatek|arch|kernel|serialno|boot\.qemu|boot\.serialno)"
)
INVENTORY_COMMANDS: Final[Mapping[str, str]] = {
    "uname -m": "uname -m",
    "uname -r": "uname -r",
    "getconf PAGESIZE": "getconf PAGESIZE",
    # A fallback for phones without getconf, as in Android 9 and before.
    SMAPS: "grep -m 1 KernelPageSize /proc/self/smaps",
    GETPROP: f"getprop | grep -E '{_KEPT_PROPERTIES}'",
    BATTERY: "dumpsys battery | head -n 40",
    THERMAL: "dumpsys thermalservice | head -n 400",
}
"""Commands by the names of their facts. Output is limited, since some makers append logs of a hundred kilobytes to a dump."""
READING_COMMANDS: Final[Mapping[str, str]] = {
    BATTERY: INVENTORY_COMMANDS[BATTERY],
    THERMAL: INVENTORY_COMMANDS[THERMAL],
    POWER: "dumpsys power | grep -E 'mWakefulness=|Display Power: state='",
    DISK: "df /data",
}

_PROPERTY: Final = re.compile(r"^\[([^\]\n]+)\]: \[([^\n]*)\][ \t\r]*$", re.MULTILINE)
_ABIS: Final = {
    "arm64-v8a": "aarch64", "x86_64": "x86_64", "riscv64": "riscv64", "armeabi-v7a": "armv7l", "armeabi": "armv7l", "x86": "i686",
}  # fmt: skip
"""Architectures by ABI name. The maker lists a phone's ABIs in order of preference; translated ones come last."""
_MAKERS: Final = {"QTI": "Qualcomm", "QCOM": "Qualcomm", "Mediatek": "MediaTek"}
_UNNAMED: Final = re.compile(r"generic|dummy|unknown|default|placeholder", re.IGNORECASE)
_TEMPERATURE: Final = re.compile(r"Temperature\{mValue=([-+.\dEe]{1,24}), mType=(-?\d{1,4}), mName=([^,}\n]{1,80})")
_NO_TEMPERATURES: Final = (-1, 6, 7, 8)
"""Sensor types of the thermal HAL without a temperature: unknown (for example differences of sensors), and a battery's
voltage, current and share."""
_CHARGING, _DISCHARGING, _NOT_CHARGING, _FULL = "2", "3", "4", "5"


def properties(facts: Facts) -> dict[str, str]:
    """Return the system properties, from the listing and from single queries (`getprop KEY`); empty ones are left out."""
    values = dict(_PROPERTY.findall(facts.get(GETPROP, "")))
    values |= {name.removeprefix("getprop "): text for name, text in facts.items() if name.startswith("getprop ")}
    return {name: text.strip() for name, text in values.items() if text.strip()}


def arch(properties: Mapping[str, str]) -> str:
    """Return the architecture of the phone's programs in the terms of `uname -m`; empty if unknown.

    A 64-bit kernel may run only 32-bit programs.
    """
    abis = properties.get("ro.product.cpu.abilist") or properties.get("ro.product.cpu.abi", "")
    return next((_ABIS[abi] for abi in map(str.strip, abis.split(",")) if abi in _ABIS), "")


def soc(properties: Mapping[str, str], hardware: str) -> str:
    """Return the system on a chip, such as "Google Tensor G3"; empty if unknown.

    Args:
        properties: the system properties.
        hardware: `Hardware` of /proc/cpuinfo, which names a phone's chip up to kernel 5.
    """
    maker, model = (_named(properties.get(f"ro.soc.{key}", "")) for key in ("manufacturer", "model"))
    if model:  # reported since Android 12
        maker = _MAKERS.get(maker, maker)
        return model if model.lower().startswith(maker.lower()) else f"{maker} {model}"
    hardware = re.sub(r"^Qualcomm Technologies,? Inc\.?", "Qualcomm", hardware).removesuffix("(Flattened Device Tree)")
    if board := _named(hardware):
        return board
    keys = ("ro.hardware.chipname", "ro.chipname", "ro.mediatek.platform", "ro.board.platform", "ro.arch")
    return next((name for key in keys if (name := _named(properties.get(key, "")))), "")


def model(properties: Mapping[str, str]) -> str:
    """Return the phone's retail name, such as "Google Pixel 8"; empty if unknown."""
    maker, name = properties.get("ro.product.manufacturer", ""), properties.get("ro.product.model", "")
    if not name or name.lower().startswith(maker.lower()):
        return name
    return f"{maker[:1].upper()}{maker[1:]} {name}"


def os(properties: Mapping[str, str]) -> str:
    """Return the system, such as "Android 14 (API 34)"; empty if it is not Android."""
    release, sdk = properties.get("ro.build.version.release", ""), properties.get("ro.build.version.sdk", "")
    if not release:
        return ""
    return f"Android {release} (API {sdk})" if sdk else f"Android {release}"


def is_emulated(properties: Mapping[str, str]) -> bool:
    """Return whether the phone is Android's own emulator."""
    if "1" in (properties.get("ro.kernel.qemu"), properties.get("ro.boot.qemu")):
        return True
    return properties.get("ro.hardware") in ("goldfish", "ranchu")


def has_battery(facts: Facts) -> bool | None:
    """Return whether the phone has a battery; None if unknown."""
    present = _battery(facts).get("present")
    return None if present is None else present == "true"


def battery_share(facts: Facts) -> float | None:
    """Return the battery's charge, 0 to 1."""
    battery = _battery(facts)
    level, scale = battery.get("level", ""), battery.get("scale", "100")
    if battery.get("present") == "false" or not (_is_small(level) and _is_small(scale)) or not 0 <= int(level) <= int(scale) > 0:
        return None
    return int(level) / int(scale)


def charging(facts: Facts) -> bool | None:
    """Return whether a charger powers the phone. A phone at a port with too little power discharges, and is not charging."""
    battery = _battery(facts)
    status = battery.get("status")
    if status in (_CHARGING, _FULL):
        return True
    if status == _DISCHARGING:
        return False
    powered = [
        battery[f"{source} powered"] == "true" for source in ("AC", "USB", "Wireless", "Dock") if f"{source} powered" in battery
    ]
    if powered:
        return any(powered)
    return True if status == _NOT_CHARGING else None


def thermal_status(facts: Facts) -> int | None:
    """Return the system's throttling status, from 0 (none) to 6 (shutdown)."""
    match = re.search(r"^[ \t]{0,16}Thermal Status: ([0-6])[ \t\r]*$", facts.get(THERMAL, ""), re.MULTILINE)
    return int(match.group(1)) if match else None


def temperatures(facts: Facts) -> list[report_pb2.ThermalZone]:
    """Return the thermal HAL's sensors: current values, else the latest reported ones, else only the battery's.

    A sensor that is not connected reports 0, NaN or an impossible value, which the caller filters out.
    """
    dump = facts.get(THERMAL, "")
    _, now, behind = dump.partition("Current temperatures from HAL:")
    section = re.split(r"^\S.*:[ \t\r]*$", behind, maxsplit=1, flags=re.MULTILINE)[0] if now else dump
    degrees_by_name: dict[str, float] = {}
    for value, kind, name in _TEMPERATURE.findall(section):
        if int(kind) in _NO_TEMPERATURES:
            continue
        try:
            degrees_by_name[name.strip()] = float(value)
        except ValueError:
            continue
    if not degrees_by_name and (tenths := _battery(facts).get("temperature", "")) and _is_small(tenths):
        degrees_by_name["battery"] = int(tenths) / 10
    return [report_pb2.ThermalZone(name=name, temperature_c=degrees) for name, degrees in degrees_by_name.items()]


def screen_on(facts: Facts) -> bool | None:
    """Return whether the screen is on; a clock shown while the phone dozes does not count. None if unknown."""
    dump = facts.get(POWER, "")
    if (state := re.search(r"Display Power: state=(\w+)", dump)) is not None:
        return state.group(1) == "ON"
    awake = re.search(r"mWakefulness=(\w+)", dump)
    return awake.group(1) in ("Awake", "Dreaming") if awake else None


def disk_free_bytes(facts: Facts) -> int | None:
    """Return the free bytes of the phone's storage that programs may use."""
    head, _, rest = facts.get(DISK, "").strip().partition("\n")
    unit = 512 if "512-blocks" in head else 1024
    match = re.search(r"\s\d{1,15}\s+\d{1,15}\s+(\d{1,15})\s+\d+%", rest)
    return int(match.group(1)) * unit if match else None


def page_size_bytes(facts: Facts) -> int | None:
    """Return the page size from the kernel's account of a process, for phones without `getconf`."""
    match = re.search(r"KernelPageSize:\s+(\d{1,9}) kB", facts.get(SMAPS, ""))
    return int(match.group(1)) * 1024 if match and int(match.group(1)) else None


def _battery(facts: Facts) -> dict[str, str]:
    """Return the battery service's state, which is the first section of its dump."""
    state: dict[str, str] = {}
    for key, value in re.findall(
        r"^[ \t]{1,16}([A-Za-z][A-Za-z ]{0,39}): (\S{1,40})[ \t\r]*$", facts.get(BATTERY, ""), re.MULTILINE
    ):
        state.setdefault(key, value)
    return state


def _named(text: str) -> str:
    """Return a name, or an empty text for placeholders that makers did not replace."""
    return "" if _UNNAMED.search(text) else text.strip()


def _is_small(text: str) -> bool:
    return text.isdecimal() and len(text) <= 9
