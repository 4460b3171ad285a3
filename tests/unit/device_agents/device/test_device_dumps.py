"""The inventory's parser on facts of real boards, servers and phones, as public dumps have them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.device.arm_parts import LITTLE
from etfarm.device_agents.device.inventory import choose_cpus, choose_threads, format_cpu_list, parse
from etfarm.v1 import device_pb2
from etfarm.wire import selectors
from tests.support import dumps

Cluster = tuple[str, str, int | None, str]
"""(part, cpus, MHz, governor) of a cluster."""


@dataclass(frozen=True)
class Expected:
    """The expected description of a device; fields that its dump lacks are empty."""

    clusters: list[Cluster]
    arch: str = ""
    soc: str = ""
    model: str = ""
    os: str = ""
    memory_kib: int = 0
    features: str = ""


DEVICES = {
    "pixel-8": Expected(
        [
            ("Cortex-X3", "8", 2914, "sched_pixel"),
            ("Cortex-A715", "4-7", 2367, "sched_pixel"),
            ("Cortex-A510", "0-3", 1704, "sched_pixel"),
        ],
        "aarch64", "zuma", "Google Pixel 8", "Android 14 (API 34)", features="dotprod fp16 i8mm sve sve2",
    ),
    "snapdragon-8-gen-2": Expected(
        [
            ("Cortex-X3", "7", 3187, "walt"),
            ("Cortex-A715", "3-4", 2803, "walt"),
            ("Cortex-A710", "5-6", 2803, "walt"),
            ("Cortex-A510", "0-2", 2016, "walt"),
        ],
        soc="Cortex-X3", features="dotprod fp16 i8mm bf16",
    ),
    "galaxy-s9-global": Expected(
        [("Exynos-M3", "4-7", 2704, "schedutil"), ("Cortex-A55", "0-3", 1794, "schedutil")],
        "aarch64", "exynos9810", "Samsung SM-G960F", "Android 8.0.0 (API 26)", features="fp16",
    ),
    "galaxy-s9-us": Expected(
        [("Kryo-3xx-Gold", "4-7", 2803, "schedutil"), ("Kryo-3xx-Silver", "0-3", 1766, "schedutil")],
        "aarch64", "Qualcomm SDM845", "Samsung SM-G960U", "Android 8.0.0 (API 26)", features="fp16",
    ),
    "galaxy-s8-global": Expected(  # the same part number as the S7's: the variant tells M2 from M1
        [("Exynos-M2", "4-7", 2314, "interactive"), ("Cortex-A53", "0-3", 1690, "interactive")],
        "aarch64", "exynos8895", "Samsung SM-G950F", "Android 7.0 (API 24)",
    ),
    "galaxy-s7-global": Expected(  # two of its four fast cores are switched off
        [("Exynos-M1", "4-5", 2600, "interactive"), ("Cortex-A53", "0-3", 1586, "interactive")],
        "aarch64", "exynos8890", "Samsung SM-G930F", "Android 7.0 (API 24)",
    ),
    "huawei-mate-20": Expected(  # its governors may not be read
        [("Cortex-A76", "6-7", 2600, ""), ("Cortex-A76", "4-5", 1901, ""), ("Cortex-A55", "0-3", 1805, "")],
        "aarch64", "kirin980", "HUAWEI HMA-L29", "Android 9 (API 28)", features="fp16",
    ),
    "oppo-r15": Expected(  # both clusters have one clock
        [("Cortex-A73", "4-7", 1989, ""), ("Cortex-A53", "0-3", 1989, "")],
        "aarch64", "MT6771V/C", "OPPO PACM00", "Android 8.1.0 (API 27)",
    ),
    "meizu-pro-7-plus": Expected(  # cores of all three clusters are switched off
        [("Cortex-A73", "8", 2600, "interactive"), ("Cortex-A53", "4", 2197, "interactive"),
         ("Cortex-A35", "0-3", 1898, "interactive")],
        "aarch64", "mt6799", "Meizu PRO 7 Plus", "Android 7.0 (API 24)",
    ),
    "oneplus-5t": Expected(
        [("Kryo-2xx-Gold", "4-7", 2457, "interactive"), ("Kryo-2xx-Silver", "0-3", 1900, "interactive")],
        "aarch64", "Qualcomm MSM8998", "ONEPLUS A5010", "Android 8.0.0 (API 26)",
    ),
    "pixel-xl": Expected(
        [("Kryo-Gold", "2-3", 2150, "sched"), ("Kryo-Silver", "0-1", 1593, "sched")],
        "aarch64", "Qualcomm MSM8996pro", "Google Pixel XL", "Android 7.1.1 (API 25)",
    ),
    "nexus6p": Expected(  # all fast cores are switched off
        [("Cortex-A53", "0-3", 1555, "interactive")],
        "aarch64", "Qualcomm MSM8994", "Huawei Nexus 6P", "Android 7.1.2 (API 25)",
    ),
    "nexus9": Expected([("Denver", "0-1", 2499, "interactive")], "aarch64", "tegra132", "Htc Nexus 9", "Android 7.1.1 (API 25)"),
    "moto-g-gen5": Expected(  # cores of 64 bits, programs of 32
        [("Cortex-A53", "0-3", 1401, "interactive"), ("Cortex-A53", "4-7", 1094, "interactive")],
        "armv7l", "Qualcomm MSM8937", "Motorola Moto G (5)", "Android 7.0 (API 24)",
    ),
    "nexus4": Expected(
        [("Krait", "0-1", 1512, "ondemand")], "armv7l", "QCT APQ8064 MAKO", "LGE Nexus 4", "Android 5.1.1 (API 22)"
    ),
    "xiaomi-redmi-2a": Expected(
        [("Cortex-A7", "0-3", 1495, "interactive")], "armv7l", "Leadcore Innopower", "Xiaomi HM 2A", "Android 4.4.4 (API 19)"
    ),
    "kunpeng-920": Expected(
        [("TaiShan-v110", "0-127", None, "")], "aarch64", "TaiShan-v110", os="Linux 5.15.0-rc1-00005-g4c1b4a4d90b6-dirty",
        memory_kib=527031224, features="dotprod fp16",
    ),
    "scaleway": Expected([("ThunderX-88XX", "0-5", None, "")], soc="ThunderX-88XX"),
    "xeon-offline": Expected(
        [("Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz", "4-20", None, "")], "x86_64",
        "Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz", os="Linux 3.10.0-957.el7.x86_64", memory_kib=131737080, features="avx2 fma",
    ),
    "exynos-5250": Expected([("Cortex-A15", "0-1", 1700, "ondemand")], soc="SAMSUNG EXYNOS5"),
    "cortex-a9": Expected([("Cortex-A9", "0-1", 800, "ondemand")], soc="ST-Ericsson MOP500 platform", memory_kib=280840),
    "odroid-xu3": Expected([("Cortex-A15", "4-7", None, ""), ("Cortex-A7", "0-3", None, "")], "armv7l", "ODROID-XU3"),
    "odroid-c2": Expected([("Cortex-A53", "0-3", None, "")], "aarch64", "ODROID-C2"),
    "raspberry-pi-b": Expected([("ARM1176", "0", None, "")], "armv6l", "BCM2708"),
}  # fmt: skip

named = pytest.mark.parametrize("name", sorted(DEVICES))


def _clusters_of(device: device_pb2.Device) -> list[Cluster]:
    return [
        (
            cluster.part,
            format_cpu_list(cluster.cpus),
            cluster.max_frequency_hz // 1_000_000 if cluster.HasField("max_frequency_hz") else None,
            cluster.governor,
        )
        for cluster in device.clusters
    ]


def test_each_dump_is_looked_at() -> None:
    assert dumps.names() == sorted(DEVICES)


@named
def test_a_device_is_described_as_it_is(name: str) -> None:
    device, expected = parse(dumps.load(name)), DEVICES[name]
    assert _clusters_of(device) == expected.clusters
    assert (device.arch, device.soc, device.model, device.os) == (expected.arch, expected.soc, expected.model, expected.os)
    assert device.memory_bytes == expected.memory_kib * 1024
    assert list(device.features) == expected.features.split()
    assert device.cores == sum(len(cluster.cpus) for cluster in device.clusters)
    assert all(cluster.physical_cores == len(cluster.cpus) for cluster in device.clusters)
    assert not device.emulated


@named
def test_lines_that_a_terminal_ended_say_the_same(name: str) -> None:
    facts = dumps.load(name)
    assert parse({path: text.replace("\n", "\r\n") for path, text in facts.items()}) == parse(facts)


@named
def test_policies_say_what_the_files_of_each_cpu_say(name: str) -> None:
    facts = dumps.load(name)
    moved = {path: text for path, text in facts.items() if not re.search(r"/cpu\d+/cpufreq/", path)}
    for cluster in parse(facts).clusters:
        folder = f"/sys/devices/system/cpu/cpufreq/policy{cluster.cpus[0]}"
        moved.setdefault(f"{folder}/related_cpus", " ".join(map(str, cluster.cpus)) + "\n")
        for fact in ("cpuinfo_max_freq", "scaling_governor"):
            if text := facts.get(f"/sys/devices/system/cpu/cpu{cluster.cpus[0]}/cpufreq/{fact}"):
                moved[f"{folder}/{fact}"] = text
    assert _clusters_of(parse(moved)) == _clusters_of(parse(facts))


@named
def test_without_sys_the_cores_are_known_by_their_parts(name: str) -> None:
    facts = {path: text for path, text in dumps.load(name).items() if not path.startswith("/sys/")}
    device = parse(facts)
    parts = {cluster[0] for cluster in DEVICES[name].clusters}
    assert {cluster.part for cluster in device.clusters} == parts
    # What is made to save power comes last, by its name alone.
    saving = [cluster.part in LITTLE for cluster in device.clusters]
    assert saving == sorted(saving)
    assert list(device.features) == DEVICES[name].features.split()


@pytest.mark.parametrize("name", ["galaxy-s9-global", "huawei-mate-20"])
def test_without_cpuinfo_the_register_identifies_the_parts(name: str) -> None:
    facts = dumps.load(name)
    del facts["/proc/cpuinfo"]
    device = parse(facts)
    assert _clusters_of(device) == DEVICES[name].clusters
    assert not device.features


def test_a_feature_of_one_cluster_is_that_clusters_alone() -> None:
    facts = dumps.load("pixel-8")
    little, rest = facts["/proc/cpuinfo"].split("processor\t: 4")
    facts["/proc/cpuinfo"] = f"{little.replace(' i8mm', '').replace(' sve2', '')}processor\t: 4{rest}"
    device = parse(facts)
    assert list(device.features) == ["dotprod", "fp16", "sve"]
    assert [list(cluster.features) for cluster in device.clusters] == [
        ["dotprod", "fp16", "i8mm", "sve", "sve2"], ["dotprod", "fp16", "i8mm", "sve", "sve2"], ["dotprod", "fp16", "sve"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cores", "cpus", "threads"),
    [("pixel-8", "big", {8}, 1), ("pixel-8", "little", {0, 1, 2, 3}, 4), ("pixel-8", "4-7", {4, 5, 6, 7}, 4),
     ("galaxy-s9-us", "", None, 4), ("galaxy-s9-us", "big", {4, 5, 6, 7}, 4), ("oppo-r15", "little", {0, 1, 2, 3}, 4)],
)  # fmt: skip
def test_a_phones_cores_are_chosen_by_their_kind(name: str, cores: str, cpus: set[int] | None, threads: int) -> None:
    device = parse(dumps.load(name))
    chosen = choose_cpus(device, cores, restricted=False)
    assert chosen == cpus
    assert choose_threads(device, chosen) == threads


@pytest.mark.parametrize(
    ("selector", "matching"),
    [
        ("arch=armv7l", {"moto-g-gen5", "nexus4", "odroid-xu3", "xiaomi-redmi-2a"}),
        ("os=Android 8.0.0", {"galaxy-s9-global", "galaxy-s9-us", "oneplus-5t"}),
        ("os=Linux", {"kunpeng-920", "xeon-offline"}),
        ("model=Pixel 8", {"pixel-8"}),
        ("model=pixel", {"pixel-8", "pixel-xl"}),
        ("soc=Qualcomm", {"galaxy-s9-us", "oneplus-5t", "pixel-xl", "nexus6p", "moto-g-gen5"}),
        ("soc=sdm845", {"galaxy-s9-us"}),
        ("feature=i8mm", {"pixel-8", "snapdragon-8-gen-2"}),
        ("feature=sve2,os=Android", {"pixel-8"}),
        ("memory>=200GiB", {"kunpeng-920"}),
        ("cores>=9,os!=Linux", {"pixel-8"}),
    ],
)
def test_selectors_find_devices_by_their_facts(selector: str, matching: set[str]) -> None:
    result = selectors.parse(selector)
    assert {name for name in DEVICES if result.matches(parse(dumps.load(name)))} == matching


ALL = {name: dumps.load(name) for name in DEVICES}


@given(st.sampled_from(sorted(ALL)), st.data())
def test_facts_that_are_cut_off_mixed_up_or_missing_break_nothing(name: str, data: st.DataObject) -> None:
    facts = dict(ALL[name])
    for path in data.draw(st.lists(st.sampled_from(sorted(facts)), max_size=12, unique=True)):
        change = data.draw(st.sampled_from(["drop", "cut", "swap", "text"]))
        if change == "drop":
            del facts[path]
        elif change == "cut":
            facts[path] = facts[path][data.draw(st.integers(0, 40)) : -data.draw(st.integers(1, 40))]
        elif change == "swap":
            facts[path] = data.draw(st.sampled_from(sorted(ALL[name].values())))
        else:
            facts[path] = data.draw(st.text(max_size=80))
    device = parse(facts)
    assert device.cores == sum(len(cluster.cpus) for cluster in device.clusters)
    assert parse(facts) == device
