"""What phones answer beside the kernel's files: in the forms that Android's services print, with numbers of these tests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.device import android, inventory, readings
from etfarm.v1 import device_pb2, report_pb2

BATTERY = """Current Battery Service state:
  AC powered: false
  USB powered: true
  Wireless powered: false
  Max charging current: 500000
  Charge counter: 3270000
  status: {status}
  health: 2
  present: true
  level: 41
  scale: 50
  voltage: 4352
  temperature: 274
  technology: Li-ion
  level: 7
"""
THERMAL = """IsStatusOverride: false
ThermalEventListeners:
\tcallbacks: 2
\tkilled: false
\tbroadcasts count: -1
Thermal Status: 3
Cached temperatures:
\tTemperature{mValue=71.5, mType=0, mName=AP, mStatus=3}
\tTemperature{mValue=31.0, mType=2, mName=BAT, mStatus=0}
HAL Ready: true
HAL connection:
\tThermalHAL 2.0 connected: yes
Current temperatures from HAL:
\tTemperature{mValue=44.800003, mType=0, mName=AP, mStatus=0}
\tTemperature{mValue=0.0, mType=4, mName=USB, mStatus=0}
\tTemperature{mValue=NaN, mType=3, mName=SKIN, mStatus=0}
\tTemperature{mValue=87.0, mType=8, mName=soc, mStatus=0}
\tTemperature{mValue=32.2, mType=2, mName=BAT, mStatus=0}
Current cooling devices from HAL:
\tCoolingDevice{mValue=0, mType=2, mName=thermal-cpufreq-0}
Temperature static thresholds from HAL:
\tTemperatureThreshold{mType=3, mName=SKIN, mHotThrottlingThresholds=[NaN, 39.0], mColdThrottlingThresholds=[NaN]}
"""
POWER = "  mWakefulness=Awake\n  mWakefulnessChanging=false\nDisplay Power: state=OFF\n"
PROPERTIES = """[ro.build.version.release]: [14]
[ro.build.version.sdk]: [34]
[ro.product.cpu.abilist]: [arm64-v8a,armeabi-v7a,armeabi]
[ro.product.manufacturer]: [Google]
[ro.product.model]: [Pixel 8]
[ro.soc.manufacturer]: [Google]
[ro.soc.model]: [Tensor G3]
"""


def _battery(status: int = 2, **changes: str) -> dict[str, str]:
    text = BATTERY.format(status=status)
    for old, new in changes.items():
        text = text.replace(old.replace("_", " "), new)
    return {android.BATTERY: text}


def test_the_state_of_a_phone_is_read() -> None:
    read = readings.parse({**_battery(), android.THERMAL: THERMAL, android.POWER: POWER})
    assert read.battery_share == pytest.approx(41 / 50)
    assert read.charging is True
    assert read.thermal_status == 3
    assert read.screen_on is False
    assert [(zone.name, zone.temperature_c) for zone in read.zones] == [
        ("AP", pytest.approx(44.8, abs=1e-3)), ("BAT", pytest.approx(32.2)),
    ]  # fmt: skip


def test_what_a_phone_does_not_say_is_absent() -> None:
    read = readings.parse({android.BATTERY: "Can't find service: battery\n", android.THERMAL: "", android.POWER: "\n"})
    assert read == report_pb2.SystemReading()
    assert not inventory.parse({android.BATTERY: ""}).HasField("has_battery")


@pytest.mark.parametrize(
    ("facts", "charging"),
    [
        (_battery(2), True),
        (_battery(5), True),
        (_battery(3), False),  # at a port that gives less than the phone takes
        (_battery(4), True),
        (_battery(4, USB_powered="Dock powered"), True),
        (_battery(4, USB_powered="Unknown"), False),
        (_battery(1), True),
        ({android.BATTERY: "  status: 4\n"}, True),
        ({android.BATTERY: "  status: 1\n"}, None),
    ],
)
def test_a_phone_is_charging_where_its_charger_carries_it(facts: dict[str, str], charging: bool | None) -> None:
    assert android.charging(facts) is charging


@pytest.mark.parametrize(
    ("power", "lit"),
    [
        ("Display Power: state=ON", True),
        ("Display Power: state=DOZE_SUSPEND\n  mWakefulness=Awake", False),
        ("  mWakefulness=Awake", True),
        ("  mWakefulness=Dreaming", True),
        ("  mWakefulness=Asleep", False),
        ("  mWakefulness=Dozing", False),
        ("", None),
    ],
)
def test_the_screen_is_on_or_not(power: str, lit: bool | None) -> None:
    assert android.screen_on({android.POWER: power}) is lit


def test_a_device_without_a_battery_says_so() -> None:
    facts = _battery(present="absent") | {android.BATTERY: BATTERY.format(status=1).replace("present: true", "present: false")}
    assert android.battery_share(facts) is None
    device = inventory.parse(facts)
    assert device.HasField("has_battery") and not device.has_battery


def test_before_the_thermal_hal_the_battery_has_the_only_sensor() -> None:
    facts = _battery() | {android.THERMAL: "Can't find service: thermalservice\n"}
    assert [(zone.name, zone.temperature_c) for zone in readings.zones(facts)] == [("battery", pytest.approx(27.4))]


def test_what_changed_last_is_taken_where_the_hal_is_silent() -> None:
    cached = THERMAL.partition("HAL Ready")[0]
    assert [zone.name for zone in readings.zones({android.THERMAL: cached})] == ["AP", "BAT"]


def test_sensors_of_the_kernel_go_before_androids() -> None:
    zone = "/sys/class/thermal/thermal_zone{}"
    facts = {
        android.THERMAL: THERMAL,
        f"{zone.format(0)}/type": "cpu-0-0-usr\n",
        f"{zone.format(0)}/temp": "41200\n",
        # Qualcomm's battery: 87 percent, 4.1 V.
        f"{zone.format(1)}/type": "soc\n",
        f"{zone.format(1)}/temp": "87\n",
        f"{zone.format(2)}/type": "vbat\n",
        f"{zone.format(2)}/temp": "4100\n",
        f"{zone.format(3)}/type": "soc-thermal\n",
        f"{zone.format(3)}/temp": "38000\n",
    }
    assert [(one.name, one.temperature_c) for one in readings.zones(facts)] == [("cpu-0-0-usr", 41.2), ("soc-thermal", 38.0)]
    assert readings.hottest_c(facts) == 41.2
    assert list(inventory.parse(facts).thermal_zones) == ["cpu-0-0-usr", "soc-thermal"]
    assert list(inventory.parse({android.THERMAL: THERMAL}).thermal_zones) == ["AP", "BAT"]


def test_clocks_of_a_policy_are_those_of_its_cpus() -> None:
    policy = "/sys/devices/system/cpu/cpufreq/policy4"
    facts = {
        f"{policy}/related_cpus": "4 5 6\n",
        f"{policy}/scaling_cur_freq": "1200000\n",
        f"{policy}/scaling_max_freq": "2400000\n",
        f"{policy}/scaling_governor": "schedutil\n",
        "/sys/devices/system/cpu/cpu5/cpufreq/scaling_cur_freq": "900000\n",
        "/sys/devices/system/cpu/cpufreq/policy9/related_cpus": "<unknown>\n",
        "/sys/devices/system/cpu/cpufreq/policy9/scaling_cur_freq": "1\n",
    }
    read = readings.parse(facts)
    assert [(cpu.cpu, cpu.frequency_hz, cpu.limit_hz, cpu.governor) for cpu in read.cpus] == [
        (4, 1_200_000_000, 2_400_000_000, "schedutil"),
        (5, 900_000_000, 2_400_000_000, "schedutil"),
        (6, 1_200_000_000, 2_400_000_000, "schedutil"),
    ]
    assert [readings.frequency_hz(facts, cpu) for cpu in (4, 5, 9)] == [1_200_000_000, 900_000_000, None]


def test_a_phone_is_described() -> None:
    facts = {android.GETPROP: PROPERTIES, "uname -m": "aarch64\n", "uname -r": "5.15.137-android14-11\n", **_battery()}
    device = inventory.parse(facts)
    assert (device.arch, device.model, device.soc) == ("aarch64", "Google Pixel 8", "Google Tensor G3")
    assert device.os == "Android 14 (API 34), Linux 5.15.137-android14-11"
    assert device.has_battery
    single = {f"getprop {key.strip('[]')}": f"{value.strip('[]')}\n" for key, value in _pairs(PROPERTIES)}
    assert inventory.parse({**single, "uname -r": "5.15.137-android14-11", "uname -m": "aarch64", **_battery()}) == device


def _pairs(listing: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (line.partition(": ") for line in listing.splitlines())]


@pytest.mark.parametrize(
    ("expected", "soc"),
    [
        ({"ro.soc.manufacturer": "QTI", "ro.soc.model": "SM8550"}, "Qualcomm SM8550"),
        ({"ro.soc.manufacturer": "Mediatek", "ro.soc.model": "MT6985"}, "MediaTek MT6985"),
        ({"ro.soc.manufacturer": "Samsung", "ro.soc.model": "Samsung s5e9945"}, "Samsung s5e9945"),
        ({"ro.soc.manufacturer": "unknown", "ro.soc.model": "unknown", "ro.board.platform": "zuma"}, "zuma"),
        ({"ro.hardware.chipname": "exynos2200", "ro.board.platform": "universal2200"}, "exynos2200"),
        ({"ro.product.model": "X"}, ""),
    ],
)
def test_a_chip_is_named_as_well_as_the_phone_knows_it(expected: dict[str, str], soc: str) -> None:
    assert android.soc(expected, "") == soc


@pytest.mark.parametrize(
    ("abis", "kernel", "arch"),
    [
        ("arm64-v8a", "aarch64", "aarch64"),
        ("armeabi-v7a,armeabi", "aarch64", "armv7l"),
        ("armeabi-v7a,armeabi", "armv8l", "armv7l"),
        ("x86_64,x86,arm64-v8a", "x86_64", "x86_64"),
        ("", "armv8l", "armv8l"),
        ("mips", "mips", "mips"),
    ],
)
def test_programs_are_built_for_what_may_run(abis: str, kernel: str, arch: str) -> None:
    assert inventory.parse({"getprop ro.product.cpu.abilist": abis, "uname -m": kernel}).arch == arch


@pytest.mark.parametrize(
    ("kernel", "bits", "arch"), [("aarch64", "32", "armv7l"), ("aarch64", "64", "aarch64"), ("x86_64", "32", "i686")]
)
def test_a_board_with_a_system_of_32_bits_is_one_of_32_bits(kernel: str, bits: str, arch: str) -> None:
    assert inventory.parse({"uname -m": f"{kernel}\n", "getconf LONG_BIT": f"{bits}\n"}).arch == arch


def test_androids_own_emulator_is_emulated() -> None:
    for text in ("[ro.kernel.qemu]: [1]\n", "[ro.boot.qemu]: [1]\n", "[ro.hardware]: [ranchu]\n"):
        assert inventory.parse({android.GETPROP: PROPERTIES + text}).emulated
    assert not inventory.parse({android.GETPROP: PROPERTIES + "[ro.kernel.qemu]: [0]\n"}).emulated


def test_the_size_of_a_page_is_read_without_getconf() -> None:
    device = inventory.parse({android.SMAPS: "KernelPageSize:       16 kB\n"})
    assert device.page_size_bytes == 16384
    assert not inventory.parse({android.SMAPS: "KernelPageSize:        0 kB\n"}).HasField("page_size_bytes")


@pytest.mark.parametrize(
    ("text", "free"),
    [
        (
            "Filesystem 1K-blocks Used Available Use% Mounted on\n/dev/dm-5 112938420 63210612 49596736  57% /data\n",
            49596736 << 10,
        ),
        ("Filesystem 512-blocks Used Available Capacity Mounted on\n/dev/very-long\n  100 60 40 60% /data\n", 40 * 512),
        ("df: /data: Permission denied\n", None),
        ("", None),
    ],
)
def test_free_space_of_a_phone_is_reported(text: str, free: int | None) -> None:
    assert android.disk_free_bytes({android.DISK: text}) == free


NAMES = [*android.INVENTORY_COMMANDS, *android.READING_COMMANDS, "getprop ro.soc.model", "getprop ro.product.model"]
TEXTS = [BATTERY.format(status=2), THERMAL, POWER, PROPERTIES]
changed = st.tuples(st.sampled_from(TEXTS), st.integers(0, 900), st.integers(0, 30), st.text(max_size=30)).map(
    lambda cut: cut[0][: cut[1]] + cut[3] + cut[0][cut[1] + cut[2] :]
)


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=200) | changed))
def test_odd_answers_never_break_the_parsers(facts: dict[str, str]) -> None:
    assert isinstance(inventory.parse(facts), device_pb2.Device)
    read = readings.parse(facts)
    assert not read.HasField("battery_share") or 0 <= read.battery_share <= 1
    assert all(-40 <= zone.temperature_c <= 150 for zone in read.zones)


NUMBERED = [
    android.BATTERY, android.THERMAL, android.DISK, android.SMAPS, "/proc/loadavg", "/proc/stat", "/proc/meminfo",
    "/sys/class/thermal/cooling_device0/cur_state",
]  # fmt: skip


@given(st.integers(0, 10**40), st.sampled_from(NUMBERED))
def test_numbers_beyond_all_measure_are_absent(number: int, name: str) -> None:
    texts = {
        android.BATTERY: f"  level: {number}\n  scale: {number}\n  temperature: {number}\n",
        android.THERMAL: f"Thermal Status: {number}\n\tTemperature{{mValue={number}, mType=0, mName=AP, mStatus=0}}\n",
        android.DISK: f"x 1K-blocks\ny {number} {number} {number} 5% /data\n",
        android.SMAPS: f"KernelPageSize: {number} kB\n",
        "/proc/loadavg": f"{number} 0 0 {number}/{number} 1\n",
        "/proc/stat": f"cpu  {' '.join([str(number)] * 10)}\n",
        "/proc/meminfo": f"MemTotal: {number} kB\nMemAvailable: {number} kB\n",
        "/sys/class/thermal/cooling_device0/cur_state": f"{number}\n",
    }
    facts = {name: texts[name], "/sys/class/thermal/cooling_device0/type": "cpufreq-cpu0\n"}
    assert isinstance(inventory.parse(facts), device_pb2.Device)
    read = readings.parse(facts)
    assert number < 10**15 or not (read.cooling or read.HasField("memory_available_bytes") or read.HasField("runnable"))
    assert (android.disk_free_bytes(facts) or 0) <= 10**15 * 1024
