"""Names of Arm cores, by their MIDR register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ARM: Final = {
    0xB02: "ARM11-MPCore", 0xB36: "ARM1136", 0xB56: "ARM1156", 0xB76: "ARM1176",
    0xC05: "Cortex-A5", 0xC07: "Cortex-A7", 0xC08: "Cortex-A8", 0xC09: "Cortex-A9", 0xC0D: "Cortex-A17", 0xC0E: "Cortex-A17",
    0xC0F: "Cortex-A15", 0xD01: "Cortex-A32", 0xD02: "Cortex-A34", 0xD03: "Cortex-A53", 0xD04: "Cortex-A35",
    0xD05: "Cortex-A55", 0xD06: "Cortex-A65", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73",
    0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE",
    0xD0F: "AEMv8", 0xD15: "Cortex-R82", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE",
    0xD43: "Cortex-A65AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD48: "Cortex-X2",
    0xD49: "Neoverse-N2", 0xD4A: "Neoverse-E1", 0xD4B: "Cortex-A78C", 0xD4C: "Cortex-X1C", 0xD4D: "Cortex-A715",
    0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2", 0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4",
    0xD83: "Neoverse-V3AE", 0xD84: "Neoverse-V3", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725", 0xD88: "Cortex-A520AE",
    0xD89: "Cortex-A720AE", 0xD8A: "C1-Nano", 0xD8B: "C1-Pro", 0xD8C: "C1-Ultra", 0xD8E: "Neoverse-N3", 0xD8F: "Cortex-A320",
    0xD90: "C1-Premium",
}  # fmt: skip
_BROADCOM: Final = {0x00F: "Brahma-B15", 0x100: "Brahma-B53", 0x516: "ThunderX2"}
_CAVIUM: Final = {
    0x0A0: "ThunderX", 0x0A1: "ThunderX-88XX", 0x0A2: "ThunderX-81XX", 0x0A3: "ThunderX-83XX", 0x0AF: "ThunderX2-99XX",
    0x0B0: "OcteonTX2", 0x0B1: "OcteonTX2-98XX", 0x0B2: "OcteonTX2-96XX", 0x0B3: "OcteonTX2-95XX", 0x0B4: "OcteonTX2-95XXN",
    0x0B5: "OcteonTX2-95XXMM", 0x0B6: "OcteonTX2-95XXO", 0x0B8: "ThunderX3-T110",
}  # fmt: skip
_HISILICON: Final = {
    0xD01: "TaiShan-v110", 0xD02: "TaiShan-v120", 0xD06: "HIP12",
    0xD40: "Cortex-A76", 0xD41: "Cortex-A77",  # Kirin's cores are Arm's, under HiSilicon's name
}  # fmt: skip
_NVIDIA: Final = {0x000: "Denver", 0x003: "Denver-2", 0x004: "Carmel", 0x010: "Olympus"}
_QUALCOMM: Final = {
    0x001: "Oryon", 0x00F: "Scorpion", 0x02D: "Scorpion", 0x04D: "Krait", 0x06F: "Krait", 0x200: "Kryo", 0x201: "Kryo-Silver",
    0x205: "Kryo-Gold", 0x211: "Kryo-Silver", 0x800: "Kryo-2xx-Gold", 0x801: "Kryo-2xx-Silver", 0x802: "Kryo-3xx-Gold",
    0x803: "Kryo-3xx-Silver", 0x804: "Kryo-4xx-Gold", 0x805: "Kryo-4xx-Silver", 0xC00: "Falkor", 0xC01: "Saphira",
}  # fmt: skip
_SAMSUNG: Final = {0x001: "Exynos-M1", 0x002: "Exynos-M3", 0x003: "Exynos-M4", 0x004: "Exynos-M5"}
_APPLE: Final = {
    0x020: "Icestorm-A14", 0x021: "Firestorm-A14", 0x022: "Icestorm-M1", 0x023: "Firestorm-M1", 0x024: "Icestorm-M1-Pro",
    0x025: "Firestorm-M1-Pro", 0x028: "Icestorm-M1-Max", 0x029: "Firestorm-M1-Max", 0x030: "Blizzard-A15",
    0x031: "Avalanche-A15", 0x032: "Blizzard-M2", 0x033: "Avalanche-M2", 0x034: "Blizzard-M2-Pro", 0x035: "Avalanche-M2-Pro",
    0x036: "Sawtooth-A16", 0x037: "Everest-A16", 0x038: "Blizzard-M2-Max", 0x039: "Avalanche-M2-Max",
}  # fmt: skip
_PHYTIUM: Final = {
    0x303: "FTC310", 0x660: "FTC660", 0x661: "FTC661", 0x662: "FTC662", 0x663: "FTC663", 0x664: "FTC664", 0x862: "FTC862",
}  # fmt: skip
_BY_IMPLEMENTER: Final[Mapping[int, Mapping[int, str]]] = {
    0x41: _ARM, 0x42: _BROADCOM, 0x43: _CAVIUM, 0x46: {0x001: "A64FX", 0x003: "Monaka"}, 0x48: _HISILICON, 0x4E: _NVIDIA,
    0x50: {0x000: "X-Gene"}, 0x51: _QUALCOMM, 0x53: _SAMSUNG, 0x56: {0x581: "PJ4", 0x584: "PJ4B-MP"}, 0x61: _APPLE,
    0x6D: {0xD49: "Azure-Cobalt-100"}, 0x70: _PHYTIUM, 0xC0: {0xAC3: "Ampere-1", 0xAC4: "Ampere-1A", 0xAC5: "Ampere-1B"},
}  # fmt: skip
_EXYNOS_M2: Final = (0x53, 0x001, 4)
"""The only core that its part number does not identify, so that the variant is needed. Source: pytorch/cpuinfo, src/arm/uarch.c.
"""

ARM_PARTS: Final[Mapping[tuple[int, int], str]] = {
    (implementer, part): name for implementer, parts in _BY_IMPLEMENTER.items() for part, name in parts.items()
}
"""Names by MIDR (implementer, part). Source: the ids in Linux' arch/arm64/include/asm/cputype.h and util-linux' lscpu-arm.c."""

LITTLE: Final = frozenset(
    (
        "Cortex-A5", "Cortex-A7", "Cortex-A32", "Cortex-A34", "Cortex-A35", "Cortex-A53", "Cortex-A55", "Cortex-A320",
        "Cortex-A510", "Cortex-A520", "Cortex-A520AE", "C1-Nano", "Kryo-Silver", "Kryo-2xx-Silver", "Kryo-3xx-Silver",
        "Kryo-4xx-Silver", *(name for name in _APPLE.values() if name.split("-")[0] in ("Icestorm", "Blizzard", "Sawtooth")),
    )
)  # fmt: skip
"""Power-saving cores: the slower ones beside any others, whatever their clock."""


def part_name(implementer: int, part: int, variant: int = 0) -> str:
    """Return a core's name, or its numbers if it is unknown."""
    if (implementer, part, variant) == _EXYNOS_M2:
        return "Exynos-M2"
    return ARM_PARTS.get((implementer, part), f"implementer {implementer:#x} part {part:#x}")
